"""Invalid requests are a 400, never a 500, at the built-in engine, at a SGLang server's proxy and at the router."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine_serving import serving
from tests.examples import some
from tests.refusals import refusal
from tests.router_kit import Faulty, faulty, routing
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.errors import BadRequest, UnsupportedModel
from tidemill.actors.generate_body import parse_generate
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.arguments import release_of
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.registry import MORE_MODELS

EXACT = "tidemill.actors.router.token_history:TokenHistory"
HALF = "3\ud83d"
"""The rest of an emoji that was cut in two."""
PARAMS = {"max_new_tokens": 1}
USER = {"role": "user", "content": "3"}
GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 9,
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
    "timeout_s": 0.01,
}
BUCKET: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bad") / "model", max_position_embeddings=64)


class Asked:
    """A server that takes requests."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        """Post ``body``: as JSON, or bytes unchanged. Returns status and text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(
            self._url + path, data=data, headers={"Content-Type": "application/json"}
        ) as response:
            return response.status, await response.text()


@asynccontextmanager
async def builtin(model_dir: Path) -> AsyncIterator[Asked]:
    async with serving(model_dir) as served:
        yield Asked(served.engine.url, served.session)


@asynccontextmanager
async def router(model_dir: Path) -> AsyncIterator[Asked]:
    config = {"middleware": (EXACT,), "model": str(model_dir), "wait_s": 0.1}
    async with serving(model_dir) as served, routing(served.engine.url, **config) as door:
        yield Asked(door.url, door.session)


@asynccontextmanager
async def proxy(model_dir: Path) -> AsyncIterator[Asked]:
    """Start a proxy in front of a server that would accept anything."""
    async with faulty() as server, proxying(model_dir, server) as asked:
        server.does = "generate"
        yield asked


@asynccontextmanager
async def proxying(model_dir: Path, server: Faulty, **config: Any) -> AsyncIterator[Asked]:
    settings = EngineConfig(kind="sglang", sglang=SglangConfig(url=server.url), **config)
    engine = SglangEngine(model_dir, settings, release=release_of("e", "0.5.23"), authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    await engine.start()
    engine.phase = "serving"
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Asked(engine.url, session)
    finally:
        await engine.close()


Place = Callable[[Path], AbstractAsyncContextManager[Asked]]
PLACES = pytest.mark.parametrize("place", [builtin, router, proxy], ids=lambda place: str(place.__name__))


@PLACES
@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/generate", b'{"text": "3\xed\xa0\xbd"}', "body: want JSON"),
        ("/generate", b"[" * 100_000, "at most 100 deep"),
        ("/generate", b'{"text": ' + b"[" * 100 + b"]" * 100 + b"}", "at most 100 deep"),
    ],
)
async def test_requests_that_no_engine_supports_are_refused(
    place: Place, path: str, body: Any, why: str, model_dir: Path
) -> None:
    async with place(model_dir) as asked:
        status, answer = await asked.post(path, body)
        assert (status, why in answer) == (400, True), answer


@pytest.mark.parametrize("place", [builtin, router], ids=["builtin", "router"])
async def test_half_a_surrogate_pair_is_replaced(place: Place, model_dir: Path) -> None:
    """A tool that cuts its text within an emoji, or a file read with ``surrogateescape``, ends no episode."""

    def bodies(half: str) -> list[tuple[str, dict[str, Any]]]:
        call = {"id": half, "type": "function", "function": {"name": half, "arguments": json.dumps({half: half})}}
        result = {"role": "tool", "content": [{"type": "text", "text": half}]}
        return [
            ("/generate", {"text": half, "rid": half, "sampling_params": {**PARAMS, "stop": half}}),
            ("/v1/completions", {"prompt": half, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{**USER, "content": half}, result], "max_tokens": 1}),
            (
                "/v1/chat/completions",
                {"messages": [USER, {"role": "assistant", "content": half, "tool_calls": [call]}], "max_tokens": 1},
            ),
        ]

    async with place(model_dir) as asked:
        for (path, body), (_, whole) in zip(bodies(HALF), bodies("3\ufffd"), strict=True):
            (status, answer), (wanted, other) = await asked.post(path, body), await asked.post(path, whole)
            assert (status, status == 200 or "writes no tool_calls" in answer) == (wanted, True), answer
            found, same = (json.loads(text) for text in (answer, other))
            if status == 200:
                prompts = [
                    (each["usage"] if "usage" in each else each["meta_info"])["prompt_tokens"] for each in (found, same)
                ]
                assert prompts[0] == prompts[1]


@pytest.mark.parametrize("place", [builtin, router], ids=["builtin", "router"])
async def test_chats_and_completions_without_valid_text_are_refused(place: Place, model_dir: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}]
    deep = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 3000}}]
    cases: list[tuple[str, Any, str]] = [
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (
            "chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": deep}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ]
    async with place(model_dir) as asked:
        for path, body, param in cases:
            status, answer = await asked.post(f"/v1/{path}", {**body, "max_tokens": 1})
            assert status == 400, (body, answer)
            assert json.loads(answer)["error"]["param"] == param
        status, answer = await asked.post("/v1/chat/completions", b"{")
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
        body = {"messages": [USER, {"role": "assistant", "tool_calls": calls}], "max_tokens": 1}
        assert (await asked.post("/v1/chat/completions", body))[0] in (200, 400), "whether the template shows it"


@pytest.mark.parametrize("place", [builtin, proxy], ids=["builtin", "proxy"])
@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/generate", {"input_ids": [5], "sampling_params": PARAMS, "min_version": float("inf")}, "min_version: want"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": PARAMS, "min_version_timeout_s": float("nan")},
            "min_version_timeout_s: want",
        ),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": PARAMS, "min_version_timeout_s": 10**400},
            "min_version_timeout_s: want",
        ),
        (
            "/init_weights_update_group",
            {**GROUP, "master_port": 70000},
            "master_port: want an integer <= 65535, got 70000",
        ),
        ("/init_weights_update_group", {**GROUP, "master_port": True}, "master_port: want an integer, got True"),
        *(
            (path, {**body, "timeout_s": bad}, "timeout_s: want a number")
            for path, body in (("/init_weights_update_group", GROUP), ("/update_weights_from_distributed", BUCKET))
            for bad in ("x", float("nan"), -1, 0, 10**400, None, True)
        ),
    ],
)
async def test_numbers_out_of_range_are_refused(place: Place, path: str, body: Any, why: str, model_dir: Path) -> None:
    async with place(model_dir) as asked:
        status, answer = await asked.post(path, body)
        assert (status, why in answer) == (400, True), answer


TINY = [1e-320, 1e-300, 1e-46, 1e-40, 1e-30, 9e-7, 1e7, 1e39, 1e300]


@pytest.mark.parametrize("place", [builtin, router, proxy], ids=["builtin", "router", "proxy"])
async def test_a_temperature_by_which_no_score_can_be_divided_is_refused(place: Place, model_dir: Path) -> None:
    """Scores are numbers of 32 bits. A request that only a teacher gets, for the log-probs of given tokens, is refused
    likewise.
    """
    scores = {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 0}
    async with place(model_dir) as asked:
        for temperature in TINY:
            params = {"temperature": temperature}
            for body in (
                {"input_ids": [5], "sampling_params": {**PARAMS, **params}},
                scores | {"sampling_params": {"max_new_tokens": 0, **params}},
            ):
                status, answer = await asked.post("/generate", body)
                assert (status, "sampling_params.temperature: want" in answer) == (400, True), (temperature, answer)
        for temperature in (0, 1e-6, 1e-3, 1e6):
            assert (
                await asked.post(
                    "/generate", {"input_ids": [5], "sampling_params": {**PARAMS, "temperature": temperature}}
                )
            )[0] == 200
        for path, body in (("completions", {"prompt": "3"}), ("chat/completions", {"messages": [USER]})):
            status, answer = await asked.post(f"/v1/{path}", {**body, "max_tokens": 1, "temperature": 1e-300})
            assert (status, "temperature: want" in answer) == (400, True), answer


async def test_a_text_of_no_tokens_is_refused_at_a_proxy(model_dir: Path) -> None:
    async with proxy(model_dir) as asked:
        for text in ("", [""], ["3", ""]):
            status, answer = await asked.post("/generate", {"text": text, "sampling_params": PARAMS})
            assert (status, "text: want at least one token" in answer) == (400, True), answer


async def test_requests_beyond_the_waiting_limit_get_503_at_a_proxy(model_dir: Path) -> None:
    async with faulty() as server, proxying(model_dir, server, max_running=2, max_waiting=3) as asked:
        server.does = "hang"
        body = {"input_ids": [[5], [6]], "sampling_params": PARAMS}
        waiting = [asyncio.create_task(asked.post("/generate", body)) for _ in range(2)]
        await reached(server, 2)
        status, answer = await asked.post("/generate", body)
        assert (status, "the queue is full: 4 unfinished requests, at most 5" in answer) == (503, True), answer
        last = asyncio.create_task(asked.post("/generate", {"input_ids": [5], "sampling_params": PARAMS}))
        await reached(server, 3)
        for task in (*waiting, last):
            task.cancel()
        await asyncio.gather(*waiting, last, return_exceptions=True)


async def test_a_prompt_beyond_the_room_for_keys_and_values_is_refused_at_a_proxy(model_dir: Path) -> None:
    """SGLang would refuse it, too, and would end responses early that do not fit beside their prompt."""
    async with faulty() as server, proxying(model_dir, server, kv_tokens=4) as asked:
        server.does = "generate"
        for length, expected in ((3, 200), (4, 400)):
            status, answer = await asked.post("/generate", {"input_ids": [5] * length, "sampling_params": PARAMS})
            assert (status, "raise engine.kv_tokens" in answer) == (expected, expected == 400), answer


@pytest.mark.parametrize(
    ("settings", "binding"),
    [
        ({"arguments": {"max-total-tokens": 4}}, "engine.sglang.arguments.max_total_tokens"),
        ({"arguments": {"tp_size": 1}}, "engine.kv_tokens"),
        ({"arguments": {"context_length": 4}}, ""),
        ({"arguments": {"max-total-tokens": 4}, "url": "http://127.0.0.1:9"}, "engine.kv_tokens"),
    ],
)
def test_the_setting_that_bounds_a_prompt_is_named(model_dir: Path, settings: dict[str, Any], binding: str) -> None:
    sglang = SglangConfig(environment={MORE_MODELS: "mine"}, **settings)
    config = EngineConfig(kind="sglang", sglang=sglang, kv_tokens=4)
    engine = SglangEngine(model_dir, config, version=-1, authority=Authority(unguarded=True))
    engine.load()
    with pytest.raises(BadRequest) as refused:
        parse_generate({"input_ids": [5] * 5}, engine.limits)
    assert str(refused.value).partition("raise ")[2].rstrip(".") == binding


@pytest.mark.parametrize("odd", [{"num_experts_per_tok": None}, {"num_hidden_layers": None}])
async def test_a_proxy_without_the_models_routing_serves_it(
    model_dir: Path, tmp_path: Path, odd: dict[str, Any]
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model/config.json"
    routing = {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, **odd}
    file.write_text(json.dumps(json.loads(file.read_text()) | routing))
    async with faulty() as server, proxying(tmp_path / "model", server) as asked:
        server.does = "generate"
        status, answer = await asked.post("/generate", {"input_ids": [5], "sampling_params": PARAMS})
        assert status == 200, answer
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": None}))
    settings = EngineConfig(kind="sglang", sglang=SglangConfig(url="http://127.0.0.1:9"))
    with refusal(UnsupportedModel, where=str(file), reason=re.compile("want vocab_size")):
        SglangEngine(file.parent, settings, authority=Authority(unguarded=True)).load()


async def reached(server: Faulty, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: server.paths.count("/generate") >= count)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 1e-300, 1e-40, 1e39, 2**63, 10**400, float("inf")),
    *("", "\x00", "[" * 3000, [], {}, [None], [2**70]),
)
GENERATE = (
    *(
        "text",
        "input_ids",
        "sampling_params",
        "rid",
        "stream",
        "return_logprob",
        "continued_tokens",
        "min_version",
        "min_version_timeout_s",
    ),
    *(
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "lora_path",
        "priority",
        "extra_key",
        "session_id",
        "unknown",
    ),
)
SAMPLING = (
    *(
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_new_tokens",
        "n",
        "sampling_seed",
    ),
    *("skip_special_tokens", "no_stop_trim", "min_p", "logit_bias", "stop_regex"),
)
OPENAI = (
    *(
        "model",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "n",
        "stop",
        "seed",
        "logprobs",
        "stream_options",
    ),
    *("top_logprobs", "logit_bias", "rid", "min_version", "return_token_ids", "user", "best_of", "echo"),
)
CHAT = ("messages", "tools", "tool_choice", "response_format", "chat_template_kwargs", "add_generation_prompt")
MESSAGE = ("role", "content", "tool_calls", "name", "tool_call_id")
UPDATES = {
    "/init_weights_update_group": (
        {**GROUP},
        ("epoch", "master_address", "rank_offset", "world_size", "backend", "group_name"),
    ),
    "/destroy_weights_update_group": ({}, ("group_name",)),
    "/update_weights_from_distributed": (
        BUCKET,
        ("names", "dtypes", "shapes", "group_name", "load_format", "weight_version"),
    ),
    "/receive_push": ({"buckets": [BUCKET]}, ("buckets", "group_name", "weight_version", "serve", "timeout_s")),
    "/begin_weight_update": ({}, ("weight_version",)),
    "/end_weight_update": ({}, ("weight_version",)),
    "/update_weights_from_disk": ({}, ("model_path", "weight_version")),
    "/weights_checker": ({}, ("action",)),
    "/weights_checksums": ({}, ("of",)),
    "/abort_request": ({}, ("rid",)),
}


def odd() -> list[tuple[str, Any]]:
    """Return requests of which one field is odd."""
    wait = {"min_version_timeout_s": 0.01}
    found: list[tuple[str, Any]] = []
    for value in ODD:
        found += [
            ("/generate", {"input_ids": [5], **wait, "sampling_params": PARAMS, name: value}) for name in GENERATE
        ]
        found += [("/generate", {"text": "3", **wait, "sampling_params": {**PARAMS, name: value}}) for name in SAMPLING]
        for path, given, more in (
            ("completions", {"prompt": "3"}, ("prompt",)),
            ("chat/completions", {"messages": [USER]}, CHAT),
        ):
            found += [(f"/v1/{path}", {**given, **wait, "max_tokens": 1, name: value}) for name in (*OPENAI, *more)]
        found += [("/v1/chat/completions", {"messages": [{**USER, name: value}], "max_tokens": 1}) for name in MESSAGE]
        found += [("/retrieve_from_text", {name: value}) for name in ("text", "messages")]
    pushes = [
        ("/receive_push", {"buckets": [{**BUCKET, name: value}]})
        for value in ODD
        for name in ("names", "dtypes", "shapes")
    ]
    updates = [
        (path, {**body, name: value}) for value in ODD for path, (body, names) in UPDATES.items() for name in names
    ]
    return some(found, 3) + pushes + updates  # last: a push that was begun is waited for


@PLACES
async def test_odd_input_never_gets_a_500(place: Place, model_dir: Path) -> None:
    async with place(model_dir) as asked:
        for path, body in odd():
            status, answer = await asked.post(path, body)
            assert status != 500, (path, body, answer)
