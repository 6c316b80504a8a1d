"""Requests that a real SGLang server works on while weights are pushed: streams, batches, a full queue, aborts, and a
continuation.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_kinds import Brake
from tests.engine_push import joined, named
from tests.engine_serving import Served, log_probs_across, log_probs_of, scores, told_log_probs
from tests.sglang.server import serving
from tests.waits import LIMIT_S, until
from tidemill.actors.engines.port import Generation
from tidemill.bus.wire.messages import Sampling

TOLERANCE = 1e-3
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
LENGTH = 900
SAMPLING = Sampling(max_new_tokens=LENGTH, temperature=1.0)


async def pushed_while(
    asked: Sequence["asyncio.Future[Any]"],
    push: Any,
    models: Sequence[Any],
    made: Callable[[], int],
    versions: Sequence[int],
) -> None:
    """Push each version once ten more tokens are made."""
    for version in versions:
        enough = made() + 10
        while made() < enough:
            ended = [one.exception() or one.result() for one in asked if one.done()]
            assert not ended, f"ended with {made()} tokens, before version {version}: {ended!r:.1000}"
            await asyncio.sleep(0.01)
        await push.whole(models[version], version)


async def running(served: Served, requests: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        # nothing signals it
        await until(lambda: served.engine.stats()["running"] == requests)


async def decoding(served: Served, responses: int) -> None:
    """Wait until the server decodes as many."""
    async with asyncio.timeout(LIMIT_S):
        while (await served.get("/v1/loads"))[1]["loads"][0]["num_running_reqs"] != responses:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.01)


async def assert_true(
    models: Sequence[Any], prompt: Sequence[int], answer: Mapping[str, Any], *, kept: bool
) -> list[int]:
    """Check that every token's log-prob is that of the weights its span names; return the spans' versions."""
    meta, tokens = answer["meta_info"], answer["output_ids"]
    spans = meta["weight_versions"]
    assert [spans[0]["start"], *(span["end"] for span in spans)] == [*(span["start"] for span in spans), len(tokens)]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    wanted = await log_probs_across(models, answer, prompt, kept=kept)
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE
    return [int(span["version"]) for span in spans]


@pytest.mark.parametrize("pause", [pytest.param("in_place", marks=pytest.mark.slow), "retract"])
async def test_streams_and_batches_go_on_through_pushes(
    python: str, server: str, brake: Brake, directories: list[Path], models: list[Any], pause: str
) -> None:
    """There are one stream, and four responses of two prompts in one request, across two pushes each."""
    params = {"max_new_tokens": LENGTH, "ignore_eos": True}
    states: list[Any] = []

    async def streamed(served: Served) -> None:
        body = {
            "input_ids": PROMPTS[0],
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "rid": "mine",
        }
        async with served.session.post(served.engine.url + "/generate", json=body) as response:
            assert response.status == 200
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                states.extend(json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))
            assert rest == b""

    async with (
        serving(python, server, directories[0], pause=pause) as served,
        joined(served, timeout_s=LIMIT_S) as push,
    ):
        batch = {"input_ids": PROMPTS, "sampling_params": {**params, "n": 2}, "return_logprob": True}
        asked = [asyncio.ensure_future(streamed(served)), asyncio.ensure_future(served.post("/generate", batch))]
        await decoding(served, 5)  # the batch, too: a slow machine could begin it after the pushes
        await pushed_while(asked, push, models, lambda: len(states[-1]["output_ids"]) if states else 0, (1, 2))
        brake.open()
        _, (status, answers) = await asyncio.gather(*asked)
    assert status == 200, answers
    assert len(answers) == 4
    for prompt, answer in zip((PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]), answers, strict=True):
        assert await assert_true(models, prompt, answer, kept=pause == "in_place") == [0, 1, 2]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}
    for before, after in itertools.pairwise(states):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"], (
            "no token that was sent changes"
        )
        assert before["meta_info"]["finish_reason"] is None
    assert await assert_true(models, PROMPTS[0], states[-1], kept=pause == "in_place") == [0, 1, 2]
    assert {one["meta_info"]["id"] for one in states} == {"mine"}


async def test_more_requests_than_run_together_all_end_well(
    python: str, server: str, brake: Brake, directories: list[Path], models: list[Any]
) -> None:
    """Pushes that flush the cache meet running requests, requests in the server's queue, and requests that are about to
    end.
    """
    async with (
        serving(python, server, directories[0], pause="retract") as served,
        joined(served, timeout_s=LIMIT_S) as push,
    ):
        asked = [
            asyncio.ensure_future(served.generate([5 + i, 6], max_new_tokens=20 + 7 * i, temperature=1.0))
            for i in range(40)
        ]
        for version in (1, 2):
            await asyncio.wait(asked[: 10 * version], return_when=asyncio.FIRST_COMPLETED)
            await push.whole(models[version], version)
        brake.open()
        answers = await asyncio.gather(*asked)
    crossed = 0
    for i, answer in enumerate(answers):
        finish = answer["meta_info"]["finish_reason"]
        assert (finish["type"] == "length") == (
            len(answer["output_ids"]) == 20 + 7 * i and answer["output_ids"][-1] != finish.get("matched")
        )
        assert finish["type"] in ("stop", "length")
        crossed += len(await assert_true(models, [5 + i, 6], answer, kept=False)) > 1
    assert crossed, "the pushes came too late for this test to show anything"


async def test_an_abort_during_a_push_ends_its_request_alone(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        body = {
            "input_ids": PROMPTS[0],
            "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
            "return_logprob": True,
        }
        asked = [asyncio.ensure_future(served.post("/generate", {**body, "rid": f"task-{i}"})) for i in (1, 10)]
        await running(served, 2)
        assert (await push.begin(1))[0] == 200
        await served.client.abort("task-1")
        assert (await push.bucket(named(models[1])))[0] == 200
        assert (await push.end(1))[0] == 200
        status, answer = await asked[0]
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert answer["meta_info"]["id"] == "task-1"
        assert not asked[1].done(), "the abort's name is only a prefix of the other's"
        await served.client.abort("task-10")
        status, answer = await asked[1]
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        stats = served.engine.stats()
        assert (stats["requests_aborted"], stats["requests_aborted_by_pushes"]) == (2, 0)


async def test_an_abort_that_precedes_its_request_at_the_scheduler_ends_it(
    python: str, server: str, directories: list[Path]
) -> None:
    """The paused server would ignore it, and forward it only once; requests around it run to their ends."""
    params = {"max_new_tokens": 3000, "ignore_eos": True}
    async with serving(python, server, directories[0]) as served:
        other = asyncio.create_task(served.generate(PROMPTS[1], max_new_tokens=LENGTH, ignore_eos=True))
        await running(served, 1)
        await served.client.pause()
        early = asyncio.create_task(
            served.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": params, "rid": "early"})
        )
        await running(served, 2)
        await asyncio.sleep(0.2)
        await served.client.abort("early")
        await asyncio.sleep(0.2)
        await served.client.resume()
        later = []
        while not early.done():
            later.append(asyncio.create_task(served.generate(PROMPTS[1], max_new_tokens=8, ignore_eos=True)))
            await asyncio.sleep(0.05)
        status, answer = await early
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert answer["meta_info"]["completion_tokens"] < 3000
        made = await other
        assert (made["meta_info"]["finish_reason"]["type"], len(made["output_ids"])) == ("length", LENGTH)
        assert all(len(one["output_ids"]) == 8 for one in await asyncio.gather(*later))
        stats = served.engine.stats()
        assert (stats["requests_aborted"], stats["requests_aborted_by_pushes"]) == (1, 0)


async def cut_off(served: Served, begun: Generation | None) -> Generation:
    """Return a response that was aborted after its first state, before the model ended it."""
    for attempt in range(40):
        name, made = f"piece-{attempt}", None
        async for state in served.client.stream(PROMPTS[0], SAMPLING, request_id=name, begun=begun):
            if made is None:
                await served.client.abort(name)
            made = state
        if made is not None and made.finish == "abort":
            return made
    raise AssertionError("the model ended every response before its abort")


async def test_a_response_that_is_cut_at_each_update_is_continued_with_the_new_weights(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """The client aborts it, and sends it again with the tokens so far. Spans and log-probs are exact, the length is the
    requested one.
    """
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        begun = None
        for version in (1, 2):
            before = 0 if begun is None else len(begun.tokens)
            begun = await cut_off(served, begun)
            assert before < len(begun.tokens) < LENGTH
            await push.whole(models[version], version)
        made = await served.client.generate(PROMPTS[0], SAMPLING, begun=begun)
    assert [span.version for span in made.spans] == [0, 1, 2]
    assert begun is not None and made.tokens[: len(begun.tokens)].tolist() == begun.tokens.tolist()
    assert made.finish in ("stop", "length") and len(made.tokens) <= LENGTH
    ends = list(itertools.accumulate((span.num_tokens for span in made.spans), initial=0))
    assert ends[-1] == len(made.tokens)
    for span, (start, end) in zip(made.spans, itertools.pairwise(ends), strict=True):
        wanted = log_probs_of(
            await scores(models[span.version], PROMPTS[0], made.tokens.tolist()), made.tokens.tolist()
        )
        assert np.abs(made.log_probs - wanted)[start:end].max() < TOLERANCE
