"""SGLang's HTTP API, as implemented by the built-in engine: answers, streams, refusals, abort, pause, limits,
draining.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_serving import Served, greedy, prompts, serving
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import BadRequest, EngineFailed, EngineUnavailable, VersionUnavailable
from tidemill.bus.wire.messages import Sampling, Span

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
HELD = 20
"""Decoding steps of an engine that is held afterwards, so that no response ends by itself."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with room for long responses."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


async def start(served: Served, prompt: list[int], rid: str, **params: Any) -> "asyncio.Task[tuple[int, Any]]":
    """Start a request. Returns when it is running."""
    before = len(served.engine.scheduler.running)
    body = {"input_ids": prompt, "sampling_params": params or LONG, "return_logprob": True, "rid": rid}
    task = asyncio.create_task(served.post("/generate", body))
    await served.until(lambda: len(served.engine.scheduler.running) > before)
    return task


async def test_lists_come_back_in_order(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        params = [
            {"max_new_tokens": 2, "n": 2, "ignore_eos": True, "sampling_seed": 1},
            {"max_new_tokens": 3, "ignore_eos": True},
        ]
        status, answers = await served.post(
            "/generate", {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": params, "rid": "r"}
        )
        assert status == 200
        assert [len(answer["output_ids"]) for answer in answers] == [2, 2, 3]
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 2, 3]
        assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1", "r_2"]
        assert answers[0]["output_ids"] != answers[1]["output_ids"]
        seeded = [
            await served.generate([5, 6], max_new_tokens=2, ignore_eos=True, sampling_seed=1 + place)
            for place in range(2)
        ]
        assert [answer["output_ids"] for answer in seeded] == [answer["output_ids"] for answer in answers[:2]]
        status, answers = await served.post(
            "/generate", {"text": ["three plus", "four"], "sampling_params": {"max_new_tokens": 1}}
        )
        assert served.engine.text is not None
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [
            len(served.engine.text.encode(t)) for t in ("three plus", "four")
        ]


async def test_stop_strings_end_and_are_cut_from_the_text(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        params = {"max_new_tokens": 60, "sampling_seed": 21, "ignore_eos": True}
        whole = await served.generate([5, 6, 7], **params)
        assert served.engine.text is not None
        text = served.engine.text.decode(whole["output_ids"])
        places = [
            at
            for at in range(12, len(text) - 3)
            if "\ufffd" not in text[at : at + 3] and text.find(text[at : at + 3]) == at
        ]
        stop = text[places[0] : places[0] + 3]
        answer = await served.generate([5, 6, 7], stop=["never seen", stop], **params)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == text[: text.find(stop)]
        ids = answer["output_ids"]
        assert ids == whole["output_ids"][: len(ids)]
        assert stop in served.engine.text.decode(ids)
        assert stop not in served.engine.text.decode(ids[:-1]), "it stopped a token too late"


BAD: list[tuple[Any, str]] = [
    ([1, 2], "JSON map"),
    ({}, "input_ids"),
    ({"input_ids": [1], "text": "x"}, "both"),
    ({"input_ids": []}, "at least one token"),
    ({"input_ids": [[1], []]}, "input_ids[1]"),
    ({"input_ids": "1 2"}, "list of integers"),
    ({"input_ids": [1, 2.5]}, "list of integers"),
    ({"input_ids": [1, "2"]}, "list of integers"),
    ({"input_ids": [[1], 2]}, "list of integers"),
    ({"input_ids": [1, 299]}, "0 .. 298, got 299"),
    ({"input_ids": [-1]}, "got -1"),
    ({"input_ids": [2**70]}, "input_ids"),
    ({"input_ids": [5] * 9000}, "longer than the model's context length (8192 tokens)"),
    ({"text": ""}, "at least one token"),
    ({"text": 7}, "string"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 4}}, "did you mean max_new_tokens?"),
    ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "did you mean temperature?"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature: want a number >= 0"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "'hot'"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_p": 1.1}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"n": 0}}, "n: want an integer >= 1, got 0"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"ignore_eos": 1}}, "ignore_eos"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": "x"}}, "sampling_seed"),
    ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p: not supported"),
    ({"input_ids": [1], "sampling_params": [{}, {}]}, "one for each of 1 prompts"),
    ({"input_ids": [1], "sampling_params": 3}, "want a map"),
    ({"input_ids": [1], "return_logprobs": True}, "did you mean return_logprob?"),
    ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
    ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
    ({"input_ids": [1], "min_version": -1}, "min_version"),
]


async def test_bad_requests_say_why_and_the_engine_lives_on(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        for body, why in BAD:
            status, answer = await served.post("/generate", body)
            assert status == 400, (body, answer)
            assert why in answer["error"]["message"], (body, answer)
        async with served.session.post(served.engine.url + "/generate", data=b"{not json") as response:
            assert response.status == 400
        assert len((await served.generate([5], max_new_tokens=2, ignore_eos=True, top_p=1, min_p=0))["output_ids"]) == 2
        assert await served.client.healthy()


async def test_abort_answers_with_what_there_is(model_dir: Path) -> None:
    async with serving(model_dir, max_running=2) as served:
        served.hold(after=HELD)
        first = await start(served, [5, 6], "first")
        second = await start(served, [5, 6], "second")
        waiting = asyncio.create_task(
            served.post("/generate", {"input_ids": [9], "sampling_params": LONG, "rid": "waiting"})
        )
        await served.until(lambda: len(served.engine.scheduler.waiting) == 1)
        assert (await served.post("/abort_request", {"rid": "first"}))[0] == 200
        status, answer = await first
        assert status == 200
        assert answer["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "Aborted",
            "status_code": None,
            "err_type": None,
        }
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) > 0
        assert not second.done()
        await served.client.abort()
        assert [(await task)[1]["meta_info"]["finish_reason"]["type"] for task in (second, waiting)] == [
            "abort",
            "abort",
        ]
        assert (await served.post("/abort_request", {"rid": "unknown"}))[0] == 200
        assert (await served.post("/abort_request", {}))[0] == 400
        assert served.engine.stats()["requests_aborted"] == 3


async def test_a_client_that_goes_away_frees_its_row(tmp_path: Path) -> None:
    async with serving(write_tiny_model(tmp_path, eos_token_id=None, max_position_embeddings=4096)) as served:
        served.hold(after=HELD)
        task = await start(served, [5, 6], "gone")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await served.until(lambda: not served.engine.scheduler.running)
        states = served.client.stream([5, 6], Sampling(max_new_tokens=4000, temperature=0))
        await anext(states)
        await states.aclose()
        await served.until(lambda: not served.engine.scheduler.running)
        await served.until(lambda: served.engine.stats()["requests_aborted"] == 2)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_everything_and_loses_nothing(model_dir: Path, mode: str) -> None:
    params = {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True}
    async with serving(model_dir) as served:
        want = (await served.generate([5, 6], **params))["output_ids"]
        gate = served.hold(after=HELD)
        running = await start(served, [5, 6], "running", **params)
        await served.client.pause(mode)
        gate.open()
        steps = served.engine.scheduler.counters.steps
        late = asyncio.create_task(served.generate([7], max_new_tokens=3, ignore_eos=True))
        await served.until(lambda: any(len(each.prompt) == 1 for each in served.engine.scheduler.waiting))
        assert not running.done()
        assert (await served.post("/flush_cache"))[0] == (400 if mode == "in_place" else 200)
        assert served.engine.scheduler.counters.steps == steps
        await served.client.resume()
        _, answer = await running
        assert answer["output_ids"] == want
        assert answer["meta_info"]["num_retractions"] == (mode == "retract")
        assert len((await late)["output_ids"]) == 3
        assert (await served.post("/flush_cache"))[0] == 200


async def test_a_full_queue_is_a_503_and_nothing_is_lost(model_dir: Path) -> None:
    async with serving(model_dir, max_running=2, max_waiting=3) as served:
        await served.client.pause()
        tasks = [asyncio.create_task(served.generate([5], max_new_tokens=1)) for _ in range(5)]
        await served.until(lambda: served.engine.stats()["waiting"] == 5)
        status, answer = await served.post("/generate", {"input_ids": [5]})
        assert (status, "queue is full" in answer["error"]["message"]) == (503, True)
        with refusal(EngineUnavailable, reason=re.compile(r"\b5 .*\b5$")):
            await served.client.generate([5], Sampling())
        await served.client.resume()
        assert len(await asyncio.gather(*tasks)) == 5


async def test_draining_finishes_what_there_is_and_takes_nothing_new(model_dir: Path) -> None:
    async with serving(model_dir) as served:
        gate = served.hold(after=HELD)
        running = await start(served, [5, 6], "running", max_new_tokens=500, ignore_eos=True)
        # This request waits for a version; the engine is draining when the version arrives.
        body = {"input_ids": [5], "min_version": 1, "min_version_timeout_s": LIMIT_S}
        waiting = asyncio.create_task(served.post("/generate", body))
        await served.until(lambda: served.engine.stats()["waiting"] == 1)
        drained = asyncio.create_task(served.engine.drain(LIMIT_S))
        await served.until(lambda: served.engine.phase == "draining")
        assert (await served.post("/generate", {"input_ids": [5]}))[0] == 503
        assert not drained.done()
        gate.open()
        assert await drained
        await served.engine.load_snapshot(model_dir, 1)
        status, answer = await waiting
        assert (status, "draining" in answer["error"]["message"]) == (503, True)
        assert len((await running)[1]["output_ids"]) == 500
    async with serving(model_dir) as served:
        served.hold(after=HELD)
        running = await start(served, [5, 6], "running")
        assert not await served.engine.drain(0.01)
        await served.engine.close()
        status, answer = await running
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")


async def test_what_it_says_of_itself(model_dir: Path) -> None:
    async with serving(model_dir, version=4, max_running=8) as served:
        for path in ("/model_info", "/get_model_info"):
            _, model = await served.get(path)
            assert (model["weight_version"], model["model_type"], model["architectures"]) == (
                "4",
                "qwen3",
                ["Qwen3ForCausalLM"],
            )
        for path in ("/server_info", "/get_server_info"):
            _, server = await served.get(path)
            assert (server["tp_size"], server["context_length"], server["phase"]) == (1, 8192, "serving")
            assert (server["device"], server["dtype"]) == ("cpu", "float32")
        served.hold(after=HELD)
        task = await start(served, [5, 6], "running")
        _, loads = await served.get("/v1/loads?include=core")
        assert (loads["loads"][0]["num_running_reqs"], loads["loads"][0]["max_running_requests"]) == (1, 8)
        await served.client.abort()
        await task
        assert await served.client.version() == 4
        stats = served.engine.stats()
        assert stats["requests_aborted"] == 1
        assert stats["tokens_generated"] > 0
        assert 0 <= stats["waiting_share"] <= 1


async def test_the_client_gives_what_the_engine_made(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model_dir, version=2) as served:
        sampling = Sampling(max_new_tokens=6, seed=9, temperature=0.8, top_k=50)
        whole = await served.client.generate(np.array([5, 6], np.int32), sampling, request_id="x")
        assert (whole.id, whole.finish, whole.prompt_tokens) == ("x", "length", 2)
        assert (whole.tokens.dtype, whole.log_probs.dtype) == (np.int32, np.float32)
        assert whole.spans == (Span(version=2, num_tokens=6),)
        assert whole.version == 2
        states = [state async for state in served.client.stream([5, 6], sampling)]
        np.testing.assert_array_equal(states[-1].tokens, whole.tokens)
        assert [state.finish for state in states[:-1]] == [None] * (len(states) - 1)
        with refusal(BadRequest, reason=re.compile(r"\b298\b")):
            await served.client.generate([300], sampling)
        with refusal(BadRequest, reason=re.compile(r"\b298\b")):
            await anext(served.client.stream([300], sampling))
        asked, serve_version = list[tuple[int, float]](), served.engine.serve_version

        async def soon(version: int, timeout_s: float) -> None:
            asked.append((version, timeout_s))
            await serve_version(version, 0.05)

        monkeypatch.setattr(served.engine, "serve_version", soon)
        with refusal(VersionUnavailable, reason=re.compile(r"\b3\b")):
            await served.client.generate([5], sampling, min_version=3, timeout_s=30.0)
        assert asked == [(3, pytest.approx(27.0))], "the engine gives up before its client"
        monkeypatch.undo()
        await served.client.pause()
        with refusal(EngineUnavailable, reason=re.compile(r"\b0\.05 s$")):
            await served.client.generate([5], sampling, timeout_s=0.05)
    with pytest.raises(EngineUnavailable):
        await served.client.generate([5], sampling)
    assert not await served.client.healthy()
    await served.client.close()


async def test_broken_weights_fail_the_request_and_not_the_engine(tmp_path: Path) -> None:
    model = tiny_model()
    write_tiny_model(tmp_path)
    model.model.layers[0].self_attn.v_proj.weight.data[0] = float("nan")  # so that kept values are not finite either
    model.save_pretrained(tmp_path)
    async with serving(tmp_path) as served:
        with refusal(EngineFailed, reason=re.compile(r"^HTTP 500: .*\bversion 0$")):
            await served.client.generate([5, 6, 7, 8], Sampling())
        assert (await served.get("/health_generate"))[0] == 503
        write_tiny_model(tmp_path)
        assert (await served.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "1"}))[
            0
        ] == 200
        assert len((await served.client.generate([5], Sampling(max_new_tokens=2, stop_token_ids=()))).tokens) > 0
        # A short prompt takes the failed one's row, beside a long one: the masked values there must be finite.
        params = {"temperature": 0, "max_new_tokens": 3}
        short, _ = await served.together([([5], params), ([9] * 8, params)])
        assert short["output_ids"] == await greedy(tiny_model(), [5], 3)
        assert served.engine.stats()["requests_failed"] == 2


async def test_ids_that_end_come_from_all_three_files(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [40, 41]}))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": {"content": "<|im_start|>"}}))
    async with serving(tmp_path) as served:
        assert served.engine.eos_ids == {2, 40, 41, 1}
        params = {"max_new_tokens": 250, "n": 16, "sampling_seed": 0}
        _, answers = await served.post("/generate", {"input_ids": [5], "sampling_params": params})
        ended = [answer for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
        assert len(ended) > 8
        for answer in ended:
            assert answer["meta_info"]["finish_reason"]["matched"] == answer["output_ids"][-1]
            assert [token in served.engine.eos_ids for token in answer["output_ids"]] == [False] * (
                len(answer["output_ids"]) - 1
            ) + [True]


async def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    (write_tiny_model(tmp_path) / "tokenizer.json").unlink()
    async with serving(tmp_path) as served:
        answer = await served.generate(prompts(1)[0], max_new_tokens=3)
        assert "text" not in answer
        for body in ({"text": "hello"}, {"input_ids": [5], "sampling_params": {"stop": "x"}}):
            status, refusal = await served.post("/generate", body)
            assert (status, "tokenizer.json" in refusal["error"]["message"]) == (400, True)


async def test_an_engine_that_is_no_engine_is_unavailable() -> None:
    client = HttpEngine("http://127.0.0.1:9")
    try:
        with refusal(EngineUnavailable, engine=re.compile(r"127\.0\.0\.1:9$")):
            await client.version()
    finally:
        await client.close()
