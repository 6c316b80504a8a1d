"""docs/wire.md as a second implementation: an actor of its own, with msgpack, struct and plain NATS requests, sharing
no code with bus/.

Only the other end of each wire (the learner's side) is ours.
"""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_episode, make_partial, make_sample, make_task, take
from tidemill.bus.errors import WireError
from tidemill.bus.liveness import LiveView
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import (
    Dead,
    DeadLetterDecision,
    Done,
    Evaluated,
    Kind,
    Partial,
    Plan,
    Requeue,
    Sample,
    Sampling,
    SequenceSize,
    Settle,
    Span,
    Status,
    Task,
    Timings,
    Turns,
)
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.bus.wire.task_settings import Budget

WIRE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()


class ForeignActor:
    """An actor that does steps 1 to 7 of the document, and nothing more."""

    def __init__(self, nc: Client, run: str) -> None:
        self.nc, self.run = nc, run

    async def lease(self, timeout_s: float = 60.0) -> Msg:
        inbox = self.nc.new_inbox()
        sub = await self.nc.subscribe(inbox)
        request = json.dumps({"batch": 1, "expires": int(timeout_s * 1e9)}).encode()
        await self.nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.TM_{self.run}_TASKS.rollout", request, reply=inbox)
        message = await sub.next_msg(timeout=timeout_s + 1)
        await sub.unsubscribe()
        return message

    async def store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        answer = json.loads((await self.nc.request(subject, payload, timeout=60, headers=headers)).data)
        assert "error" not in answer, answer
        return int(answer["seq"])

    async def settle(self, task: Msg) -> None:
        await self.nc.request(task.reply, b"+ACK", timeout=60)


def i4(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def f4(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def foreign_sample(run: str, task: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "schema": 1,
        "type": "sample",
        "run": run,
        "task": task,
        "index": 1,
        "group_size": 2,
        "attempt": "n0nce",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "tokens": i4(5, 6, 7, 8, 9),
        "response_length": 3,
        "response": "two",
        "rollout_log_probs": f4(-0.5, 0.0, -1.25),
        "loss_mask": bytes([1, 0, 1]),
        "spans": [[3, 2], [4, 1]],
        "reward": {"score": 1, "format": 0.5},
        "status": "completed",
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 11},
    }
    return {**fields, **changes}


async def test_a_foreign_actor_takes_part(open_bus: BusOpener) -> None:
    """The actor leases, renews, publishes and acknowledges: the learner's side gets the sample, and the queue is
    empty.
    """
    async with open_bus() as bus:
        await bus.tasks.fence(1)
        id = await bus.tasks.issue(
            make_task(bus.run, prompt=[{"role": "user", "content": "1+1?"}], label="2", min_version=3)
        )
        nc = await nats.connect(bus.nc.connected_url.geturl())
        actor = ForeignActor(nc, bus.run)
        message = await actor.lease()
        assert message.reply.split(".")[4:6] == ["1", str(id)], "deliveries and id"
        assert message.headers is not None and message.headers["Tm-Epoch"] == "1"
        task = msgpack.unpackb(message.data)
        assert (task["schema"], task["type"], task["epoch"], task["min_version"], task["label"]) == (
            1,
            "task",
            1,
            3,
            "2",
        )
        assert struct.unpack("<3i", task["prompt_tokens"]) == (5, 6, 7)
        assert task["sampling"]["max_new_tokens"] == 128
        await nc.publish(message.reply, b"+WPI")
        payload = msgpack.packb(foreign_sample(bus.run, id, mine="kept"))
        headers = {"Nats-Msg-Id": f"{id}.1.n0nce", "Tm-Sample": "group=2"}
        subject = f"tm.{bus.run}.sample.train.3.foreign"
        seq = await actor.store(subject, payload, headers)
        assert await actor.store(subject, payload, headers) == seq
        await actor.settle(message)
        assert await bus.tasks.backlog() == (0, 0)
        reading = bus.samples.read(None, vocab_size=10)
        (received,) = await take(reading, 1)
        await reading.aclose()  # type: ignore[attr-defined]
        await nc.close()
    assert isinstance(received.sample, Sample)
    assert_sample(received.sample, bus.run, id)


def assert_sample(sample: Sample, run: str, task: int) -> None:
    expected = Sample(
        run=run,
        task=task,
        index=1,
        group_size=2,
        attempt="n0nce",
        prompt=[{"role": "user", "content": "1+1?"}],
        tokens=np.array([5, 6, 7, 8, 9], np.int32),
        response_length=3,
        response="two",
        rollout_log_probs=np.array([-0.5, 0, -1.25], np.float32),
        loss_mask=np.array([1, 0, 1], np.uint8),
        spans=(Span(version=3, num_tokens=2), Span(version=4, num_tokens=1)),
        reward={"score": 1.0, "format": 0.5},
        status=Status.COMPLETED,
        sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=11),
        extra={"mine": "kept"},
    )
    for field in dataclasses.fields(Sample):
        np.testing.assert_equal(getattr(sample, field.name), getattr(expected, field.name), field.name)
    assert (sample.timings, sample.kind, sample.score) == (Timings(), Kind.TRAIN, 1.0)


async def test_our_sample_has_the_documented_form(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.samples.publish(make_sample(bus.run, task=4, index=2, length=3))
        message = await bus.js.get_msg(f"TM_{bus.run}_SAMPLES", 1)
    fields = msgpack.unpackb(message.data or b"")
    assert list(fields)[:2] == ["schema", "type"]
    assert struct.unpack("<6i", fields["tokens"]) == (0, 1, 2, 3, 4, 5)
    assert struct.unpack("<3f", fields["rollout_log_probs"]) == (-0.5, -0.5, -0.5)
    assert (fields["loss_mask"], fields["spans"], fields["status"]) == (b"\1\1\1", [[3, 3]], "completed")
    assert set(fields["sampling"]) == {field.name for field in dataclasses.fields(Sampling)}
    assert message.subject == f"tm.{bus.run}.sample.train.3.a1"
    assert message.headers == {
        "Nats-Msg-Id": "4.2.a0",
        "Tm-Sample": "group=8 versions=3-3 reward=1 status=completed tokens=3",
    }


EPISODE: dict[str, Any] = {
    "schema": 2,
    "rollout": "calc",
    "tokens": i4(1, 2, 3, 4, 50, 51, 90, 91, 52, 53, 1, 2, 8, 9, 54, 55),
    "response_length": 8,
    "sequences": [[10, 6], [6, 2]],
    "loss_mask": bytes([1, 1, 0, 0, 1, 1, 1, 1]),
    "rollout_log_probs": f4(-0.2, -0.1, 0, 0, -0.7, -0.3, -0.1, -0.4),
    "spans": [[5, 2], [6, 4], [6, 2]],
    "turns": {
        "at": i4(0, 4, 6),
        "tokens": i4(2, 2, 2),
        "seconds": f4(0.8, 0.9, 0.7),
        "id": ["t-0", "t-1", "t-2"],
        "rewards": [[1, 0.5]],
    },
    "transcript": [{"role": "user", "content": "12*7-5?"}],
}


def test_a_foreign_episode_is_read() -> None:
    sample = decode_sample(msgpack.packb(foreign_sample("r", 41, **EPISODE)))
    check_sample(sample, vocab_size=92)
    assert (sample.rollout, sample.sequences, sample.transcript) == (
        "calc",
        ((10, 6), (6, 2)),
        ({"role": "user", "content": "12*7-5?"},),
    )
    assert sample.turns is not None
    assert (sample.turns.at.tolist(), sample.turns.tokens.tolist(), sample.turns.id) == (
        [0, 4, 6],
        [2, 2, 2],
        ("t-0", "t-1", "t-2"),
    )
    assert (sample.turns.seconds.tolist(), sample.turns.rewards) == (pytest.approx([0.8, 0.9, 0.7]), ((1, 0.5),))
    one: dict[str, Any] = {"sequences": [[16, 8]], "schema": 1}
    assert decode_sample(msgpack.packb(foreign_sample("r", 41, **{**EPISODE, **one}))).sizes == ((16, 8),)


def episode_of(run: str, sequences: int, **changes: Any) -> tuple[Sample, list[list[int]]]:
    """Return an episode of several sequences of different sizes, and the ids that were sampled in each: from 50, tool
    results are 9.
    """
    tokens, mask, log_probs, spans, at, sizes, sampled = [], [], [], [], [], [], []
    for number in range(sequences):
        ids = [50 + 10 * number + place for place in range(1 + number % 3)]
        region = [*ids, *([9] * number), ids[0]] if number else ids
        trained = [1] * len(ids) + ([0] * number + [1] if number else [])
        at += [len(mask), *([len(mask) + len(region) - 1] if number else [])]
        tokens += [1, 2, *range(3, 3 + number), *region]
        mask += trained
        log_probs += [-0.25 * one for one in trained]
        spans.append(Span(version=5 + number // 2, num_tokens=len(region)))
        sizes.append(SequenceSize(2 + number + len(region), len(region)))
        sampled.append([id for id, one in zip(region, trained, strict=True) if one])
    turns = [len(ids) - 1 if number else len(ids) for number, ids in enumerate(sampled)]
    lengths = [length for number, first in enumerate(turns) for length in ((first, 1) if number else (first,))]
    fields: dict[str, Any] = {
        "tokens": np.array(tokens, np.int32),
        "response_length": len(mask),
        "sequences": tuple(sizes) if sequences > 1 else (),
        "loss_mask": np.array(mask, np.uint8),
        "rollout_log_probs": np.array(log_probs, np.float32),
        "spans": tuple(spans),
        "turns": Turns(at=np.array(at, np.int32), tokens=np.array(lengths, np.int32)),
    }
    return make_episode(run, **{**fields, **changes}), sampled


@pytest.mark.parametrize("sequences", [1, 2, 7])
async def test_our_episode_has_the_documented_form(open_bus: BusOpener, sequences: int) -> None:
    """Every sequence is found from the pairs alone, in one message and in parts."""
    async with open_bus() as bus:
        for task, filler in ((1, ""), (2, "x" * 9_000_000)):
            sample, sampled = episode_of(bus.run, sequences, task=task, response=filler)
            stored = await bus.samples.publish(sample)
            message = await bus.js.get_msg(f"TM_{bus.run}_SAMPLES", stored)
            turns, trained = 2 * sequences - 1, sum(map(len, sampled))
            more = f" sequences={sequences} sampled={trained}" if sequences > 1 else ""
            wanted = f"tokens={sample.response_length} turns={turns}{more}"
            assert message.headers is not None and message.headers["Tm-Sample"].endswith(wanted), message.headers[
                "Tm-Sample"
            ]
            assert ("Tm-Parts" in message.headers) is bool(filler)
            data = message.data or b""
            if filler:
                parts = [await bus.js.get_msg(f"TM_{bus.run}_SAMPLES", part) for part in msgpack.unpackb(data)["seqs"]]
                data = b"".join(part.data or b"" for part in parts)
            fields = msgpack.unpackb(data)
            assert (fields["schema"], fields["rollout"], fields["response"]) == (
                2 if sequences > 1 else 1,
                "calc",
                filler,
            )
            assert sampled_in(fields) == sampled
            assert struct.unpack(f"<{turns}i", fields["turns"]["at"]) == tuple(
                sample.turns.at.tolist() if sample.turns else ()
            )


def sampled_in(fields: Mapping[str, Any]) -> list[list[int]]:
    """Return the trained ids of each sequence, by the rules of docs/wire.md alone."""
    ids = struct.unpack(f"<{len(fields['tokens']) // 4}i", fields["tokens"])
    found, left, right = [], 0, 0
    for length, response in fields.get("sequences", [[len(ids), fields["response_length"]]]):
        region = ids[left + length - response : left + length]
        mask = fields["loss_mask"][right : right + response]
        found.append([id for id, trained in zip(region, mask, strict=True) if trained])
        left, right = left + length, right + response
    assert (left, right) == (len(ids), len(fields["loss_mask"]))
    return found


@pytest.mark.parametrize("sequences", [1, 2, 7])
def test_an_episode_that_we_wrote_is_read_again(sequences: int) -> None:
    sample, sampled = episode_of("r", sequences)
    again = decode_sample(encode_sample(sample))
    check_sample(again)
    assert [size.response_length for size in again.sizes] == [size.response_length for size in sample.sizes]
    assert len(again.sizes) == sequences == len(sampled)


async def test_a_task_of_a_rollout_is_on_its_own_subject(open_bus: BusOpener) -> None:
    budget = Budget(turns=6, tokens=512, context=4096, total_tokens=16384, seconds=600.0)
    async with open_bus() as bus:
        await bus.tasks.fence(1)
        id = await bus.tasks.issue(make_task(bus.run, rollout="calc", budget=budget))
        message = await bus.js.get_msg(f"TM_{bus.run}_TASKS", id)
        assert message.subject == f"tm.{bus.run}.task.train-calc"
        fields = msgpack.unpackb(message.data or b"")
        assert (fields["schema"], fields["rollout"]) == (2, "calc")
        assert fields["budget"] == {"turns": 6, "tokens": 512, "context": 4096, "total_tokens": 16384, "seconds": 600.0}
        assert await bus.tasks.lease(0.2) is None, "an actor of single turns never leases it"
        assert (await bus.tasks.fetch(id)).budget == budget


async def test_a_foreign_sample_in_parts_is_joined(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        actor = ForeignActor(bus.nc, bus.run)
        whole = msgpack.packb(foreign_sample(bus.run, 9, mine="kept"))
        pieces = [whole[start : start + 100] for start in range(0, len(whole), 100)]
        seqs = [
            await actor.store(f"tm.{bus.run}.part.train.9", piece, {"Nats-Msg-Id": f"9.1.n0nce.chunk/{number}"})
            for number, piece in enumerate(pieces)
        ]
        digest = hashlib.sha256(whole).hexdigest()
        manifest = msgpack.packb({"schema": 1, "type": "parts", "seqs": seqs, "length": len(whole), "sha256": digest})
        headers = {"Nats-Msg-Id": "9.1.n0nce", "Tm-Parts": str(len(seqs))}
        seq = await actor.store(f"tm.{bus.run}.sample.train.3.foreign.parts", manifest, headers)
        reading = bus.samples.read(None)
        (received,) = await take(reading, 1)
        await reading.aclose()  # type: ignore[attr-defined]
        assert received.seq == seq
        assert isinstance(received.sample, Sample)
        assert_sample(received.sample, bus.run, 9)


async def test_a_foreign_partial_is_found_and_ours_has_the_documented_form(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        nc = await nats.connect(bus.nc.connected_url.geturl())
        actor = ForeignActor(nc, bus.run)
        fields = {
            "schema": 1,
            "type": "partial",
            "run": bus.run,
            "task": 7,
            "index": 1,
            "attempt": "n0nce",
            "seed": 12,
            "position": 5,
            "mine": 1,
            "tokens": struct.pack("<2i", 8, 9),
            "rollout_log_probs": struct.pack("<2f", -0.5, -0.25),
            "spans": [[3, 2]],
            "response": "tw",
        }
        await actor.store(f"tm.{bus.run}.partial.7.1", msgpack.packb(fields), {"Nats-Msg-Id": "partial.7.1.n0nce"})
        found = await bus.partials.of(7)
        assert list(found) == [1]
        assert (found[1].tokens.tolist(), found[1].rollout_log_probs.tolist()) == ([8, 9], [-0.5, -0.25])
        assert (found[1].spans, found[1].seed, found[1].position, found[1].extra) == (
            (Span(version=3, num_tokens=2),),
            12,
            5,
            {"mine": 1},
        )
        assert await bus.partials.store(make_partial(bus.run, 7, 0))
        raw = await bus.js.get_last_msg(f"TM_{bus.run}_PARTIALS", f"tm.{bus.run}.partial.7.0")
        await nc.close()
    assert raw.headers is not None and raw.headers["Nats-Msg-Id"] == "partial.7.0.n0nce"
    assert raw.data is not None
    told = msgpack.unpackb(raw.data)
    assert (told["schema"], told["type"], told["task"], told["index"], told["sample_seq"]) == (1, "partial", 7, 0, 0)
    assert (struct.unpack("<3i", told["tokens"]), told["spans"]) == ((8, 9, 8), [[3, 2], [4, 1]])


async def test_a_foreign_report_and_death_are_counted(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.tasks.fence(1)
        id = await bus.tasks.issue(make_task(bus.run))
        actor = ForeignActor(bus.nc, bus.run)
        message = await actor.lease()
        report = {
            "schema": 1,
            "type": "report",
            "task": id,
            "reason": "no tool",
            "actor": "foreign",
            "attempt": "n0nce",
        }
        subject = f"tm.{bus.run}.dead.report.{id}"
        await actor.store(subject, msgpack.packb(report), {"Nats-Msg-Id": f"report.{id}.n0nce"})
        filtered = json.dumps({"subjects_filter": subject}).encode()
        info = json.loads((await bus.nc.request(f"$JS.API.STREAM.INFO.TM_{bus.run}_DEAD", filtered, timeout=60)).data)
        assert info["state"]["subjects"] == {subject: 1}
        assert await bus.dead.report(id, reason="again", actor="ours", attempt="another") == 2
        dead = {
            "schema": 1,
            "type": "dead",
            "task": id,
            "reason": "no tool",
            "attempts": 2,
            "actor": "foreign",
            "prompt": "1+1=",
        }
        headers = {"Nats-Msg-Id": f"dead.{id}", "Nats-Expected-Last-Subject-Sequence": "0"}
        await actor.store(f"tm.{bus.run}.dead.task.{id}", msgpack.packb(dead), headers)
        await actor.settle(message)
        found = [found async for _, found in bus.dead.scan()]
    assert found == [Dead(task=id, reason="no tool", attempts=2, actor="foreign", prompt="1+1=")]


async def test_a_foreign_nak_returns_the_task_and_a_foreign_row_is_read(open_bus: BusOpener) -> None:
    async with open_bus(lease_s=60) as bus:
        await bus.tasks.fence(1)
        id = await bus.tasks.issue(make_task(bus.run))
        message = await ForeignActor(bus.nc, bus.run).lease()
        await bus.nc.publish(message.reply, b"-NAK")
        lease = await bus.tasks.lease(60)
        assert lease is not None and lease.task.id == id
        row = {
            "role": "actor",
            "id": "foreign",
            "host": "h",
            "pid": 1,
            "phase": "working",
            "load": {"in_flight": 2},
            "since": 1,
        }
        await bus.nc.request(f"$KV.TM_{bus.run}_live.actor.foreign", json.dumps(row).encode(), timeout=60)
        assert await LiveView(bus).alive() == [
            LiveRow(role="actor", id="foreign", host="h", pid=1, phase="working", load={"in_flight": 2.0})
        ]


async def test_a_foreign_engine_states_its_capabilities_and_one_that_does_not_has_none(open_bus: BusOpener) -> None:
    stated = {
        "ranks": 2,
        "single_request_push": True,
        "devices": ["GPU-a", "GPU-b"],
        "device_memory_bytes": 1,
        "added_later": [1],
    }
    named = {"d": {"capabilities": stated}, "e": {"load": {"ranks": 2}}, "f": {"capabilities": {"ranks": 0}}}
    async with open_bus() as bus:
        for id, fields in named.items():
            row = {"role": "engine", "id": id, "host": "h", "pid": 1, "phase": "serving", **fields}
            await bus.nc.request(f"$KV.TM_{bus.run}_live.engine.{id}", json.dumps(row).encode(), timeout=60)
        found = {row.id: row.capabilities for row in await LiveView(bus).alive("engine")}
        known = Capabilities(ranks=2, single_request_push=True, devices=("GPU-a", "GPU-b"), device_memory_bytes=1)
        assert found == {"d": known, "e": Capabilities()}
        assert "capabilities.ranks: want an integer from 1 to 1024" in str(bus.refusals)
        for wrong, place, want in (
            ({"devices": "GPU-a"}, "devices", "a list of text"),
            ({"visible_devices": [1]}, "visible_devices[0]", "text"),
        ):
            row = {"role": "engine", "id": "g", "host": "h", "pid": 1, "phase": "serving", "capabilities": wrong}
            await bus.nc.request(f"$KV.TM_{bus.run}_live.engine.g", json.dumps(row).encode(), timeout=60)
            assert "g" not in {row.id for row in await LiveView(bus).alive("engine")}
            assert f"capabilities.{place}: want {want}, got" in str(bus.refusals)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout_log_probs": struct.pack(">3f", -0.5, 1e-3, -1.25)}, "rollout_log_probs"),
        ({"rollout_log_probs": struct.pack("<3d", -0.5, 0, -1.25)}, "rollout_log_probs"),
        ({"tokens": struct.pack(">5i", 5, 6, 7, 8, 9)}, "tokens"),
        ({"loss_mask": [1, 0, 1]}, "loss_mask"),
        ({"spans": [[3, 2]]}, "spans"),
        ({"index": 2}, "index"),
        ({"schema": 4}, "schema"),
        ({"demonstration": True}, "schema"),
        ({"schema": 3, "demonstration": True}, "rollout_log_probs"),
        ({"sequences": [[2, 1], [3, 2]]}, "schema"),
        ({"schema": 2, "sequences": [[2, 1], [3, 3]]}, "sequences[1]"),
        ({"schema": 2, "sequences": [[2, 1], [3, 2]]}, "spans"),
        (
            {"response_length": 5, "rollout_log_probs": f4(*[-1.0] * 5), "loss_mask": b"\1" * 5, "spans": [[3, 5]]},
            "response_length",
        ),
    ],
)
def test_samples_that_the_document_forbids_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as caught:
        check_sample(decode_sample(msgpack.packb(foreign_sample("r", 1, **change))), vocab_size=10)
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    "message",
    [
        Sample,
        Task,
        Partial,
        Plan,
        Done,
        Settle,
        Requeue,
        Evaluated,
        Dead,
        DeadLetterDecision,
        Sampling,
        Timings,
        Turns,
        Budget,
        LiveRow,
        Capabilities,
    ],
)
def test_the_document_names_every_field(message: type) -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", WIRE))
    fields = {field.name for field in dataclasses.fields(message)} - {"extra"} - ({"id"} if message is Task else set())
    assert fields <= named, sorted(fields - named)


def test_the_document_names_every_header_and_subject() -> None:
    for name in (
        "Tm-Sample",
        "group",
        "versions",
        "reward",
        "status",
        "tokens",
        "turns",
        "sequences",
        "sampled",
        "engine",
        "Tm-Parts",
        "Tm-Epoch",
    ):
        assert f"`{name}`" in WIRE
    for status in Status:
        assert f"`{status.value}`" in WIRE
