"""A server that does not say which weights made which token: its requests are cut at every push and continued, and nobody sees it.

The server of these tests may know better; then it is taken for one that does not (``cut``), and its log-probs are what is compared.
"""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.errors import BadRequest
from bus.messages import Sampling
from tests.engine_push import joined, named
from tests.engine_serving import Served, log_probs_of, scores
from tests.engine_watch import watching
from tests.sglang.server import serving

TOLERANCE = 1e-3
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
LENGTH = 600


async def pushed_while(served: Served, push: Any, models: Sequence[Any], made: Any, versions: Sequence[int]) -> None:
    """Push once so many tokens (of ``made()``) are there: well within the responses, whatever the machine's pace."""
    for version in versions:
        seen, enough = made(), made() + LENGTH // 6
        async with asyncio.timeout(60):
            while made() < enough:
                assert made() >= seen
                await asyncio.sleep(0.01)
        await push.whole(models[version], version)


async def running(served: Served, requests: int) -> None:
    async with asyncio.timeout(60):
        while served.engine.stats()["running"] != requests:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def assert_true(models: Sequence[Any], prompt: Sequence[int], answer: Mapping[str, Any], versions: Sequence[int]) -> None:
    """Every token's log-prob is that of the weights its span names, all before it computed with them."""
    meta, tokens = answer["meta_info"], answer["output_ids"]
    spans = meta["weight_versions"]
    assert [int(span["version"]) for span in spans] == list(versions), spans
    assert [spans[0]["start"], *(span["end"] for span in spans)] == [*(span["start"] for span in spans), len(tokens)]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    by_version = {version: log_probs_of(await scores(models[version], prompt, tokens), tokens) for version in versions}
    wanted = np.concatenate([by_version[int(span["version"])][span["start"] : span["end"]] for span in spans])
    assert np.abs(np.array([entry[0] for entry in meta["output_token_logprobs"]]) - wanted).max() < TOLERANCE


async def test_streams_and_batches_are_cut_unseen(python: str, server: str, directories: list[Path], models: list[Any]) -> None:
    """One stream, and four responses of two prompts in one request, across two pushes each."""
    params = {"max_new_tokens": LENGTH, "ignore_eos": True}
    states: list[Any] = []

    async def streamed(served: Served) -> None:
        body = {"input_ids": PROMPTS[0], "sampling_params": params, "return_logprob": True, "stream": True, "rid": "mine"}
        async with served.session.post(served.engine.url + "/generate", json=body) as response:
            assert response.status == 200
            rest = ""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk.decode()).split("\n")
                states.extend(json.loads(line[6:]) for line in lines if line.startswith("data: {"))
            assert rest == ""

    async with serving(python, server, directories[0], cut=True) as served, joined(served, timeout_s=60) as push:
        batch = {"input_ids": PROMPTS, "sampling_params": {**params, "n": 2}, "return_logprob": True}
        asked = [asyncio.ensure_future(streamed(served)), asyncio.ensure_future(served.post("/generate", batch))]
        await pushed_while(served, push, models, lambda: len(states[-1]["output_ids"]) if states else 0, (1, 2))
        _, (status, answers) = await asyncio.gather(*asked)
    assert status == 200, answers
    assert len(answers) == 4
    for prompt, answer in zip((PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]), answers, strict=True):
        await assert_true(models, prompt, answer, (0, 1, 2))
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}
    for before, after in itertools.pairwise(states):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"], "nothing that was said is taken back"
        assert before["meta_info"]["finish_reason"] is None
    await assert_true(models, PROMPTS[0], states[-1], (0, 1, 2))
    assert {one["meta_info"]["id"] for one in states} == {"mine"}


async def test_more_requests_than_run_together_all_end_well(python: str, server: str, directories: list[Path], models: list[Any]) -> None:
    """Some are in the server's queue when they are cut; some end just then."""
    async with serving(python, server, directories[0], cut=True) as served, joined(served, timeout_s=60) as push:
        asked = [asyncio.ensure_future(served.generate([5 + i, 6], max_new_tokens=20 + 7 * i, temperature=1.0)) for i in range(40)]
        for version in (1, 2):
            await asyncio.wait(asked[: 10 * version], return_when=asyncio.FIRST_COMPLETED)
            await push.whole(models[version], version)
        answers = await asyncio.gather(*asked)
    crossed = 0
    for i, answer in enumerate(answers):
        spans, finish = answer["meta_info"]["weight_versions"], answer["meta_info"]["finish_reason"]
        assert (finish["type"] == "length") == (
            len(answer["output_ids"]) == 20 + 7 * i and answer["output_ids"][-1] != finish.get("matched")
        )
        assert finish["type"] in ("stop", "length")
        crossed += len(spans) > 1
        await assert_true(models, [5 + i, 6], answer, [int(span["version"]) for span in spans])
    assert crossed, "the pushes came too late for this test to say anything"


async def test_who_wants_it_ended_is_heard_while_it_waits_for_weights(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0], cut=True) as served, joined(served, timeout_s=60) as push:
        body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "return_logprob": True}
        asked = [asyncio.ensure_future(served.post("/generate", {**body, "rid": f"task-{i}"})) for i in (1, 10)]
        await running(served, 2)
        assert (await push.begin(1))[0] == 200
        await served.client.abort("task-1")
        status, answer = await asked[0]
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert answer["meta_info"]["id"] == "task-1"
        assert not asked[1].done(), "its name only begins like the other's"
        assert (await push.bucket(named(models[1])))[0] == 200
        assert (await push.end(1))[0] == 200
        await served.client.abort("task-10")
        status, answer = await asked[1]
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")


async def test_an_abort_comes_before_its_request_is_known_to_the_scheduler(python: str, server: str, directories: list[Path]) -> None:
    """The server, paused, hears of the name in vain, and once; what else runs there is cut and goes on to its end."""
    params = {"max_new_tokens": 3000, "ignore_eos": True}
    async with serving(python, server, directories[0], cut=True) as served:
        other = asyncio.create_task(served.generate(PROMPTS[1], max_new_tokens=LENGTH, ignore_eos=True))
        await running(served, 1)
        await served.client.pause()
        early = asyncio.create_task(served.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": params, "rid": "early"}))
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


async def test_what_begins_while_all_pieces_are_ended_goes_on(python: str, server: str, directories: list[Path]) -> None:
    """It may get to the server before the word that ends all there are."""
    async with serving(python, server, directories[0], cut=True) as served:
        assert served.engine.pieces is not None
        async with watching(served, PROMPTS[0], max_new_tokens=2000, ignore_eos=True) as one:
            async with served.engine.pieces._cutting:
                await one.beyond(10)
                await served.engine.api.call("POST", "/abort_request", {"abort_all": True})
                await asyncio.sleep(0.3)
            made = await one.task
        assert (made["meta_info"]["finish_reason"]["type"], len(made["output_ids"])) == ("length", 2000)
        assert made["meta_info"]["num_retractions"] == 1
        assert served.engine.stats()["requests_aborted"] == 0


async def test_what_cannot_be_continued_is_refused(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0], cut=True) as served:
        status, answer = await served.post("/generate", {"input_ids": [5], "sampling_params": {"regex": "a+"}})
        assert status == 400 and "cannot continue it" in answer["error"]["message"]
        with pytest.raises(BadRequest, match="longer than"):
            await served.client.generate([5] * 4096, Sampling(max_new_tokens=2))
