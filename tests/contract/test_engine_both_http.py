"""The HTTP API of an engine, on the built-in one and (``make test-sglang``) on real SGLang: answers, streams, phases,
pauses, updates.
"""

import asyncio
import itertools
import json
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.engine_kinds import Kind
from tests.engine_serving import Served, greedy, told_log_probs
from tests.engine_watch import Watched, watching
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.errors import EngineUnavailable
from tidemill.bus.wire.messages import Sampling

CONTEXT = 4096
PROMPT = [5, 6, 7]
LONG = 600
SHORT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def dtype() -> str:
    return "float32"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed, max_position_embeddings=CONTEXT) for seed in range(2)]


@pytest.fixture(scope="module")
def first_model(directories: list[Path]) -> Path:
    return directories[0]


def running(kind: Kind, served: Served) -> AbstractAsyncContextManager[Watched]:
    """Ask for a response that is held after some steps, until its gate is opened."""
    return watching(served, PROMPT, gate=kind.hold(served, after=20), max_new_tokens=LONG, ignore_eos=True)


async def test_an_answer_has_what_sglangs_has(kind: Kind, first_model: Path) -> None:
    async with kind.serving(first_model) as served:
        body = {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True, "rid": "mine"}
        status, answer = await served.post("/generate", body)
        meta = answer["meta_info"]
        assert status == 200
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
        assert meta["weight_version"] == "0"
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
        assert [entry[1:] for entry in meta["output_token_logprobs"]] == [
            [token, None] for token in answer["output_ids"]
        ]
        assert meta["e2e_latency"] > 0
        assert served.engine.text is not None
        assert answer["text"] == served.engine.text.decode(answer["output_ids"])
        _, quiet = await served.post("/generate", body | {"return_logprob": False})
        assert "output_token_logprobs" not in quiet["meta_info"]
        status, answers = await served.post(
            "/generate", {"text": ["three plus", "four"], "sampling_params": SHORT, "rid": "r"}
        )
        assert [one["meta_info"]["id"] for one in answers] == ["r_0", "r_1"]
        assert [one["meta_info"]["prompt_tokens"] for one in answers] == [
            len(served.engine.text.encode(t)) for t in ("three plus", "four")
        ]


async def test_a_stream_is_cumulative_and_ends_whole(kind: Kind, first_model: Path) -> None:
    async with kind.serving(first_model) as served:
        params = SHORT | {"max_new_tokens": 40}
        whole = await served.generate(PROMPT, **params)
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "stream": True}
        async with served.session.post(served.engine.url + "/generate", json=body) as response:
            assert response.content_type == "text/event-stream"
            events = [line[6:] for line in (await response.text()).split("\n\n") if line]
        assert events.pop() == "[DONE]"
        states = [json.loads(event) for event in events]
        for before, after in itertools.pairwise(states):
            assert before["meta_info"]["finish_reason"] is None
            assert len(before["output_ids"]) < len(after["output_ids"]) or after["meta_info"]["finish_reason"]
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert (states[-1]["output_ids"], states[-1]["text"]) == (whole["output_ids"], whole["text"])
        for name in ("finish_reason", "weight_versions", "completion_tokens"):
            assert states[-1]["meta_info"][name] == whole["meta_info"][name]
        assert len(told_log_probs(states[-1])) == 40


async def test_an_id_that_ends_a_response_is_in_it_and_its_log_prob_too(kind: Kind, first_model: Path) -> None:
    async with kind.serving(first_model) as served:
        first = (await served.generate(PROMPT, **(SHORT | {"max_new_tokens": 6})))["output_ids"]
        stop = first[3]
        answer = await served.generate(PROMPT, temperature=0, max_new_tokens=6, stop_token_ids=[stop])
        until = first.index(stop) + 1
        assert answer["output_ids"] == first[:until]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert len(told_log_probs(answer)) == until == answer["meta_info"]["completion_tokens"]
        assert served.engine.text is not None and answer["text"] == served.engine.text.decode(first[: until - 1])


async def test_a_pause_aborts_unless_it_has_another_mode_and_unknown_modes_are_refused(
    kind: Kind, first_model: Path
) -> None:
    async with kind.serving(first_model) as served, running(kind, served) as one:
        await one.beyond(5)
        assert (await served.post("/pause_generation", {"mode": "gently"}))[0] == 400
        assert (await served.post("/pause_generation", {}))[0] == 200
        assert (await one.task)["meta_info"]["finish_reason"]["type"] == "abort"
        one.gate.open()
        await served.client.resume()
        await served.generate(PROMPT, **SHORT)
        assert (await served.post("/flush_cache?timeout=30"))[0] == 200


async def test_only_a_serving_engine_answers(kind: Kind, first_model: Path) -> None:
    async with kind.serving(first_model, version=4) as served:
        served.engine.phase = "catching up"
        for path in ("/health", "/health_generate"):
            assert (await served.get(path))[0] == 503
        assert not await served.client.healthy()
        with refusal(EngineUnavailable, engine=served.engine.url, reason=re.compile(r"\bversion 4$")):
            await served.client.generate(PROMPT, Sampling())
        await served.engine.probe()
        served.engine.phase = "serving"
        for path in ("/health", "/health_generate"):
            assert (await served.get(path))[0] == 200
        with refusal(ValueError, place="phase"):
            served.engine.phase = "asleep"
        for path in ("/model_info", "/get_model_info"):
            _, model = await served.get(path)
            assert (model["weight_version"], model["vocab_size"], model["has_tokenizer"]) == ("4", 299, True)
        for path in ("/server_info", "/get_server_info"):
            _, server = await served.get(path)
            assert (server["engine"], server["tp_size"], server["context_length"]) == (kind.name, 1, CONTEXT)
            assert (server["phase"], server["epoch"], server["weight_version"]) == ("serving", 0, "4")
        assert await served.client.version() == 4


async def test_draining_finishes_what_there_is_and_takes_nothing_new(kind: Kind, first_model: Path) -> None:
    async with kind.serving(first_model) as served, running(kind, served) as one:
        await one.beyond(5)
        drained = asyncio.create_task(served.engine.drain(LIMIT_S))
        await until(lambda: served.engine.phase == "draining")
        assert (await served.post("/generate", {"input_ids": PROMPT}))[0] == 503
        assert not drained.done()
        one.gate.open()
        assert await drained
        assert len((await one.task)["output_ids"]) == LONG


async def test_weights_come_from_a_directory(kind: Kind, directories: list[Path]) -> None:
    async with kind.serving(directories[0]) as served:
        body = {"input_ids": PROMPT, "min_version": 5, "min_version_timeout_s": 0.05}
        status, answer = await served.post("/generate", body)
        assert (status, "version 5 is not served: version 0 is" in answer["error"]["message"]) == (503, True)
        served.engine.phase = "stale"
        update = {"model_path": str(directories[1]), "weight_version": "5", "epoch": 2}
        status, answer = await served.post("/update_weights_from_disk", update)
        assert (status, answer["success"]) == (200, True) and answer["stall_s"] >= 0
        assert (served.engine.version, served.engine.epoch, served.engine.phase) == (5, 2, "serving")
        for wrong in ({"model_path": str(directories[1] / "nowhere")}, {"model_path": 5}, {"weight_version": "x"}):
            assert (await served.post("/update_weights_from_disk", update | wrong))[0] == 400, wrong
        assert served.engine.version == (5 if kind.in_standby else -1)
        assert (await served.post("/update_weights_from_disk", update))[0] == 200
        answer = await served.generate(PROMPT, **SHORT)
        assert answer["output_ids"] == await greedy(tiny_model(seed=1, max_position_embeddings=CONTEXT), PROMPT, 4)
