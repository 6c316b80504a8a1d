"""Clients that hang up in the middle of a command, and requests that fail: other requests are not affected."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_serving import Served, serving
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.generate_body import parse_generate
from tidemill.actors.text.text import StopStrings


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def busy(served: Served) -> AsyncIterator[None]:
    """Keep the decoding thread in the middle of a step for the duration of the block."""
    begun, over = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        over.wait(LIMIT_S)

    stepping = served.engine.scheduler.call(step)
    try:
        await asyncio.to_thread(begun.wait, LIMIT_S)
        yield
    finally:
        over.set()
        await asyncio.wrap_future(stepping)


async def hang_up_on(served: Served, path: str, body: object) -> None:
    """Send a request, and close the connection once it is in the decoding thread's queue. Returns when the engine has
    noticed.
    """
    host, _, port = served.engine.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\n\r\n"
    )
    asked = served.engine.scheduler.calls.qsize()
    writer.write(head.encode() + content)
    await until(lambda: served.engine.scheduler.calls.qsize() > asked)
    writer.close()
    await until(lambda: not served.engine.server.listener._runner.server.connections)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": "nobody"}),
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
    ],
)
async def test_a_client_that_hangs_up_ends_nothing_but_its_connection(path: str, body: object, model_dir: Path) -> None:
    async with serving(model_dir) as served:
        async with busy(served):
            await hang_up_on(served, path, body)
        await asyncio.wrap_future(
            served.engine.scheduler.call(lambda: None)
        )  # calls are taken in order: the command is done
        assert served.engine.scheduler.alive
        assert served.engine.scheduler.paused == (path == "/pause_generation"), "what was asked for is done"
        await served.client.resume()
        assert len((await served.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True))["output_ids"]) == 3


async def test_a_call_that_was_taken_back_is_left_out(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        called: list[str] = []
        async with busy(served):
            assert served.engine.scheduler.call(lambda: called.append("taken back")).cancel()
            kept = served.engine.scheduler.call(lambda: called.append("kept"))
        await asyncio.wrap_future(kept)
        assert called == ["kept"]


async def innocent(served: Served) -> "asyncio.Task[Any]":
    """Start a request and return it while it is being decoded, some tokens in, and far from its end."""
    task = asyncio.create_task(served.generate([5, 6, 7], max_new_tokens=200, ignore_eos=True))
    await served.until(lambda: served.engine.scheduler.counters.steps > 2)
    return task


async def test_a_top_k_beyond_all_numbers_is_refused_and_fails_nobody_else(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        company = await innocent(served)
        params = {"max_new_tokens": 5, "sampling_seed": 3, "ignore_eos": True}
        status, answer = await served.post(
            "/generate", {"input_ids": [5, 6, 8], "sampling_params": {**params, "top_k": 10**20}}
        )
        assert (status, "top_k" in answer["error"]["message"]) == (400, True)
        made = [(await served.generate([5, 6, 8], **params, top_k=top_k))["output_ids"] for top_k in (2**31 - 1, -1)]
        assert made[0] == made[1]
        assert len((await company)["output_ids"]) == 200


async def test_more_responses_than_the_queue_ever_takes_are_refused_at_once(model_dir: Path) -> None:
    async with serving(model_dir, max_running=2, max_waiting=3) as served:
        for n in (6, 10**12):
            status, answer = await served.post(
                "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "n": n}}
            )
            assert (status, "at most 5 responses" in answer["error"]["message"]) == (400, True)
        body = {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 1, "n": n} for n in (2, 4)]}
        assert (await served.post("/generate", body))[0] == 400, "together"
        body = {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 1, "n": n} for n in (2, 3)]}
        assert len((await served.post("/generate", body))[1]) == 5


async def test_a_response_that_fails_by_itself_fails_alone(model_dir: Path) -> None:
    class Unreadable(StopStrings):
        def find(self, ids: Any, begun: Any = ()) -> str | None:
            raise RuntimeError("no such token")

    async with serving(model_dir) as served:
        company = await innocent(served)
        assert served.engine.text is not None
        await served.client.pause()  # nothing is decoded before it has these stop strings
        request = {"input_ids": [5], "sampling_params": {"ignore_eos": True}}
        progress = served.engine.backend.submit(parse_generate(request, served.engine.limits))
        progress.sequences[0].stop_strings = Unreadable(served.engine.text, ("x",))
        await served.client.resume()
        (failed,) = await progress.finished()
        assert "no such token" in (failed.error or "")
        assert len((await company)["output_ids"]) == 200
