"""The Engine port on a real SGLang server: log-probs, spans across pushes, abort, pause, interrupted pushes, bad input,
no orphans.
"""

import asyncio
import json
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_kinds import Brake
from tests.engine_push import joined, named
from tests.engine_serving import Served, log_probs_across, log_probs_of, scores, told_log_probs
from tests.engine_watch import watching
from tests.receiver_app import staged
from tests.sglang.server import CONTEXT, release_at, serving
from tests.skips import inapplicable
from tests.waits import LIMIT_S, turn, until
from tidemill.actors.serving.sglang.arguments import CPU_CHECKSUMS
from tidemill.actors.serving.sglang.server_process import Api, Pauses
from tidemill.bus.client.addresses import HERE
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.member import Member, Updated
from tidemill.weightstore.push.push import Push
from tidemill.weightstore.push.push_groups import GroupRules, PushGroup
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.part_server import PartServer
from tidemill.weightstore.transport.parts import RemotePart
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedModel

TOLERANCE = 1e-3
"""Tolerance of log-probs, in fp32 on both sides."""
PROMPT = [5, 6, 7, 8]


@pytest.mark.slow
async def test_the_port_gets_what_it_asks_for(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        made = await served.client.generate(
            np.array(PROMPT, np.int32), Sampling(max_new_tokens=8, temperature=0.0), request_id="one"
        )
        states = [
            one
            async for one in served.client.stream(
                np.array(PROMPT, np.int32), Sampling(max_new_tokens=8, temperature=0.0)
            )
        ]
        version, server_info = await served.client.version(), (await served.get("/server_info"))[1]
        assert await served.client.healthy()
    assert made.finish in ("length", "stop") and made.id == "one"
    assert states[-1].tokens.tolist() == made.tokens.tolist()
    assert [len(one.tokens) for one in states] == sorted(len(one.tokens) for one in states)
    assert (version, server_info["context_length"]) == (0, CONTEXT)


@pytest.mark.parametrize("pause", ["in_place", pytest.param("retract", marks=pytest.mark.slow)])
async def test_one_request_lives_through_pushes_and_says_which_weights_made_what(
    python: str, server: str, brake: Brake, directories: list[Path], models: list[Any], pause: str
) -> None:
    """Three pushes in one HTTP request: four sets of weights; the log-probs of each stretch are those of its
    weights.
    """
    kept = pause == "in_place"
    async with (
        serving(python, server, directories[0], pause=pause) as served,
        joined(served, timeout_s=LIMIT_S) as push,
    ):
        async with watching(served, PROMPT, max_new_tokens=1600, ignore_eos=True) as one:
            for version in (1, 2, 3):
                await one.beyond(one.tokens + 10)
                await push.whole(models[version], version)
            brake.open()
            answer = await one.task
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1", "2", "3"], spans
    assert spans[-1]["end"] == 1600
    assert answer["meta_info"]["finish_reason"]["type"] == "length", "never aborted, never asked again"
    assert answer["meta_info"]["num_retractions"] == (0 if kept else 3)
    assert np.abs(told_log_probs(answer) - await log_probs_across(models, answer, PROMPT, kept=kept)).max() < TOLERANCE


class _LatePauses(Pauses):
    """Pauses; the first one for an update waits for ``go``."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def hold(self, mode: str) -> None:
        self.reached.set()
        await self.go.wait()
        await super().hold(mode)


async def test_a_push_that_has_begun_but_not_paused_yet_comes_before_a_load(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """An engine that joins would load a snapshot over it, refuse its buckets, and be evicted."""
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        late = served.engine.updates.pauses = _LatePauses(served.engine.api)
        begins = asyncio.create_task(push.begin(2))
        async with asyncio.timeout(LIMIT_S):
            await late.reached.wait()
        joining = asyncio.create_task(served.engine.load_snapshot(directories[1], 1))
        await turn(10)  # it finds no open push, and waits for its turn
        late.go.set()
        assert (await begins)[0] == 200
        assert (await push.bucket(list(models[2].named_parameters())))[0] == 200
        assert (await push.end(2))[0] == 200
        assert (await joining, served.engine.version) == (0.0, 2)


async def test_what_is_cached_of_older_weights_is_not_used_again(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    prompt = list(range(5, 69))
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        await served.generate(prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        again = await served.generate(prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        assert again["meta_info"]["cached_tokens"] > 0, "of the same weights it is"
        await push.whole(models[1], 1)
        answer = await served.generate(prompt, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    wanted = log_probs_of(await scores(models[1], prompt, answer["output_ids"]), answer["output_ids"])
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE


async def test_memory_is_given_up_and_taken_again_and_every_request_goes_on(
    python: str, server: str, brake: Brake, directories: list[Path], models: list[Any]
) -> None:
    """Requests that would end a server without its memory are refused, or reordered."""
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}, "return_logprob": True}
    async with (
        serving(python, server, directories[0], pause="retract") as served,
        joined(served, timeout_s=LIMIT_S) as push,
        watching(served, PROMPT, **body["sampling_params"]) as one,
    ):
        await one.beyond(10)
        assert (await served.post(release, {"tags": None}))[0] == 400, "while requests are decoded, without a pause"
        await served.client.pause("in_place")
        brake.open()
        for _ in range(2):
            assert (await served.post(release, {"tags": ["kv_cache"]}))[0] == 200
            assert (await served.post(release, {"tags": None}))[0] == 200
        late = asyncio.create_task(served.post("/generate", body))
        assert (await push.begin(1))[0] == 400, "there is no memory to receive into"
        assert (await served.get("/health_generate"))[0] == 503
        for _ in range(2):
            assert (await served.post(resume, {"tags": ["weights"]}))[0] == 200
        await push.whole(models[1], 1)
        assert (await served.post("/continue_generation", {}))[0] == 400, "there is no memory for keys and values"
        assert not one.task.done() and not late.done()
        for _ in range(2):
            assert (await served.post(resume, {"tags": ["kv_cache"]}))[0] == 200
        first, (status, second) = await one.task, await late
        assert status == 200, second
        spans = first["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"] and spans[-1]["end"] == 800
        assert [span["version"] for span in second["meta_info"]["weight_versions"]] == ["1"]
        for made, start in ((first, spans[0]["end"]), (second, 0)):
            wanted = log_probs_of(await scores(models[1], PROMPT, made["output_ids"]), made["output_ids"])
            assert np.abs(told_log_probs(made) - wanted)[start:].max() < TOLERANCE
        assert (await served.post(release, {"tags": None}))[0] == 200, "idle: no pause needed"
        await served.engine.load_snapshot(directories[2], 2)
        await served.client.pause("retract")  # and the release after it has no effect
        assert (await served.post(resume, {"tags": ["kv_cache"]}))[0] == 200
        answer = await served.generate(PROMPT, max_new_tokens=16, temperature=0.0, ignore_eos=True)
    wanted = log_probs_of(await scores(models[2], PROMPT, answer["output_ids"]), answer["output_ids"])
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE


@pytest.mark.parametrize(("stream", "length"), [(False, 24), (True, 2400)])
async def test_a_request_that_a_push_overtakes_before_it_is_begun_is_of_the_new_weights_alone(
    python: str, server: str, directories: list[Path], models: list[Any], stream: bool, length: int
) -> None:
    """It waits in SGLang with its prompt cached, or arrives during the push and waits in the proxy. None is refused or
    mixes versions.
    """
    prompt = list(range(5, 69))
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        await served.generate(prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        await served.client.pause()
        inside = asyncio.create_task(_generated(served, prompt, length, "inside", stream))
        await _asked(served, 1)
        tensors = list(named(models[1]))
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(tensors))[0] == 200
        outside = asyncio.create_task(_generated(served, prompt, length, "outside", stream))
        await _asked(served, 2)
        assert (await push.end(1))[0] == 200
        answers = [await inside, await outside]
        assert served.engine.stats()["asked_again"] == 1
    for answer in answers:
        wanted = log_probs_of(await scores(models[1], prompt, answer["output_ids"]), answer["output_ids"])
        assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE
        assert answer["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": length}]


async def test_a_push_that_breaks_off_leaves_nothing_to_be_served_and_a_snapshot_heals_it(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=LIMIT_S) as push:
        tensors = list(models[1].named_parameters())
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(tensors[:5]))[0] == 200
        status, answer = await push.end(1)
        assert status == 400 and "are missing" in answer["message"]
        assert served.engine.version == -1
        refused = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await served.post("/generate", refused))[0] == 503
        assert (await served.post("/continue_generation", {}))[0] == 400
        await served.engine.load_snapshot(directories[2], 2)
        answer = await served.generate(PROMPT, max_new_tokens=16, temperature=0.0, ignore_eos=True)
        await push.whole(models[1], 3)
        after = await served.generate(PROMPT, max_new_tokens=16, temperature=0.0, ignore_eos=True)
    for made, model, version in ((answer, models[2], "2"), (after, models[1], "3")):
        wanted = log_probs_of(await scores(model, PROMPT, made["output_ids"]), made["output_ids"])
        assert np.abs(told_log_probs(made) - wanted).max() < TOLERANCE
        assert made["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 16}]


async def test_weights_that_differ_from_what_was_sent_are_not_served(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """The server's checksums are compared while it is paused, those of fused and padded tensors included."""
    sent = {name: tensor.detach() for name, tensor in models[1].state_dict().items()}
    kept = "model.layers.1.self_attn.k_proj.weight"
    other = sent | {kept: sent[kept].clone()}
    other[kept].view(-1).view(torch.uint8)[-1] ^= 1
    staging, flipped = staged(sent), staged(other)
    if await release_at(server) < CPU_CHECKSUMS:
        inapplicable("this server computes no checksums on CPU")
    async with serving(python, server, directories[0]) as served:
        row = LiveRow(role="engine", id="e", host="test", pid=1, phase="serving", address=served.engine.url)
        for copy, good in ((flipped, False), (staging, True)):
            receiver = HttpReceiver(served.session, served.engine.url, epoch=1, deadlines=Deadlines(60.0))
            member = Member(row, receiver, deadlines=Deadlines(60.0))
            group = PushGroup(GroupRules(1, HERE, "gloo", Deadlines(60.0)), [member])
            try:
                compare = StagedModel(copy, (), Deadlines(60.0)).differences
                how = (await Push(2 if good else 1, staging.buckets, lambda _, compare=compare: compare).update(group))[
                    member
                ]
                if good:
                    assert isinstance(how, Updated) and how.verify_s is not None
                else:
                    wrong = r"verify: version 1 .* in 1 tensors: .*q_proj.* \+ .*k_proj"
                    assert isinstance(how, ReceiverFailed) and re.search(wrong, str(how))
                    assert served.engine.version == -1
            finally:
                group.close()
                await member.close(leave=True)
        assert served.engine.version == 2
        status, answer = await served.post("/weights_checksums")
        assert (status, answer["weight_version"], staging.differences(ChecksumReport.parse(answer))) == (200, "2", [])
        assert (await served.generate(PROMPT, max_new_tokens=4, temperature=0.0))["meta_info"]["weight_version"] == "2"


async def test_two_ranks_of_a_learner_send_their_parts_to_one_server(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """Each over a process group of its own; checksums are compared in the rank that has the weights."""

    def split(version: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        tensors = {name: tensor.detach() for name, tensor in models[version].state_dict().items()}
        theirs = {name for name in tensors if ".layers.1." in name}
        return {name: tensors[name] for name in tensors.keys() - theirs}, {name: tensors[name] for name in theirs}

    manifest = Manifest.of(split(1)[1].items())
    with closing(PartServer(manifest, WeightsConfig(bucket_bytes=20_000), rank=1, at=HERE)) as rank:
        part = RemotePart(await asyncio.to_thread(rank.start), 1)
        async with serving(python, server, directories[0]) as served:
            checked = await release_at(server) >= CPU_CHECKSUMS
            row = LiveRow(role="engine", id="e", host="test", pid=1, phase="serving", address=served.engine.url)
            receiver = HttpReceiver(served.session, served.engine.url, epoch=1, deadlines=Deadlines(60.0))
            member = Member(row, receiver, deadlines=Deadlines(60.0))
            group = PushGroup(GroupRules(1, HERE, "gloo", Deadlines(60.0), parts=(part,)), [member])
            try:
                for version in (1, 2):
                    own, theirs = split(version)
                    rank.stage(0, theirs.items())
                    whole = StagedModel(staged(own), (part,), Deadlines(60.0))
                    assert len({bucket.part for bucket, _ in whole.buckets}) == 2
                    how = (
                        await Push(
                            version, whole.buckets, lambda _, check=whole.differences if checked else None: check
                        ).update(group)
                    )[member]
                    assert isinstance(how, Updated) and (how.verify_s is not None) == checked
                    made = await served.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
                    wanted = log_probs_of(await scores(models[version], PROMPT, made["output_ids"]), made["output_ids"])
                    assert np.abs(told_log_probs(made) - wanted).max() < TOLERANCE
                if checked:
                    report = ChecksumReport.parse((await served.post("/weights_checksums"))[1])
                    assert await whole.differences(report) == []
                    rank.stage(0, split(1)[1].items())
                    wrong = await whole.differences(report)
                    assert wrong and all(".layers.1." in line for line in wrong)
            finally:
                group.close()
                await member.close(leave=True)
                await part.close()


async def test_a_group_whose_learner_is_gone_is_refused_before_the_server_hears_of_it(
    python: str, server: str, directories: list[Path]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "gone",
        "timeout_s": 5.0,
    }
    async with serving(python, server, directories[0]) as served:
        status, answer = await served.post("/init_weights_update_group", body)
        assert (status, f"127.0.0.1:{port}: the connection is refused" in str(answer)) == (400, True)
        status, answer = await served.post("/init_weights_update_group", {**body, "master_port": "x"})
        assert (status, "master_port" in str(answer)) == (400, True)
        assert (await served.generate(PROMPT, max_new_tokens=4, temperature=0.0))["meta_info"]["weight_version"] == "0"


async def _generated(served: Served, prompt: list[int], length: int, rid: str, stream: bool) -> Any:
    """Generate ``length`` tokens; of a stream, return the last state, after which there is none."""
    sampling = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    if not stream:
        return (await served.post("/generate", body))[1]
    state: Any = None
    async with served.session.post(served.engine.url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                before, state = state, json.loads(line[6:])
                assert state["meta_info"]["id"] == rid
                assert before is None or state["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    return state


async def _asked(served: Served, count: int) -> None:
    """Wait until ``count`` requests are unfinished: each then has its key for the cache, or waits for an update."""
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: served.engine.unfinished >= count)
