"""Bytes that no process of a run writes, on every subject of it: random ones, broken messages, other types, huge
numbers.
"""

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

from tests.bus_kit import make_partial, make_sample, make_task
from tests.waits import LIMIT_S
from tidemill.bus.errors import WireError
from tidemill.bus.wire import codec
from tidemill.bus.wire.codec import (
    TurnKind,
    TurnRecord,
    encode_dead,
    encode_decision,
    encode_partial,
    encode_record,
    encode_sample,
    encode_task,
    encode_turn_record,
)
from tidemill.bus.wire.messages import Dead, DeadLetterDecision, Done, Fence
from tidemill.bus.wire.row_reader import read_row
from tidemill.bus.wire.rows import LiveRow

NO_TASK = 10**6
"""An id that no task of the run reaches."""
NO_EPOCH = "999"
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, 1e308, float("nan"), float("-inf")),
    *("", "x" * 3000, "\x1b[31m[/nonsense]\x07", "\u00b2", b"\xff\x00", [], {}, [[[[[[]]]]]], {1: 2}, {"": {"": []}}),
)
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"Nats-Msg-Id": "9" * 5000},
    {"Tm-Epoch": NO_EPOCH},
    {"Tm-Epoch": "9" * 5000},
    {"Tm-Epoch": "\u00b2"},
    {"Tm-Parts": "3"},
    {"Tm-Parts": "3", "Nats-Msg-Id": "1.0.a"},
    {"Tm-Sample": "group=x versions=\u00b2-\u00b2 reward=[/] status=[bold tokens=" + "9" * 5000},
    {"Tm-Sample": "group=-1 versions=9-1 reward=nan status= tokens=1e9", "Nats-Msg-Size": "x"},
    {"KV-Operation": "DEL"},
)
RAW_HEADERS = (
    b"NATS/1.0",
    b"\xff\xff",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0\r\n:\r\n\r\n",
    b"NATS/1.0\r\nA: \xff\r\n\r\n",
)


def _is_row(subject: str, payload: bytes) -> bool:
    _, place, key = subject.split(".", 2)
    try:
        read_row(place.rpartition("_")[2], key, payload)
    except WireError:
        return False
    return True


class Hostile:
    """Writer of invalid messages to one run, equal for equal seeds."""

    def __init__(self, url: str, run: str, seed: int) -> None:
        self._port, self._run, self.random = int(url.rsplit(":", 1)[1]), run, random.Random(seed)
        self.written = 0

    async def write(
        self, count: int, subjects: Callable[[], list[tuple[str, bytes]]], *, unreadable: bool = False
    ) -> None:
        """Write ``count`` messages; the server has them all afterwards. ``unreadable``: rows that no process can take
        for valid ones.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"headers":true,"pedantic":false}\r\n')
        for _ in range(count):
            subject, sound = self.random.choice(subjects())
            payload = self.payload(sound)
            while unreadable and _is_row(subject, payload):
                payload = self.payload(sound)
            self._write(writer, subject, payload)
        writer.write(b"PING\r\n")
        async with asyncio.timeout(LIMIT_S):
            while (line := await reader.readline()) != b"PONG\r\n":
                assert not line.startswith(b"-ERR"), line
        writer.close()
        await writer.wait_closed()

    def _write(self, writer: asyncio.StreamWriter, subject: str, payload: bytes) -> None:
        if self.random.random() < 0.1:
            headers = self.random.choice(RAW_HEADERS)
        else:
            fields = "".join(f"{name}: {value}\r\n" for name, value in self.random.choice(HEADERS).items())
            headers = f"NATS/1.0\r\n{fields}\r\n".encode()
        size = len(headers)
        writer.write(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), size, size + len(payload), headers, payload))
        self.written += 1

    def payload(self, sound: bytes) -> bytes:
        """Return a mutation of a valid message; sometimes nothing of it is left, and sometimes all of it."""
        kind = self.random.randrange(6)
        if kind == 0:
            return self.random.randbytes(self.random.randrange(200))
        if kind == 1:
            return sound[: self.random.randrange(len(sound) + 1)]
        if kind == 2:
            place, changed = self.random.randrange(len(sound)), bytearray(sound)
            changed[place] ^= 1 << self.random.randrange(8)
            return bytes(changed)
        if kind == 3:
            return self.random.choice(
                (
                    b"[" * 5000,
                    b"\x91" * 5000,
                    b'{"a":' * 2000,
                    b"\xdf\xff\xff\xff\xff",
                    b"\xc1",
                    b"null",
                    b"\xc0",
                    b"[]",
                    b"\x90",
                )
            )
        return self._other_types(sound)

    def _other_types(self, sound: bytes) -> bytes:
        is_json = sound.startswith(b"{")
        fields = json.loads(sound) if is_json else msgpack.unpackb(sound, strict_map_key=False)
        name, wrong = self.random.choice(list(fields)), self.random.choice(WRONG)
        fields[name] = wrong
        if self.random.random() < 0.2:
            del fields[name]
        return json.dumps(fields, default=str).encode() if is_json else msgpack.packb(fields)

    # ---- the subjects, and a valid message for each

    def streams(self) -> list[tuple[str, bytes]]:
        run, task = self._run, NO_TASK + self.random.randrange(1000)
        sample = encode_sample(make_sample(run, task=task))
        dead = encode_dead(Dead(task=task, reason="r", attempts=1, actor="a", prompt="p", root=task))
        end = TurnRecord(kind=TurnKind.END, run=run, task=task, index=0, attempt="a", sample_seq=1)
        seqs = [self.random.randrange(1, 500) for _ in range(self.random.randrange(1, 60))]
        return [
            *(
                (f"tm.{run}.sample.{where}", sample)
                for where in ("train.0.x", "eval.none.x", "x", "\u00b2.\u00b2", f"train.{'9' * 40}.x")
            ),
            (f"tm.{run}.sample.train.0.x.parts", codec.describe(sample, seqs)),
            (f"tm.{run}.part.train.{task}", sample),
            *(
                (f"tm.{run}.partial.{where}", encode_partial(make_partial(run, task)))
                for where in (f"{task}.0", "x.x", f"{'9' * 40}.0")
            ),
            *((f"tm.{run}.turn.{where}", encode_turn_record(end)) for where in (f"{task}.0", "x.x")),
            *((f"tm.{run}.dead.task.{where}", dead) for where in (task, "x", "9" * 40)),
            *(
                (f"tm.{run}.dead.word.{where}", encode_decision(DeadLetterDecision(task=task, word="requeue")))
                for where in (task, "x")
            ),
            (f"tm.{run}.dead.report.{task}", b"\x81\xa1a\x01"),
            *(
                (f"tm.{run}.plan.{kind}", encode_record(Done(epoch=NO_TASK, step=1, metrics={"a": 1.0})))
                for kind in ("done", "plan", "x")
            ),
            (f"tm.{run}.plan.fence", encode_record(Fence(epoch=NO_TASK))),
            *(
                (f"tm.{run}.task.{kind}", encode_task(make_task(run, epoch=NO_TASK)))
                for kind in ("train", "eval", "fence", "x")
            ),
        ]

    def rows(self) -> list[tuple[str, bytes]]:
        """Return rows that no process depends on, and that not only the learner may write where there are users."""
        live = {
            role: dataclasses.asdict(LiveRow(role=role, id="z", host="h", pid=1, phase="starting", load={"a": 1}))
            for role in ("actor", "host")
        }
        place = {"created": "2026", "floor": 3, "policy": "leave", "owner": "me", "given_up": True}
        return [
            *((f"$KV.TM_{self._run}_live.{role}.z", json.dumps(row).encode()) for role, row in live.items()),
            *(
                (f"$KV.TM_{self._run}_live.{key}", b'{"role": 1}')
                for key in ("engine.z", "learner.z", "x", "x.y.z", "\u00b2.\u00b2")
            ),
            (f"$KV.TM_{self._run}_run.cursor.z", json.dumps(place).encode()),
            (f"$KV.TM_{self._run}_wanted.host.z", b'{"engine": 0, "actor": 0}'),
            (f"$KV.TM_{self._run}_weights.want", b'{"version": 0, "by": "z", "nonce": "n"}'),
            *(
                (f"$KV.TM_{self._run}_weights.v.{name}", b'{"version": 5}')
                for name in ("x", "\u00b2", "-1", "1e3", "700")
            ),
            (f"tm.{self._run}.metric.learner", b'{"step": 1}'),
        ]

    def rows_of_the_learner(self) -> list[tuple[str, bytes]]:
        """Return the rows that only the learner may write where there are users, but for ``run/epoch``.

        A readable one with a false value may stop a run (an epoch of next year fences its learner), so these are for
        ``unreadable``.
        """
        number = self.random.randrange(12)
        version = {
            "version": number,
            "step": 3,
            "epoch": 1,
            "state": "published",
            "digest": "",
            "snapshot": "",
            "after": 0,
        }
        node = {"node": 0, "nodes": 2, "nonce": "n" * 16, "phase": "ready", "versions": {"torch": "2"}}
        attempt = {
            "epoch": 1,
            "nonces": ["n" * 16],
            "ranks": [1],
            "master": "h:1",
            "feeder": "tcp://h:1",
            "feeder_key": "k" * 40,
        }
        rows: dict[str, dict[str, Any]] = {
            "keys.admin": {"key": "k" * 32},
            "run.api_key": {"key": "k" * 32},
            "run.config": {"actor": {"reward": "digits"}, "bus": {"lease_s": 5.0}},
            "run.task_floor": {"floor": 3},
            "run.checkpoint": {
                "directory": "step-2-epoch-1",
                "step": 2,
                "epoch": 1,
                "chain": "c",
                "manifest": "m",
                "kept": [],
            },
            "run.best": {"step": 2, "version": 2, "set": "s", "metric": "m", "value": 0.5},
            "run.end": {"outcome": "done", "code": 0, "reason": "r", "step": 2, "epoch": 1, "time_s": 1.0},
            "run.refused.a1": {"actor": "a1", "invalid": 64, "reason": "r"},
            "run.holder.1": {"node": 1, "url": "http://h", "held": {"step-2": ["a"]}},
            "run.node.0": node,
            "run.attempt": attempt,
            "weights.head": {**version, "fence": 1},
            "weights.snapshot": version,
            f"weights.v.{number}": version,
            "weights.evicted": {"engines": {"e1": "r"}},
            "weights.turn": {"whose": "learner", "epoch": 1},
        }
        return [(f"$KV.TM_{self._run}_{key}", json.dumps(row).encode()) for key, row in rows.items()]

    def rows_of_others(self) -> list[tuple[str, bytes]]:
        """Return the rows of processes at work, which write them again, and those of operators."""
        live = {
            key: dataclasses.asdict(
                LiveRow(role=key.split(".")[0], id=key.split(".")[1], host="h", pid=1, phase="serving")
            )
            for key in (
                "feeder.feeder",
                "learner.learner",
                "engine.e1",
                "router.door",
                "scorer.s1",
                "actor.a1",
                "host.here",
            )
        }
        wanted = {"engine": 1, "actor": 2, "scorer": 1}
        return [
            *((f"$KV.TM_{self._run}_live.{key}", json.dumps(row).encode()) for key, row in live.items()),
            *(
                (f"$KV.TM_{self._run}_wanted.{key}", json.dumps(wanted).encode())
                for key in ("all", "host.here", "pool.p")
            ),
        ]

    def everything(self) -> list[tuple[str, bytes]]:
        return [*self.streams(), *self.rows()]
