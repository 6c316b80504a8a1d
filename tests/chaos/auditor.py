"""An auditor that shares no code with the system: it reads the streams and the newest checkpoint as docs/wire.md spells
them.

It knows msgpack, JSON and NATS requests. It requires of a run, whatever was killed in it:

- every message that a witness has seen stored is still there, or was trimmed, and a record or a cursor accounts for it
- every sample that is there is in a step, given up with its reason, a duplicate of a trained one, refused,
  or still to come
- no sample, no (task, index) and no task is in two steps; steps are planned once, 1, 2, 3 ...
- a group has all of its samples, but for a dead task
- the newest checkpoint's cursor covers exactly the samples that its model has trained, and none that is yet
  to be trained
- a step that was taken again ended in the same bits
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgpack
import nats
from nats.aio.client import Client

Place = tuple[int, int]

SOUND = ("good", "duplicate")
"""Kinds of a foreign actor's samples that may be trained."""
BY_TASK = ("index beyond the group", "group size", "another prompt", "another temperature", "unknown task")
"""Kinds of samples that only their task shows to be wrong: they are duplicates once it is settled, and may wait for one
to be issued.
"""
CHANCE = ("mutated", "version of tomorrow", "version of next week")
"""Kinds of samples that may be valid by chance: the version exists by now, or the changed byte has no effect."""
REASONS = {"stale", "filtered", "empty", "dead", "lost", "failed", "aborted"}


@dataclass
class Verdict:
    """The findings; ``wrong`` lists violations in words."""

    steps: int = 0
    """Number of planned steps."""
    steps_done: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    refused: int = 0
    """Number of a foreign actor's samples with a defect."""
    refused_by: Counter[str] = field(default_factory=Counter)
    """The same by kind."""
    to_come: int = 0
    trimmed: int = 0
    steps_taken_again: int = 0
    steps_without_digest: int = 0
    """Number of done steps with weights that have no digest (``learner.weights_digest``): their bits were compared with
    nothing.
    """
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = (
            f"{self.steps} steps, {self.trained} samples trained, dropped {dict(self.dropped)}, {self.duplicates} "
            "duplicates"
        )
        more = (
            f"{self.refused} refused, {self.to_come} to come, {self.trimmed} trimmed, {self.steps_taken_again} "
            "steps taken again"
        )
        return f"{found}, {more}; lost {self.lost[:5]}, twice {self.twice[:5]}, wrong {self.wrong[:5]}"


@dataclass
class Message:
    seq: int
    subject: str
    headers: dict[str, str]
    body: dict[str, Any]


async def judge(
    url: str, run: str, checkpoints: Path, witnessed: dict[int, str], foreign: Mapping[str, str] | None = None
) -> Verdict:
    """Audit a run that is at rest. ``witnessed``: message ids by sequence in SAMPLES, as a reader saw them while it
    ran.

    ``foreign``: the intent of a hostile actor for each of its message ids (see ``hostile``): a defect must not be
    trained, and is no loss.
    """
    user = urlsplit(url).username
    inbox = f"_INBOX_{user}" if user else "_INBOX"  # where docs/security.md lets a user receive its answers
    nc = await nats.connect(url, connect_timeout=60, max_reconnect_attempts=1, inbox_prefix=inbox.encode())
    try:
        audit = _Audit(foreign or {})
        fence = 0
        async for message in _messages(nc, f"TM_{run}_DEAD"):
            if ".dead.task." in message.subject:
                audit.dead(message)
        async for message in _messages(nc, f"TM_{run}_PLAN"):
            epoch = int(message.headers["Tm-Epoch"])
            kind = message.subject.rsplit(".", 1)[1]
            fence = max(fence, epoch) if kind == "fence" else fence
            if epoch >= fence:
                getattr(audit, kind)(message)
        audit.checkpoint(checkpoints)
        streams = await _shards(nc, run)
        for shard, stream in enumerate(streams):
            of_shard = {seq: id for seq, id in witnessed.items() if seq % len(streams) == shard}
            await _audit_shard(nc, audit, stream, shard, len(streams), of_shard)
        audit.close()
        return audit.verdict
    finally:
        await nc.close()


async def _shards(nc: Client, run: str) -> list[str]:
    """Return the streams of the samples, in the order of their numbers: one, or `SAMPLES-0of2`, `SAMPLES-1of2`."""
    names = (await _ask(nc, "STREAM.NAMES", {"subject": f"tm.{run}.>"}))["streams"]
    streams = [name for name in names if name.startswith(f"TM_{run}_SAMPLES")]
    wanted = [f"TM_{run}_SAMPLES-{shard}of{len(streams)}" for shard in range(len(streams))]
    assert streams == [f"TM_{run}_SAMPLES"] or sorted(streams) == sorted(wanted), streams
    return streams if len(streams) == 1 else wanted


async def _audit_shard(
    nc: Client, audit: "_Audit", stream: str, shard: int, count: int, witnessed: dict[int, str]
) -> None:
    """Audit the samples of one of ``count`` streams. Message q of shard s is the sample q * count + s."""
    first = int((await _ask(nc, f"STREAM.INFO.{stream}"))["state"]["first_seq"])
    audit.trimmed([local * count + shard for local in range(1, first)], witnessed)
    present: set[int] = set()
    async for message in _messages(nc, stream):
        message.seq = message.seq * count + shard
        present.add(message.seq)
        kind, of = message.subject.split(".")[2:4]
        if kind.startswith("part") or of == "eval" or audit.defective(message):
            continue
        audit.sample(message)
        if message.body["task"] % count != shard:
            audit.verdict.wrong.append(f"sample {message.seq} of task {message.body['task']} is in shard {shard}")
        if witnessed.get(message.seq, message.headers["Nats-Msg-Id"]) != message.headers["Nats-Msg-Id"]:
            audit.verdict.lost.append(
                f"{message.seq} was {witnessed[message.seq]} and is {message.headers['Nats-Msg-Id']}"
            )
    for seq in sorted(set(witnessed) - present):
        if seq // count >= first:
            audit.verdict.lost.append(f"{seq} ({witnessed[seq]}) was seen in the stream and is not there")


class _Audit:
    def __init__(self, foreign: Mapping[str, str]) -> None:
        self.verdict = Verdict()
        self._foreign = foreign
        self._step_of: dict[int, int] = {}
        self._reason_of: dict[int, str] = {}
        self._trained_tasks: dict[int, int] = {}
        self._dropped_tasks: dict[int, str] = {}
        self._places: dict[Place, int] = {}
        self._planned: dict[int, Place] = {}
        self._digests: dict[int, set[str]] = {}
        self._sizes: dict[int, int] = {}
        self._dead: set[int] = set()
        self._requeued: set[int] = set()
        self._late: list[tuple[int, Place]] = []
        self._floors, self._settled, self._checkpoint_step = [0], frozenset[int](), 0

    def dead(self, message: Message) -> None:
        self._dead.add(message.body.get("task", -1))

    # ---- the log

    def plan(self, message: Message) -> None:
        body, verdict = message.body, self.verdict
        if body["step"] != verdict.steps + 1:
            verdict.wrong.append(f"step {body['step']} is planned behind step {verdict.steps}")
        verdict.steps = body["step"]
        tasks, seqs, sizes = _ints(body["tasks"], "q"), _ints(body["seqs"], "q"), _ints(body["group_sizes"], "i")
        places = [(task, index) for task, size in zip(tasks, sizes, strict=True) for index in range(size)]
        for task in tasks:
            if task in self._trained_tasks or task in self._dropped_tasks:
                verdict.twice.append(f"task {task} is in step {body['step']} and was settled before")
            self._trained_tasks[task] = body["step"]
        self._sizes.update(zip(tasks, sizes, strict=True))
        for seq, place in zip(seqs, places, strict=True):
            if seq in self._step_of or seq in self._reason_of:
                verdict.twice.append(f"sample {seq} is in step {body['step']} and was settled before")
            if place in self._places:
                verdict.twice.append(f"samples {self._places[place]} and {seq} are both trained as {place}")
            self._step_of[seq], self._places[place], self._planned[seq] = body["step"], seq, place
        verdict.trained += len(seqs)

    def settle(self, message: Message) -> None:
        reason = message.body["reason"]
        if reason not in REASONS:
            self.verdict.wrong.append(f"reason {reason!r} is none")
        self._dropped_tasks.update(dict.fromkeys(_ints(message.body["tasks"], "q"), reason))
        for seq in _ints(message.body["seqs"], "q"):
            if seq in self._step_of or seq in self._reason_of:
                self.verdict.twice.append(f"sample {seq} is given up ({reason}) and was settled before")
            self._reason_of[seq] = reason
            self.verdict.dropped[reason] += 1

    def done(self, message: Message) -> None:
        digest = message.body["weights_digest"]
        known = self._digests.setdefault(message.body["step"], set())
        self.verdict.steps_taken_again += bool(known)
        known.add(str(digest))
        self.verdict.steps_done = len(self._digests)
        self.verdict.steps_without_digest = sum("None" in digests for digests in self._digests.values())
        if len(known) > 1:
            self.verdict.wrong.append(
                f"step {message.body['step']} was taken again and gave other weights: {sorted(known)}"
            )

    def requeue(self, message: Message) -> None:
        task = message.body["task"]
        if self._dropped_tasks.get(task) != "dead" or task in self._requeued:
            self.verdict.wrong.append(f"task {task} is asked for again, and is not dead or has been before")
        self._requeued.add(task)

    def fence(self, message: Message) -> None:
        pass

    def evaluated(self, message: Message) -> None:
        pass  # scores, of samples that are not trained

    # ---- the checkpoint

    def checkpoint(self, root: Path) -> None:
        """Read the newest checkpoint with files that match its manifest."""
        found = sorted(root.glob("step-*"), key=lambda path: tuple(map(int, path.name.split("-")[1::2])), reverse=True)
        newest = next((path for path in found if _whole(path)), None)
        if newest is None:
            return
        state = msgpack.unpackb((newest / "state.msgpack").read_bytes())
        samples = state["samples"]
        self._floors, self._settled = samples.get("floors", [samples["floor"]]), frozenset(samples["settled"])
        self._checkpoint_step = int(state["step"])
        for seq, step in self._step_of.items():
            if step <= self._checkpoint_step and not self._behind(seq):
                self.verdict.twice.append(
                    f"sample {seq} is in step {step}, in the model of the checkpoint, and not behind its cursor"
                )
            if step > self._checkpoint_step and self._behind(seq):
                self.verdict.lost.append(
                    f"sample {seq} is in step {step}, not in the model of the checkpoint, and behind its cursor"
                )

    def _behind(self, seq: int) -> bool:
        return seq <= self._floors[seq % len(self._floors)] or seq in self._settled

    # ---- the samples

    def trimmed(self, seqs: Sequence[int], witnessed: dict[int, str]) -> None:
        """Check that every sample before the first message is in a record, or behind the cursor as a duplicate or a
        failed one.
        """
        self.verdict.trimmed += len(seqs)
        for seq in seqs:
            if not self._behind(seq):
                self.verdict.lost.append(f"sample {seq} was trimmed, and the checkpoint's cursor is not past it")
            if seq in self._step_of or seq in self._reason_of or seq not in witnessed:
                continue
            if self._foreign.get(witnessed[seq], SOUND[0]) not in SOUND:
                continue
            task, index = map(int, witnessed[seq].split(".")[:2])
            if (
                (task, index) not in self._places
                and task not in self._dropped_tasks
                and not (task in self._dead and task in self._sizes)
            ):
                self.verdict.lost.append(f"sample {seq} ({witnessed[seq]}) was trimmed, and no record knows its place")

    def defective(self, message: Message) -> bool:
        """Return whether a message is a foreign actor's sample that was not meant to be trained; training it is
        recorded as wrong.
        """
        kind = self._foreign.get(message.headers["Nats-Msg-Id"], SOUND[0])
        if kind in SOUND or (kind in CHANCE and message.seq in self._step_of):
            return False
        if message.seq in self._step_of:
            self.verdict.wrong.append(
                f"sample {message.seq} with the defect {kind!r} is in step {self._step_of[message.seq]}"
            )
        self.verdict.refused += 1
        self.verdict.refused_by[kind] += 1
        return True

    def sample(self, message: Message) -> None:
        seq, body, verdict = message.seq, message.body, self.verdict
        place = (body["task"], body["index"])
        size, asked = self._sizes.get(body["task"], body["group_size"]), body["group_size"]
        short = body["task"] in self._dead and size < asked
        if seq in self._step_of:
            planned = self._planned[seq]
            if size < asked and not short:
                verdict.wrong.append(f"task {body['task']} is not dead, and was trained with {size} of {asked} samples")
            # A dead task may be trained with fewer samples. A plan has no indexes, so those behind a gap are larger
            # than their positions.
            if place != planned and not (short and place[0] == planned[0] and place[1] > planned[1]):
                verdict.wrong.append(f"sample {seq} is {place}, and its step has it as {planned}")
        elif seq in self._reason_of:
            pass
        elif body["status"] in ("failed", "aborted"):
            verdict.dropped[body["status"]] += 1
        elif body["task"] in self._dropped_tasks:
            verdict.dropped[self._dropped_tasks[body["task"]]] += 1
        elif short:
            verdict.duplicates += 1  # it came after its group was trained without it
        elif body["task"] in self._trained_tasks:
            self._late.append((seq, place))
        elif self._behind(seq):
            verdict.lost.append(f"sample {seq} {place} is behind the cursor, and no record names it")
        else:
            verdict.to_come += 1

    def close(self) -> None:
        for seq, place in self._late:
            if place in self._places:
                self.verdict.duplicates += 1
            else:
                self.verdict.lost.append(
                    f"sample {seq} {place} is the only one of its place, and its task was trained without it"
                )


def _whole(path: Path) -> bool:
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        return all(
            hashlib.sha256((path / name).read_bytes()).hexdigest() == wanted["sha256"] for name, wanted in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _ints(data: bytes, form: str) -> list[int]:
    return list(struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))


def _map(data: bytes) -> dict[str, Any]:
    """Return the map of a message; empty when it is none."""
    try:
        found = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return {}
    return found if isinstance(found, dict) else {}


async def _ask(nc: Client, verb: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = json.loads((await nc.request(f"$JS.API.{verb}", json.dumps(request or {}).encode(), timeout=30)).data)
    assert "error" not in answer, (verb, answer)
    return answer


async def _messages(nc: Client, stream: str) -> AsyncIterator[Message]:
    """Yield all messages of a stream that is at rest, in order."""
    wanted = (await _ask(nc, f"STREAM.INFO.{stream}"))["state"]["messages"]
    if not wanted:
        return
    config = {"deliver_policy": "all", "ack_policy": "none", "mem_storage": True, "inactive_threshold": 60_000_000_000}
    inbox = nc.new_inbox()
    name = f"audit-{inbox.rsplit('.', 1)[1]}"
    await _ask(nc, f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": {**config, "name": name}})
    sub = await nc.subscribe(inbox)
    while wanted:
        batch = min(256, wanted)
        await nc.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", json.dumps({"batch": batch}).encode(), reply=inbox
        )
        for _ in range(batch):
            message = await sub.next_msg(timeout=30)
            assert message.reply, f"{stream}: {message.headers}"
            wanted -= 1
            seq = int(message.reply.split(".")[-4])
            yield Message(seq, message.subject, dict(message.headers or {}), _map(message.data))
    await sub.unsubscribe()
