"""The contract of an engine, on the built-in one and (``make test-sglang``) on real SGLang: the same prompts, the same
weights, fp32.
"""

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_kinds import Kind
from tests.engine_push import joined
from tests.engine_serving import (
    Served,
    commands_of,
    greedy,
    log_probs_across,
    log_probs_of,
    prompts,
    scores,
    told_log_probs,
)
from tests.engine_watch import Watched, watching
from tests.receiver_app import staged
from tests.skips import inapplicable
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.errors import BadRequest, EngineUnavailable
from tidemill.actors.serving.sglang.arguments import CPU_CHECKSUMS
from tidemill.actors.serving.sglang.proxy import HOLD_S
from tidemill.bus.client.addresses import HERE
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.push.member import Member, Updated
from tidemill.weightstore.push.push import Push
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedModel

CONTEXT = 4096
VOCABULARY = 299
TOLERANCE = 1e-3
"""Nats, with fp32 on both sides."""
PROMPT = [5, 6, 7, 8]
AT_ONCE_S = 45
"""Seconds, fewer than those of a group that waits for a message."""


@pytest.fixture(scope="module")
def dtype() -> str:
    return "float32"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the directories of versions 0 to 3."""
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed, max_position_embeddings=CONTEXT) for seed in range(4)]


@pytest.fixture(scope="module")
def first_model(directories: list[Path]) -> Path:
    return directories[0]


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [tiny_model(seed=seed, max_position_embeddings=CONTEXT) for seed in range(4)]


def asked(kind: Kind, served: Served, *, after: int = 30) -> AbstractAsyncContextManager[Watched]:
    """Ask for a response that is held after ``after`` steps, until its gate is opened."""
    return watching(served, PROMPT, gate=kind.hold(served, after=after), max_new_tokens=kind.long, ignore_eos=True)


async def until_unfinished(served: Served, count: int) -> None:
    """Wait until the engine has so many requests."""
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: served.engine.unfinished == count)


async def assert_made_by(model: Any, version: int, answer: Any) -> None:
    """Assert that one version made the whole response, and that its log-probs are those of these weights."""
    tokens = answer["output_ids"]
    assert answer["meta_info"]["weight_versions"] == [{"version": str(version), "start": 0, "end": len(tokens)}]
    wanted = log_probs_of(await scores(model, PROMPT, tokens), tokens)
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE


async def test_log_probs_are_those_of_a_full_forward_pass(
    kind: Kind, directories: list[Path], models: list[Any]
) -> None:
    given = prompts(4)
    async with kind.serving(directories[0]) as served:
        for prompt in given:
            answer = await served.generate(prompt, max_new_tokens=16, temperature=0.0, ignore_eos=True)
            assert answer["output_ids"] == (await greedy(models[0], prompt, 16))[:16]
        for prompt, temperature in zip(given, (1.0, 0.7, 1.3, 1.0), strict=True):
            answer = await served.generate(prompt, max_new_tokens=48, temperature=temperature, ignore_eos=True)
            wanted = log_probs_of(
                await scores(models[0], prompt, answer["output_ids"]) / temperature, answer["output_ids"]
            )
            assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE
            assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 48}]
        filtered = await served.generate(
            PROMPT, max_new_tokens=32, temperature=0.7, top_p=0.9, top_k=8, ignore_eos=True
        )
        assert (told_log_probs(filtered) <= 0).all()


async def test_one_request_lives_through_three_pushes(kind: Kind, directories: list[Path], models: list[Any]) -> None:
    """Four sets of weights generate one response; each span has the log-probs of its weights, on keys and values that
    are kept.
    """
    async with (
        kind.serving(directories[0]) as served,
        joined(served, timeout_s=LIMIT_S) as push,
        asked(kind, served, after=0) as one,
    ):
        for version in (1, 2, 3):
            one.gate.let(30)
            await one.beyond(one.tokens + 20)
            await push.whole(models[version], version)
        one.gate.open()
        made = await one.task
        assert served.engine.stats()["requests_aborted_by_pushes"] == 0
    spans = made["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1", "2", "3"]
    assert (made["meta_info"]["finish_reason"]["type"], len(made["output_ids"])) == ("length", kind.long)
    wanted = await log_probs_across(models, made, PROMPT, kept=True)
    assert np.abs(told_log_probs(made) - wanted).max() < TOLERANCE


async def test_one_stops_and_the_others_go_on(kind: Kind, directories: list[Path]) -> None:
    async with kind.serving(directories[0]) as served, asked(kind, served) as one:
        await one.beyond(0)
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": kind.long, "ignore_eos": True},
            "rid": "watched-2",
        }
        other = asyncio.create_task(served.post("/generate", body))
        await one.beyond(10)
        await served.client.abort("nobody")
        assert (await served.post("/abort_request", {"rid": ""}))[0] == 400
        await served.client.abort("watched")
        made = await one.task
        assert made["meta_info"]["finish_reason"]["type"] == "abort"
        stats = served.engine.stats()
        assert (stats["requests_aborted"], stats["requests_aborted_by_pushes"]) == (1, 0)
        assert 10 < len(told_log_probs(made)) < kind.long
        one.gate.open()
        status, answer = await other
        assert (status, len(answer["output_ids"]), answer["meta_info"]["id"]) == (200, kind.long, "watched-2")


async def test_a_request_of_several_prompts_ends_by_its_name(kind: Kind, directories: list[Path]) -> None:
    async with kind.serving(directories[0]) as served, asked(kind, served) as one:
        await one.beyond(0)
        sampling = {"max_new_tokens": kind.long, "ignore_eos": True}
        body = {"input_ids": [PROMPT, PROMPT[:2]], "sampling_params": sampling, "rid": "both"}
        both = asyncio.create_task(served.post("/generate", body))
        await one.beyond(10)
        await until_unfinished(served, 3)
        await served.client.abort("both")
        status, answers = await both
        assert (status, [made["meta_info"]["finish_reason"]["type"] for made in answers]) == (200, ["abort", "abort"])
        assert [made["meta_info"]["id"] for made in answers] == ["both_0", "both_1"]
        one.gate.open()
        assert len((await one.task)["output_ids"]) == kind.long


async def test_what_ends_requests_for_an_update_is_counted(kind: Kind, directories: list[Path]) -> None:
    """A pushing method that this system does not use: pause (abort), update, continue. Streamed or not."""
    async with kind.serving(directories[0]) as served, asked(kind, served) as one:
        await one.beyond(0)
        other = asyncio.create_task(served.generate(PROMPT, max_new_tokens=kind.long, ignore_eos=True))
        await one.beyond(10)

        async def both_run() -> bool:
            return (await served.get("/v1/loads?include=core"))[1]["loads"][0]["num_running_reqs"] >= 2

        await until(both_run)
        assert (await served.post("/pause_generation", {"mode": "abort"}))[0] == 200
        ended = [await one.task, await other]
        assert (await served.post("/continue_generation", {}))[0] == 200
        assert [made["meta_info"]["finish_reason"]["type"] for made in ended] == ["abort", "abort"]
        assert served.engine.stats()["requests_aborted_by_pushes"] == 2


async def test_what_is_paused_goes_on_where_it_was(kind: Kind, directories: list[Path], models: list[Any]) -> None:
    async with kind.serving(directories[0]) as served, asked(kind, served) as one:
        await one.beyond(10)
        await served.client.pause()
        one.gate.open()
        later = asyncio.create_task(served.generate(PROMPT, max_new_tokens=4, ignore_eos=True))
        seen = -1
        while seen != one.tokens:  # until the tokens under way have arrived
            seen = one.tokens
            await asyncio.sleep(0.5)
        assert not one.task.done() and not later.done()
        await served.client.resume()
        made = await one.task
        assert len((await later)["output_ids"]) == 4
    assert len(made["output_ids"]) == kind.long
    await assert_made_by(models[0], 0, made)


async def test_who_is_aborted_in_a_pause_is_not_answered_in_full_after_it(kind: Kind, directories: list[Path]) -> None:
    """One request is being decoded, and one arrives during the pause: SGLang's scheduler does not have it yet."""
    async with kind.serving(directories[0]) as served, asked(kind, served) as one:
        await one.beyond(10)
        await served.client.pause()
        one.gate.open()
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": kind.long, "ignore_eos": True},
            "rid": "later",
        }
        later = asyncio.create_task(served.post("/generate", body))
        await until_unfinished(served, 2)
        await asyncio.sleep(0.3)
        for name in ("later", "watched"):
            await served.client.abort(name)
        await asyncio.sleep(0.3)
        await served.client.resume()
        (status, answer), made = await later, await one.task
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert answer["meta_info"]["completion_tokens"] < kind.long
        assert made["meta_info"]["finish_reason"]["type"] == "abort"
        assert served.engine.stats()["requests_aborted"] == 2


async def test_nothing_is_generated_before_it_serves_and_a_late_one_joins(
    kind: Kind, directories: list[Path], models: list[Any]
) -> None:
    async with kind.serving(directories[0]) as served:
        served.engine.phase = "catching up"
        with pytest.raises(EngineUnavailable):
            await served.client.generate(PROMPT, Sampling(max_new_tokens=2))
        assert not await served.client.healthy()
        await served.engine.load_snapshot(directories[2], 7, 3)
        served.engine.phase = "serving"
        assert await served.client.healthy()
        late = await served.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        async with joined(served, timeout_s=LIMIT_S, epoch=3) as push:
            await push.whole(models[3], 8)
            pushed = await served.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        assert (served.engine.version, served.engine.epoch) == (8, 3)
    await assert_made_by(models[2], 7, late)
    await assert_made_by(models[3], 8, pushed)


async def test_a_push_that_breaks_off_is_never_served_in_part(
    kind: Kind, directories: list[Path], models: list[Any]
) -> None:
    async with kind.serving(directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(list(models[1].named_parameters())[:5]))[0] == 200
        status, answer = await push.end(1)
        assert status == 400, answer
        assert served.engine.version == (0 if kind.in_standby else -1)
        if kind.in_standby:
            assert (await served.generate(PROMPT, max_new_tokens=2))["meta_info"]["weight_version"] == "0"
        else:
            async with asyncio.timeout(HOLD_S - 1):  # the engine does not wait for the end of the open push
                status, _ = await served.post(
                    "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
                )
            assert status == 503
        await push.whole(models[2], 2)
        await assert_made_by(models[2], 2, await served.generate(PROMPT, max_new_tokens=16, ignore_eos=True))


async def test_what_its_sender_leaves_open_holds_up_nothing(
    kind: Kind, directories: list[Path], models: list[Any]
) -> None:
    """This happens when a learner finds different checksums, evicts the engine, and the engine fetches that version."""
    async with kind.serving(directories[0], version=0) as served:
        for version, num_sent in ((1, 0), (2, 5), (3, None)):
            async with joined(served, timeout_s=LIMIT_S) as push:
                await push.begin(version)
                if tensors := list(models[version].named_parameters())[:num_sent]:
                    assert (await push.bucket(tensors))[0] == 200
                assert (await served.post("/destroy_weights_update_group", {"group_name": push.group.name}))[0] == 200
                if num_sent == 0:
                    served_on = await served.generate(PROMPT, max_new_tokens=2)
                    assert served_on["meta_info"]["weight_version"] == "0"
                async with asyncio.timeout(AT_ONCE_S):
                    await served.engine.load_snapshot(directories[version], version)
            await assert_made_by(models[version], version, await served.generate(PROMPT, max_new_tokens=4))


async def test_what_differs_from_what_was_sent_is_named(kind: Kind, directories: list[Path], models: list[Any]) -> None:
    sent = {name: tensor.detach() for name, tensor in models[1].state_dict().items()}
    bent = "model.layers.1.self_attn.k_proj.weight"
    other = sent | {bent: sent[bent].clone()}
    other[bent].flatten()[-1] = 5.0
    async with kind.serving(directories[0]) as served:
        if (release := getattr(served.engine, "release", None)) is not None and release < CPU_CHECKSUMS:
            inapplicable("its checksums need CUDA (SGLang before 0.5.23)")
        row = LiveRow(role="engine", id="e", host="test", pid=1, phase="serving", address=served.engine.url)
        for version, tensors, good in ((1, other, False), (2, sent, True)):
            check = StagedModel(staged(tensors), (), Deadlines(60.0)).differences
            receiver = HttpReceiver(served.session, served.engine.url, epoch=1, deadlines=Deadlines(60.0))
            group = PushGroup(
                GroupRules(1, HERE, "gloo", Deadlines(60.0)), [Member(row, receiver, deadlines=Deadlines(60.0))]
            )
            try:
                outcome = await Push(version, staged(sent).buckets, lambda _, check=check: check).update(group)
            finally:
                group.close()
            (found,) = outcome.values()
            if good:
                assert isinstance(found, Updated) and found.verify_s is not None
            else:
                assert isinstance(found, ReceiverFailed)
                assert re.match(r"version 1 .* in 1 tensors: .*k_proj", found.reason) and found.phase == "verify"
                assert served.engine.version == (0 if kind.in_standby else -1)
        assert served.engine.version == 2


async def test_a_minimum_version_is_waited_for(kind: Kind, directories: list[Path], models: list[Any]) -> None:
    async with kind.serving(directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        waiting = asyncio.create_task(served.client.generate(PROMPT, Sampling(max_new_tokens=4), min_version=1))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await push.whole(models[1], 1)
        assert {span.version for span in (await waiting).spans} == {1}


async def test_a_replaced_learner_is_refused(kind: Kind, directories: list[Path]) -> None:
    async with kind.serving(directories[0]) as served:
        assert (await served.post("/pause_generation", {"mode": "in_place", "epoch": 5}))[0] == 200
        for path in sorted(set(commands_of(served.engine)) - {"/receive_push", "/flush_cache"}):
            status, answer = await served.post(path, {"epoch": 4, "weight_version": "9", "group_name": "g"})
            assert (status, answer["epoch"]) == (409, 5), path
        assert (await served.post("/continue_generation", {"epoch": 5}))[0] == 200


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the vocabulary": ({"input_ids": [5, VOCABULARY]}, r"want token ids in 0 \.\. 298"),
    "negative": ({"input_ids": [-1]}, r"want token ids in 0 \.\. 298"),
    "beyond 32 bits": ({"input_ids": [2**40]}, r"want token ids in 0 \.\. 298"),
    "no prompt": ({"input_ids": []}, "input_ids"),
    "no ids": ({"input_ids": ["a"]}, "input_ids"),
    "two prompts": ({"input_ids": PROMPT, "text": "x"}, "input_ids"),
    "too long": ({"input_ids": [5] * CONTEXT}, "longer than the model's context"),
    "a stop that is no token": (
        {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [400]}},
        r"want token ids in 0 \.\. 298",
    ),
}


async def test_what_is_wrong_is_refused_and_nothing_ends(kind: Kind, directories: list[Path]) -> None:
    async with kind.serving(directories[0]) as served:
        for name, (body, said) in BAD.items():
            status, answer = await served.post("/generate", {"sampling_params": {"max_new_tokens": 2}, **body})
            assert status == 400, (name, answer)
            assert pytest.raises(BadRequest, match=said).matches(BadRequest(answer["error"]["message"])), (name, answer)
        assert len((await served.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
