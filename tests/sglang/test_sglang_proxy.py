"""Requests to a real SGLang server through its proxy: invalid ones one by one, and requests through the router. None
ends the server.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_push import joined, named
from tests.engine_serving import Served, log_probs_of, scores, told_log_probs
from tests.router_kit import routing
from tests.sglang.server import CONTEXT, config, serving
from tests.waits import LIMIT_S, until
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.server_process import POLL_S
from tidemill.bus.wire.messages import Sampling

TOLERANCE = 1e-3
PROMPT = [5, 6, 7, 8]
SHORT = {"sampling_params": {"max_new_tokens": 2}}
NAN, LARGE = float("nan"), 10**6
SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (0, -1, "x", 2.5, True, LARGE),
    "max_new_tokens": (-1, "x", LARGE, 2.5, [1]),
    "temperature": (NAN, float("inf"), -1, "x"),
    "top_p": (0, 2, NAN, "x"),
    "top_k": (-5, "x", 2.5),
    "min_p": (NAN, 2),
    "repetition_penalty": (NAN, -1, "x"),
    "stop": (5, [None], {}),
    "stop_token_ids": ([-1], [299], [2**40], ["x"], [2.5], 5),
    "stop_regex": ("(", 5, [")"]),
    "min_new_tokens": (-1, "x"),
    "sampling_seed": ("x", 2.5),
    "logit_bias": ({"400": 1}, {"-1": 1}, {"x": 1}, {"5": NAN}, [1]),
    "regex": ("(",),
    "json_schema": ("{",),
    "structural_tag": ("x", 5),
    "ignore_eos": ("x", 5),
    "stream_interval": (0, -1, "x"),
    "frequency_penalty": (NAN, "x", 5),
    "custom_params": (5,),
    "unknown_param": (1,),
}
BODY: dict[str, tuple[Any, ...]] = {
    "input_ids": (
        [],
        [[]],
        [5.5],
        ["a"],
        [True],
        [[[5]]],
        [[5], [6, "x"]],
        {},
        "x",
        5,
        [299],
        [-1],
        [2**31],
        [5] * CONTEXT,
        None,
    ),
    "rid": (5, "", [], ["a", "b"], {}),
    "sampling_params": (5, "x", [], [{}, {}], [[]]),
    "logprob_start_len": ("x", LARGE, -5),
    "top_logprobs_num": ("x", -1, 300, LARGE),
    "return_logprob": ("x", 5),
    "stream": ("x",),
    "priority": ("x",),
    "extra_key": (5, ["a"]),
    "input_embeds": ([[0.1]], 5),
    "session_params": ({}, {"id": "x"}, 5),
    "image_data": ("x",),
    "return_hidden_states": (True, "x"),
    "return_routed_experts": (True,),
    "max_thinking_tokens": (5,),
    "token_ids_logprob": ([299], [-1], ["x"], 5),
    "positional_embed_overrides": ([1], 5, "x"),
    "lora_path": ("nobody",),
    "custom_logit_processor": ("x",),
    "routed_dp_rank": (5, -1),
    "min_version": (-1, "x"),
    "text": ("both",),
}
NO_TOKENS: tuple[Any, ...] = ("", [""], ["3", ""])
HARMLESS = ({"unknown_field": 1}, {"priority": 5}, {"extra_key": "x"}, {"return_logprob": True, "top_logprobs_num": 2})


async def lives(served: Served) -> bool:
    return len((await served.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_wrong_request_is_refused_and_ends_nothing(
    python: str, server: str, directories: list[Path], stream: bool
) -> None:
    """Every invalid field is sent alone; most are refused, the few that SGLang accepts are answered; the server
    survives each.
    """
    async with serving(python, server, directories[0]) as served:
        good = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "stream": stream}
        wrong = [
            (name, value, {**good, "sampling_params": {"max_new_tokens": 2, name: value}})
            for name in SAMPLING
            for value in SAMPLING[name]
        ]
        wrong += [(name, value, {**good, name: value}) for name in BODY for value in BODY[name]]
        wrong += [("text", value, {**good, "input_ids": None, "text": value}) for value in NO_TOKENS]
        taken = []
        for name, value, body in wrong:
            async with served.session.post(served.engine.url + "/generate", data=json.dumps(body)) as response:
                text = await response.text()
                refused = response.status in (400, 422) or (stream and '"error"' in text)
                assert refused or response.status == 200, (name, value, response.status, text[:300])
            if not refused:
                taken.append((name, value))
            assert await lives(served), (name, value)
        never = {
            "logprob_start_len",
            "max_new_tokens",
            "top_logprobs_num",
            "token_ids_logprob",
            "ignore_eos",
            "n",
            "input_ids",
            "rid",
            "sampling_params",
            "stop_token_ids",
            "stop_regex",
            "positional_embed_overrides",
            "temperature",
            "text",
        }
        assert not {name for name, _ in taken} & never, taken
        for more in HARMLESS:
            assert (await served.post("/generate", {**good, "stream": False, **more}))[0] == 200, more
        for path in (
            "/abort_request",
            "/pause_generation",
            "/flush_cache",
            "/update_weights_from_disk",
            "/init_weights_update_group",
        ):
            async with served.session.post(
                served.engine.url + path, data=b'{"mode": 5, "rid": 5, "model_path": 5}'
            ) as response:
                assert response.status in (200, 400, 422), (path, await response.text())
        await served.client.resume()
        assert await lives(served)


async def test_what_another_request_began_is_continued(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """An engine that has no state of the request continues it; also as a stream, and after an abort."""
    async with serving(python, server, directories[0]) as served:
        sampling = Sampling(max_new_tokens=400, temperature=1.0)
        asked = asyncio.create_task(served.client.generate(np.array(PROMPT, np.int32), sampling, request_id="begun"))
        await asyncio.sleep(0.2)
        await served.client.abort("begun")
        begun = await asked
        while begun.finish == "stop" or not 0 < len(begun.tokens) < sampling.max_new_tokens:
            begun = await served.client.generate(np.array(PROMPT, np.int32), Sampling(max_new_tokens=5))
        whole = await served.client.generate(np.array(PROMPT, np.int32), sampling, begun=begun)
        *_, streamed = [one async for one in served.client.stream(np.array(PROMPT, np.int32), sampling, begun=begun)]
    for made in (whole, streamed):
        assert made.finish in ("stop", "length") and made.prompt_tokens == len(PROMPT)
        assert made.tokens[: len(begun.tokens)].tolist() == begun.tokens.tolist()
        assert len(begun.tokens) < len(made.tokens) <= 400
        wanted = log_probs_of(await scores(models[0], PROMPT, made.tokens.tolist()), made.tokens.tolist())
        assert np.abs(made.log_probs - wanted).max() < TOLERANCE


async def test_the_cache_is_flushed_when_nobody_needs_it(python: str, server: str, directories: list[Path]) -> None:
    prompt = list(range(5, 69))
    async with serving(python, server, directories[0]) as served:
        await served.generate(prompt, max_new_tokens=2)
        assert (await served.generate(prompt, max_new_tokens=2))["meta_info"]["cached_tokens"] > 0
        asked = asyncio.ensure_future(served.generate(PROMPT, max_new_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.1)
        assert (await served.post("/flush_cache"))[0] in (200, 400)
        assert len((await asked)["output_ids"]) == 400, "who is generating is not harmed"
        assert (await served.post("/flush_cache?timeout=30"))[0] == 200, "SGLang is idle a moment after its answer"
        assert (await served.generate(prompt, max_new_tokens=2))["meta_info"]["cached_tokens"] == 0


async def test_the_router_in_front_of_it(python: str, server: str, directories: list[Path], models: list[Any]) -> None:
    async with serving(python, server, directories[0]) as served, routing(served.engine.url) as door:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
            "return_logprob": True,
        }
        status, whole = await door.post("/generate", body)
        assert status == 200
        wanted = log_probs_of(await scores(models[0], PROMPT, whole["output_ids"]), whole["output_ids"])
        assert np.abs(told_log_probs(whole) - wanted).max() < TOLERANCE
        assert whole["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 64}]
        async with door.session.post(door.url + "/generate", json={**body, "stream": True}) as response:
            states = [
                json.loads(line[6:]) for line in (await response.text()).split("\n") if line.startswith("data: {")
            ]
        assert len(states[-1]["output_ids"]) == 64 and states[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert len(states) > 1, "it came piece by piece"
        chat = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 8, "model": "default"}
        status, said = await door.post("/v1/chat/completions", chat)
        assert status == 200 and said["choices"][0]["message"]["role"] == "assistant", said
        assert said["usage"]["completion_tokens"] <= 8
        async with door.session.post(door.url + "/v1/chat/completions", json={**chat, "stream": True}) as response:
            events = [line for line in (await response.text()).split("\n") if line.startswith("data: ")]
        assert response.status == 200 and events[-1] == "data: [DONE]" and len(events) > 2
        assert (await door.post("/generate", {"input_ids": [299], "sampling_params": {}}))[0] == 400
        assert await lives(served)


async def test_an_update_that_is_left_alone_is_let_go(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """The learner dies between begin and the first bucket: the present weights serve on. A session that another proxy
    left is closed.
    """
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        await served.engine.api.call("POST", "/begin_weight_update", {})
        await push.begin(1)
        assert (await served.post("/continue_generation", {}))[0] == 400
        held = asyncio.create_task(served.generate(PROMPT, max_new_tokens=2))
        await asyncio.sleep(POLL_S * 2)
        assert not held.done() and served.engine.updates.under_way
        served.engine.updates._abandoned_after_s = 0.5  # instead of a minute and more
        assert (await held)["meta_info"]["weight_version"] == "0"
        assert not served.engine.updates.under_way
        await push.whole(models[1], 1)
        assert (await served.generate(PROMPT, max_new_tokens=2))["meta_info"]["weight_version"] == "1"


async def test_no_key_of_a_client_finds_what_older_weights_computed(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        prompt = list(range(5, 69))

        async def cached(**more: Any) -> int:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, **more}
            return int((await served.post("/generate", body))[1]["meta_info"]["cached_tokens"])

        for more in ({}, {"extra_key": "tenant"}):
            assert await cached(**more) == 0
            assert await cached(**more) > 0
        await push.whole(models[1], 1)
        for more in ({}, {"extra_key": "tenant"}):
            assert await cached(**more) == 0


async def test_what_a_client_aborts_is_never_held_against_a_push(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        running = asyncio.create_task(served.generate(PROMPT, max_new_tokens=3000, ignore_eos=True))
        await until(lambda: served.engine.unfinished == 1)
        await push.whole(models[1], 1)
        await push.begin(2)
        body = {"input_ids": PROMPT, "rid": "held", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
        held = asyncio.create_task(served.post("/generate", body))
        await until(lambda: served.engine.unfinished == 2)
        assert (await served.post("/abort_request", {"rid": "held"}))[0] == 200
        await push.bucket(list(models[2].named_parameters()))
        await push.end(2)
        status, answer = await held
        assert (status, "before it began" in str(answer)) == (400, True)
        assert (await served.post("/abort_request", {"abort_all": True}))[0] == 200
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        assert served.engine.counters["requests_aborted_by_pushes"] == 0 < served.engine.counters["requests_aborted"]


async def test_who_waits_for_a_version_can_be_aborted(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        body = {
            "input_ids": PROMPT,
            "rid": "early",
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
            "min_version": 1,
        }
        early, other = (
            asyncio.create_task(served.post("/generate", {**body, **more})) for more in ({}, {"rid": "b", **SHORT})
        )
        await until(lambda: len(served.engine.server._backend._aborts._watches) == 2)
        assert (await served.post("/abort_request", {"rid": "early"}))[0] == 200
        await served.engine.load_snapshot(directories[1], 1)
        status, answer = await early
        assert (status, "before it began" in str(answer)) == (400, True)
        assert (await other)[1]["meta_info"]["weight_version"] == "1"
        assert served.engine.unfinished == 0


async def test_one_response_of_a_request_that_waits_for_weights_is_aborted_alone(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        await push.begin(1)
        body = {
            "input_ids": [PROMPT, PROMPT[:2]],
            "rid": "both",
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        }
        both = asyncio.create_task(served.post("/generate", body))
        await until(lambda: served.engine.unfinished == 2)
        assert (await served.post("/abort_request", {"rid": "both_0"}))[0] == 200
        assert (await push.bucket(named(models[1])))[0] == 200
        assert (await push.end(1))[0] == 200
        status, answers = await both
        assert status == 200, answers
        assert [one["meta_info"]["finish_reason"]["type"] for one in answers] == ["abort", "length"]
        assert [one["meta_info"]["id"] for one in answers] == ["both_0", "both_1"]
        assert served.engine.counters["requests_aborted_by_pushes"] == 0 < served.engine.counters["requests_aborted"]


async def test_a_server_that_says_it_has_version_0_is_believed(
    python: str, server: str, directories: list[Path]
) -> None:
    """It is like one on another host that cannot read this machine's files; a server of any other version may have any
    weights.
    """
    async with serving(python, server, directories[0]) as served:
        for version, believed in (("0", 0), ("3", -1)):
            await served.engine.load_snapshot(directories[0], int(version))
            await served.engine.api.call("POST", "/pause_generation", {"mode": "in_place"})
            second = SglangEngine(
                directories[0], config(python, url=server), version=-1, authority=Authority(unguarded=True)
            )
            await asyncio.to_thread(second.load)
            await second.start()
            try:
                assert second.version == believed
                if believed == 0:
                    await second.probe()
            finally:
                await second.close()
                await served.engine.api.call("POST", "/continue_generation", {})


async def test_a_server_without_the_flag_of_routed_experts_is_refused_by_name(
    python: str, server: str, directories: list[Path]
) -> None:
    async with serving(python, server, directories[0]) as served:
        client = HttpEngine(served.engine.url, routed_experts=True)
        with pytest.raises(EngineFailed, match="--enable-return-routed-experts"):
            await client.generate((5, 70, 9, 31), Sampling(max_new_tokens=2))
        await client.close()
