"""Long texts: one that cannot fit is refused by its length, and the tokens of any other are made beside the event
loop.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_serving import serving
from tests.router_kit import routing
from tests.tiny_models import write_tiny_model
from tests.unit.test_rendering import write_tokenizer
from tests.waits import LIMIT_S
from tidemill.actors.errors import BadRequest
from tidemill.actors.openai import openai_api
from tidemill.actors.router.chats import RenderedChats
from tidemill.actors.text.rendering import Renderer
from tidemill.actors.text.text import LONG, Text

CONTEXT = 8192
FITS, HUGE = "ab " * (LONG // 2), "1" * 900_000
"""A text of more tokens than the context, which only counting shows, and one that cannot fit whatever its tokens."""
BODIES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "/generate": lambda text: {"text": ["ab", text]},
    "/v1/completions": lambda text: {"model": "m", "prompt": ["ab", text]},
    "/v1/chat/completions": lambda text: {
        "model": "m",
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": text}],
    },
    "/v1/messages": lambda text: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"model": "m", "input": text},
}
OF_ENGINE = ("/generate", "/v1/completions", "/v1/chat/completions")


class Held:
    """A tokenizer that waits before it tokenizes a long text, until it is released."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begun, self.release = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        if any(len(text) > LONG for text in texts):
            self.begun.set()
            assert self.release.wait(LIMIT_S)
        return self._tokenizer.encode_batch(texts, **options)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=CONTEXT)


@asynccontextmanager
async def doors(model_dir: Path) -> AsyncIterator[dict[str, tuple[Any, Held]]]:
    """The built-in engine and a router before it, each with its tokenizer."""
    async with (
        serving(model_dir) as served,
        routing(
            served.engine.url, middleware=("tidemill.actors.router.token_history:TokenHistory",), model=str(model_dir)
        ) as door,
    ):
        found = {}
        for name, client, text in (
            ("engine", served, served.engine.text),
            ("router", door, door.router._middleware[0]._text),
        ):
            text.tokenizer = Held(text.tokenizer)
            found[name] = client, text.tokenizer
        yield found


async def test_a_text_that_cannot_fit_is_refused_untokenized(model_dir: Path) -> None:
    async with doors(model_dir) as found:
        for name, (client, held) in found.items():
            for path in OF_ENGINE if name == "engine" else BODIES:
                status, answer = await client.post(path, BODIES[path](HUGE))
                assert status == 400 and "context length" in str(answer), (name, path, str(answer)[:300])
            assert not held.begun.is_set()


@pytest.mark.parametrize(
    ("name", "path"), [*(("engine", path) for path in OF_ENGINE), *(("router", path) for path in BODIES)]
)
async def test_requests_are_answered_while_a_long_text_is_tokenized(model_dir: Path, name: str, path: str) -> None:
    async with doors(model_dir) as found:
        client, held = found[name]
        long = asyncio.create_task(client.post(path, BODIES[path](FITS)))
        try:
            assert await asyncio.to_thread(held.begun.wait, LIMIT_S)
            status, _ = await client.get("/health")
            assert status == 200
            status, answer = await client.post("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 1}})
            assert status == 200, answer
            assert not long.done()
        finally:
            held.release.set()
        status, answer = await long
        assert status == 400 and "context length" in str(answer), str(answer)[:300]


async def test_a_renderer_works_beside_the_loop_and_refuses_by_length(tmp_path: Path) -> None:
    directory = write_tokenizer("qwen3", tmp_path / "model")
    text = Text.read(directory)
    assert text is not None
    text = text.bounded(CONTEXT)
    held = text.tokenizer = Held(text.tokenizer)
    chats = RenderedChats(Renderer.read("qwen3", {}, directory, text), 1 << 20)
    asked = asyncio.create_task(chats.ask(openai_api.parse(BODIES["/v1/chat/completions"](FITS), chat=True), ""))
    assert await asyncio.to_thread(held.begun.wait, LIMIT_S)
    assert not asked.done()
    held.release.set()
    assert len((await asked).ids) > CONTEXT
    with pytest.raises(BadRequest, match="context length"):
        await chats.ask(openai_api.parse(BODIES["/v1/chat/completions"](HUGE), chat=True), "")
