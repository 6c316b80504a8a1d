"""An actor written from docs/wire.md alone: it shares no code with ``bus``, only a NATS client, msgpack and struct.

It takes a task that our learner side has issued, publishes samples that our reader accepts, and reads what our actor side publishes.
"""

import hashlib
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import pytest

from bus.codec import check_sample, decode_sample, encode_sample
from bus.messages import Sample
from bus.server import EmbeddedServer
from tests import data_kit
from tests.actor_kit import issue, prompt_tokens, take_over
from tests.bus_fixtures import BusOpener

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/wire.md"


@pytest.fixture(scope="module", autouse=True)
def _tokens() -> None:
    """Made here, where it blocks no loop."""
    prompt_tokens()


def ints(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def sample_of(task_id: int, task: dict[str, Any], index: int, attempt: str) -> dict[str, Any]:
    """A sample as the document describes it: three tokens under versions 4 and 5."""
    response = [5, 6, 1]
    return {
        "schema": 1,
        "type": "sample",
        "run": task["run"],
        "kind": task["kind"],
        "task": task_id,
        "index": index,
        "group_size": task["group_size"],
        "attempt": attempt,
        "prompt": task["prompt"],
        "tokens": task["prompt_tokens"] + struct.pack("<3i", *response),
        "response_length": 3,
        "response": "56",
        "rollout_log_probs": struct.pack("<3f", -0.25, -1.5, -3.0),
        "loss_mask": bytes([1, 1, 1]),
        "spans": [[4, 2], [5, 1]],
        "reward": {"score": 0.5, "format": 1.0},
        "status": "completed",
        "sampling": task["sampling"],
        "label": task["label"],
        "metadata": task["metadata"],
        "actor": "elsewhere",
        "engine": "e",
        "timings": {"queued_s": 0.0, "generating_s": 0.5, "tools_s": 0.0, "reward_s": 0.0},
        "finish_reason": "stop",
        "created_s": 1.0,
        "language": "of its own",
    }


async def test_an_actor_written_from_the_document_alone(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus:
        (task_id,) = await issue(bus, await take_over(bus), group_size=2)
        client = await nats.connect(nats_server.url)
        try:
            await act(client, bus.run)
        finally:
            await client.close()
        assert await bus.tasks.backlog() == (0, 0), "settled"
        found = [received.sample async for received in bus.samples.tail(last=10, follow=False)]
    assert [(s.task, s.index) for s in found if isinstance(s, Sample)] == [(task_id, 0), (task_id, 1)]
    for sample in found:
        assert isinstance(sample, Sample)
        check_sample(sample)
        assert sample.score == 0.5
        assert [(span.version, span.num_tokens) for span in sample.spans] == [(4, 2), (5, 1)]
        assert sample.tokens.tolist()[-3:] == [5, 6, 1]
        assert sample.rollout_log_probs.tolist() == [-0.25, -1.5, -3.0]
        assert sample.extra == {"language": "of its own"}


async def act(client: Any, run: str) -> None:
    """Take one task, publish its samples (the second one twice: its answer might have been lost), ack."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    request = b'{"batch": 1, "expires": 5000000000}'
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.TM_{run}_TASKS.rollout", request, reply=inbox)
    message = await answers.next_msg(timeout=5)
    task_id = int(message.reply.split(".")[5])
    task = msgpack.unpackb(message.data)
    assert (task["schema"], task["type"]) == (1, "task")
    assert ints(task["prompt_tokens"])
    seqs = []
    for index in (0, 1, 1):
        body = msgpack.packb(sample_of(task_id, task, index, "a1b2"))
        headers = {"Nats-Msg-Id": f"{task_id}.{index}.a1b2"}
        answer = await client.request(f"tm.{run}.sample.{task['kind']}.4.elsewhere", body, timeout=5, headers=headers)
        seqs.append(answer.data)
    assert b'"duplicate":true' in seqs[2].replace(b" ", b"")
    await client.publish(message.reply, b"+WPI")
    await client.request(message.reply, b"+ACK", timeout=5)


async def test_what_our_side_publishes_is_what_the_document_says(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus() as bus:
        made = data_kit.sample(data_kit.task(3), 1, spans=((4, 2), (5, 1)), run=bus.run, actor="w 1")
        seq = await bus.samples.publish(made)
        client = await nats.connect(nats_server.url)
        try:
            stored = await client.jetstream().get_msg(f"TM_{bus.run}_SAMPLES", seq)
        finally:
            await client.close()
    fields = msgpack.unpackb(stored.data)
    assert stored.subject == f"tm.{bus.run}.sample.train.4.w_1"
    assert stored.headers["Nats-Msg-Id"] == f"3.1.{made.attempt}"
    assert (stored.headers["Tm-Versions"], stored.headers["Tm-Tokens"], stored.headers["Tm-Status"]) == ("4-5", "3", "completed")
    assert list(fields)[:2] == ["schema", "type"]
    assert set(fields) == set(named_fields())
    assert ints(fields["tokens"]) == made.tokens.tolist()
    assert floats(fields["rollout_log_probs"]) == made.rollout_log_probs.tolist()
    assert fields["spans"] == [[4, 2], [5, 1]]


async def test_a_large_sample_in_parts(open_bus: BusOpener, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts written by hand, as the document tells, are one sample to our reader."""
    async with open_bus() as bus:
        made = data_kit.sample(data_kit.task(3), 0, run=bus.run)
        data, subject = encode_sample(made), f"tm.{bus.run}.sample.train.0.hand.parts"
        client = await nats.connect(nats_server.url)
        try:
            jet = client.jetstream()
            pieces = [data[:100], data[100:]]
            seqs = []
            for number, piece in enumerate(pieces):
                headers = {"Nats-Msg-Id": f"3.0.x.chunk/{number}"}
                seqs.append((await jet.publish(f"tm.{bus.run}.part.train.3", piece, headers=headers)).seq)
            manifest = {"schema": 1, "type": "parts", "seqs": seqs, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            await jet.publish(subject, msgpack.packb(manifest), headers={"Nats-Msg-Id": "3.0.x", "Tm-Parts": "2"})
        finally:
            await client.close()
        reading = bus.samples.read(None)
        received = await anext(reading)
        await reading.aclose()  # type: ignore[attr-defined]
    assert isinstance(received.sample, Sample), received.sample
    assert np.array_equal(received.sample.tokens, made.tokens)


def named_fields() -> list[str]:
    """Fields of the table of a sample in the document."""
    section = DOCUMENT.read_text().split("## Publishing a sample")[1].split("Invariants")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_the_example_of_the_document_is_what_it_says() -> None:
    text = DOCUMENT.read_text().split("## A sample, byte by byte")[1]
    data = bytes.fromhex("".join(re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].split()))  # type: ignore[index]
    fields, sample = msgpack.unpackb(data), decode_sample(data)
    check_sample(sample)
    assert ints(fields["tokens"]) == sample.tokens.tolist() == [3, 4, 12, 3, 1]
    assert floats(fields["rollout_log_probs"]) == sample.rollout_log_probs.tolist() == [-0.5, -1.25]
    assert (fields["task"], fields["index"], fields["group_size"]) == (sample.task, sample.index, sample.group_size) == (7, 0, 2)
    assert (fields["spans"], fields["reward"], fields["response"]) == ([[3, 2]], 0.5, "1")
    assert set(fields) == set(named_fields())
