"""A foreign actor that misbehaves. It shares no code with the system: it knows NATS, msgpack and docs/wire.md.

It leases tasks as user ``actor-<n>`` of a bus with users and publishes good samples, duplicates, and samples with one
defect each; it writes junk on every subject that its user may publish to, sends random HTTP to the engines (with the
admin key, too: then with an epoch that no learner has), and random frames to every TCP port of the feeder. Its actions
are drawn from a seed, at a bounded rate; it ends when it is cancelled.

Consumes TASKS and the rows ``live/engine.engine-0``, ``weights/head``; produces junk. Waits for nothing longer than
``ANSWER_S``.
"""

import asyncio
import contextlib
import json
import math
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import nats
import nats.errors
import psutil
import zmq
import zmq.asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.waits import until

ANSWER_S = 2.0
PAUSE_S = 0.02
"""Mean seconds between two actions of one loop."""
ENGINE = "engine-0"
EVAL = "eval"
"""Kind of its messages on the subject of evaluation samples."""
NO_EPOCH: tuple[Any, ...] = (1e30, -1, 2**70, "1", True, [], {}, 10**6)
"""Epochs that no learner of the run has: a command with one of them is refused, whatever key it brings."""
GOOD, DUPLICATE = "good", "duplicate"
PATHS = (
    "generate",
    "health",
    "v1/chat/completions",
    "begin_weight_update",
    "end_weight_update",
    "receive_push",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "update_weights_from_distributed",
    "update_weights_from_disk",
    "release_memory_occupation",
    "resume_memory_occupation",
    "pause_generation",
    "continue_generation",
    "abort_request",
    "flush_cache",
    "weights_checksums",
    "snapshots/v1-x/manifest.json",
    "../../etc/passwd",
)

Body = dict[str, Any]
_FOREIGN = (nats.errors.Error, OSError, TimeoutError, aiohttp.ClientError, EOFError)


def _floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _reward(value: object) -> Callable[[Body, int], None]:
    return lambda body, head: body.update(reward=value)


def _log_prob(value: float) -> Callable[[Body, int], None]:
    return lambda body, head: body.update(rollout_log_probs=_floats([value] + [-1.0] * (body["response_length"] - 1)))


def _version(ahead: int) -> Callable[[Body, int], None]:
    return lambda body, head: body.update(spans=[[max(0, head) + ahead, body["response_length"]]])


DEFECTS: dict[str, Callable[[Body, int], None]] = {
    "reward 1e39": _reward(1e39),
    "reward 1e308": _reward(1e308),
    "reward -1e308 in a part": _reward({"score": 1.0, "format": -1e308}),
    "reward 3e38": _reward(3e38),
    "reward nan": _reward(math.nan),
    "reward inf": _reward({"score": math.inf}),
    "reward text": _reward("much"),
    "reward empty": _reward({}),
    "log-prob positive": _log_prob(1.0),
    "log-prob nan": _log_prob(math.nan),
    "log-prob -inf": _log_prob(-math.inf),
    "log-prob -3e38": _log_prob(-3e38),
    "version of tomorrow": _version(1),
    "version of next week": _version(3),
    "version 2**40": _version(2**40),
    "version -1": lambda body, head: body.update(spans=[[-1, body["response_length"]]]),
    "spans too short": lambda body, head: body.update(spans=[[max(0, head), body["response_length"] + 1]]),
    "index beyond the group": lambda body, head: body.update(index=body["group_size"]),
    "group size": lambda body, head: body.update(group_size=body["group_size"] + 1),
    "unknown task": lambda body, head: body.update(task=body["task"] + 1_000_000),
    "task 0": lambda body, head: body.update(task=0),
    "task 2**62": lambda body, head: body.update(task=2**62),
    "another run": lambda body, head: body.update(run="another"),
    "another prompt": lambda body, head: body.update(tokens=_ints([1, 1, 1]) + body["tokens"][12:]),
    "another temperature": lambda body, head: body.update(sampling={**body["sampling"], "temperature": 0.25}),
    "token beyond the vocabulary": lambda body, head: body.update(tokens=body["tokens"][:-4] + _ints([2**31 - 1])),
    "token negative": lambda body, head: body.update(tokens=body["tokens"][:-4] + _ints([-1])),
    "mask 2": lambda body, head: body.update(loss_mask=b"\2" * body["response_length"]),
    "lengths": lambda body, head: body.update(response_length=body["response_length"] + 1),
    "pending": lambda body, head: body.update(status="pending"),
    "status": lambda body, head: body.update(status="wonderful"),
    "schema": lambda body, head: body.update(schema=99),
    "timings": lambda body, head: body.update(timings={"queued_s": "long"}),
    "no attempt": lambda body, head: body.update(attempt=""),
}


@dataclass
class Hostile:
    """The foreign actor. ``directory``: of the run, which has a bus with users."""

    directory: Path
    run: str
    user: str
    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    """Number of actions by kind."""
    answers: Counter[str] = field(default_factory=Counter)
    """Number of answers of engines, by key and status."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of each message id of SAMPLES: ``good``, ``duplicate`` or the name of a defect."""
    head: int = -1

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._to_come: list[str] = []
        """Names of defects, each of which is sent before one is sent again."""

    async def rage(self) -> None:
        """Misbehave until cancelled, over every loss of the bus."""
        while True:
            with contextlib.suppress(*_FOREIGN, ValueError):
                nc = await self._connect()
                try:
                    async with asyncio.TaskGroup() as group:
                        for loop in (self._work, self._junk, self._http, self._frames):
                            group.create_task(self._again(loop, nc))
                        group.create_task(self._while_connected(nc))
                except* (*_FOREIGN, _Reconnect):
                    pass
                finally:
                    with contextlib.suppress(*_FOREIGN):
                        await asyncio.wait_for(nc.close(), ANSWER_S)
            await asyncio.sleep(0.2)

    async def _connect(self) -> Client:
        words = dict(
            line.split("=", 1) for line in (self.directory / f"auth/{self.user}.env").read_text().split() if "=" in line
        )

        async def ignore(error: Exception) -> None:
            self.sent[f"error {type(error).__name__}"] += 1

        url = (self.directory / "bus.url").read_text().strip()
        nc = await nats.connect(
            url,
            user=words["TIDEMILL_BUS_USER"],
            password=words["TIDEMILL_BUS_PASSWORD"],
            inbox_prefix=f"_INBOX_{self.user}".encode(),
            allow_reconnect=False,
            error_cb=ignore,
            connect_timeout=2,
        )
        await nc.subscribe(f"$KV.TM_{self.run}_weights.>", cb=self._weights_row)
        return nc

    async def _while_connected(self, nc: Client) -> None:
        await until(lambda: not nc.is_connected, every_s=0.2)
        raise _Reconnect

    async def _again(self, act: Callable[[Client], Any], nc: Client) -> None:
        # Not for ever: a TaskGroup cancels each of its tasks once, and ``wait_for`` of Python 3.11 can lose that
        # (CPython issue 86296).
        while nc.is_connected:
            with contextlib.suppress(*_FOREIGN):
                await act(nc)
            await asyncio.sleep(self._random.expovariate(1 / PAUSE_S))

    async def _weights_row(self, message: Msg) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if message.subject.endswith(".head"):
                self.head = max(self.head, int(json.loads(message.data)["version"]))

    # ---- samples

    async def _work(self, nc: Client) -> None:
        """Lease a task, publish a message for each index of its group, and ack, nak or abandon the task."""
        message = await self._lease(nc)
        if message is None:
            return
        task = int(message.reply.split(".")[5])
        body: Body = msgpack.unpackb(message.data, strict_map_key=False)
        attempt = f"h{self._random.getrandbits(48):x}"
        for index in range(body["group_size"]):
            await self._publish(nc, self._sample(body, task, index, attempt))
        how = self._random.choices(("+ACK", "-NAK", "", "junk"), (7, 1, 1, 1))[0]
        self.sent[f"task {how or 'kept'}"] += 1
        if how:
            await nc.publish(message.reply, self._bytes(30) if how == "junk" else how.encode())

    async def _lease(self, nc: Client) -> Msg | None:
        inbox = nc.new_inbox()
        sub = await nc.subscribe(inbox)
        try:
            request = json.dumps({"batch": 1, "expires": int(ANSWER_S * 1e9)}).encode()
            queue = self._random.choices(("rollout", "eval"), (9, 1))[0]
            self.sent[f"lease: {queue}"] += 1
            await nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.TM_{self.run}_TASKS.{queue}", request, reply=inbox)
            message = await sub.next_msg(2 * ANSWER_S)
            return message if message.reply.startswith("$JS.ACK.") else None
        finally:
            await sub.unsubscribe()

    def _sample(self, task: Body, id: int, index: int, attempt: str) -> Body:
        length = self._random.randint(1, task["sampling"]["max_new_tokens"])
        response = [self._random.randint(3, 9) for _ in range(length)]
        return {
            "schema": 1,
            "type": "sample",
            "run": self.run,
            "task": id,
            "index": index,
            "group_size": task["group_size"],
            "attempt": attempt,
            "kind": task["kind"],
            "prompt": task["prompt"],
            "tokens": task["prompt_tokens"] + _ints(response),
            "response_length": length,
            "response": "?",
            "rollout_log_probs": _floats([-1.0] * length),
            "loss_mask": b"\1" * length,
            "spans": [[max(0, self.head), length]],
            "reward": self._random.random(),
            "status": "completed",
            "sampling": task["sampling"],
            "label": task.get("label"),
            "actor": self.user,
        }

    async def _publish(self, nc: Client, body: Body) -> None:
        """Publish a valid sample, sometimes twice; or one with a defect; or bytes; or a manifest."""
        kinds = ("good", "good", "defect", "defect", "defect", "defect", "twice", "bytes", "mutated", "manifest", EVAL)
        what = self._random.choice(kinds)
        id = f"{body['task']}.{body['index']}.{body['attempt']}"
        if what in ("good", "twice"):
            await self._store(nc, GOOD, id, msgpack.packb(body))
            if what == "twice":
                await self._store(nc, DUPLICATE, id, msgpack.packb(body))
                await self._store(
                    nc, DUPLICATE, f"{id}-again", msgpack.packb({**body, "attempt": f"{body['attempt']}-again"})
                )
        elif what == "defect":
            self._to_come = self._to_come or self._random.sample(list(DEFECTS), len(DEFECTS))
            name = self._to_come.pop()
            DEFECTS[name](body, self.head)
            await self._store(nc, name, id, msgpack.packb(body))
        elif what == "bytes":
            await self._store(nc, "bytes", id, self._bytes(self._random.choice((0, 3, 500))))
        elif what == EVAL:
            payload = self._random.choice(
                (self._bytes(300), msgpack.packb({**body, "kind": "eval"}), msgpack.packb(body))
            )
            await self._store(nc, EVAL, id, payload)
        elif what == "mutated":
            await self._store(nc, "mutated", id, self._mutated(msgpack.packb({**body, "reward": math.nan})))
        else:
            await self._manifest(nc, id)

    async def _manifest(self, nc: Client, id: str) -> None:
        """Publish a manifest that names one part many times, or missing parts, or a size that no sample has."""
        part = f"tm.{self.run}.part.train.{id.split('.')[0]}"
        stored = json.loads(
            (await nc.request(part, b"x" * 200_000, timeout=ANSWER_S, headers={"Nats-Msg-Id": f"{id}.chunk/0"})).data
        )
        seqs = self._random.choice(
            ([stored["seq"]] * 3000, [2**40], [], [-1], list(range(1, 3000)), [stored["seq"]], ["1"], 7)
        )
        length = self._random.choice((200_000, 2**40, -1, 0, "long"))
        manifest = {"schema": 1, "type": "parts", "seqs": seqs, "length": length, "sha256": "0" * 64}
        await self._store(nc, "manifest", id, msgpack.packb(manifest), parts=True)

    async def _store(self, nc: Client, kind: str, id: str, payload: bytes, *, parts: bool = False) -> None:
        self.kinds.setdefault(id, kind)
        self.sent[f"sample: {kind}"] += 1
        headers = {"Nats-Msg-Id": id, **({"Tm-Parts": self._random.choice(("3000", "1", "many"))} if parts else {})}
        queue = "eval" if kind == EVAL else "train"
        subject = f"tm.{self.run}.sample.{queue}.{max(0, self.head)}.{self.user}{'.parts' if parts else ''}"
        await nc.request(subject, payload, timeout=ANSWER_S, headers=headers)

    # ---- junk

    async def _junk(self, nc: Client) -> None:
        """Publish on a subject that an actor may publish to, with a header of JetStream's now and then."""
        task = self._random.choice((1, self._random.randint(1, 500), 10**9))
        subject = self._random.choice(
            (
                f"$KV.TM_{self.run}_live.actor.{self.user}",
                f"tm.{self.run}.metric.actor.{self.user}",
                f"tm.{self.run}.partial.{task}.0",
                f"tm.{self.run}.part.train.{task}",
                f"tm.{self.run}.turn.{task}.0",  # its user may, where the run has rollouts
                f"tm.{self.run}.dead.report.{task}",
                f"tm.{self.run}.dead.task.{10**9 + task}",
            )
        )
        extra = self._random.choice(
            (
                {},
                {"Nats-Rollup": "all"},
                {"Nats-Rollup": "sub"},
                {"Nats-TTL": "1s"},
                {"KV-Operation": "PURGE"},
                {"Tm-Epoch": "9" * 40},
            )
        )
        row = {
            "role": "actor",
            "id": [1],
            "pid": "x",
            "load": {"step": "many"},
            "version": 1e300,
            "epoch": -1,
            "phase": {},
        }
        dead = {
            "schema": 1,
            "type": "dead",
            "task": 10**9 + task,
            "reason": "\x1b[2J",
            "attempts": 1,
            "actor": "",
            "prompt": "",
        }
        payload = self._random.choice(
            (
                self._bytes(200),
                json.dumps(row).encode(),
                msgpack.packb(dead),
                b"{}",
                b"[1]",
                b"",
                self._mutated(msgpack.packb(dead)),
            )
        )
        self.sent[f"junk: {subject.split('.')[2 if subject.startswith('tm.') else 1]}"] += 1
        with contextlib.suppress(nats.errors.TimeoutError, nats.errors.NoRespondersError):
            await nc.request(
                subject, payload, timeout=0.5, headers={"Nats-Msg-Id": f"j{self._random.getrandbits(60)}", **extra}
            )

    async def _http(self, nc: Client) -> None:
        address = await self._engine(nc)
        if not address:
            return
        path, token = (
            self._random.choice(PATHS),
            self._random.choice(("", "wrong", self._key("api-key"), self._key("admin-key"))),
        )
        is_admin = bool(token) and token == self._key("admin-key")
        value: Any = self._random.choice(NO_EPOCH if is_admin else (*NO_EPOCH, None, math.nan))
        body = {
            "epoch": value,
            "weight_version": self._random.choice(("999999", value)),
            "version": value,
            "group_name": "tidemill",
            "rid": "",
            "abort_all": True,
            "tags": ["weights"],
            "input_ids": self._random.choice(([1, 2], [10**9], "x")),
            "sampling_params": {"max_new_tokens": self._random.choice((2, -1, 10**12, "x"))},
            "timeout_s": value,
        }
        whole = json.dumps(body).encode()
        # A command without an epoch is obeyed where it brings the admin key; this actor is not the learner, and must
        # not be one.
        payload = self._random.choice(
            (whole, self._bytes(100), b"[" * 5000) if is_admin else (whole, self._bytes(100), b"", b"[" * 5000)
        )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.sent["http"] += 1
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
            method = self._random.choice(("POST", "GET", "PUT"))
            async with session.request(method, f"{address}/{path}", data=payload, headers=headers) as response:
                self.answers[f"{'admin' if is_admin else 'other'} {response.status}"] += 1

    async def _engine(self, nc: Client) -> str:
        """Return the URL of an engine; empty while no row names one."""
        request = json.dumps({"last_by_subj": f"$KV.TM_{self.run}_live.engine.{ENGINE}"}).encode()
        answer = await nc.request(f"$JS.API.DIRECT.GET.KV_TM_{self.run}_live", request, timeout=ANSWER_S)
        try:
            return str(json.loads(answer.data)["address"])
        except (ValueError, KeyError):
            return ""

    def _key(self, name: str) -> str:
        """Return a key of the run: every process may present the api key, which is refused for commands. Empty while
        there is none.
        """
        file = self.directory / "auth" / name
        return file.read_text().strip() if file.exists() else ""

    async def _frames(self, nc: Client) -> None:
        """Send frames to every TCP port that a process of the learner listens on."""
        del nc
        ports = await asyncio.to_thread(_learner_ports, str(self.directory))
        if not ports:
            return
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, 200)
            socket.connect(f"tcp://127.0.0.1:{self._random.choice(ports)}")
            for kind in ([1], "next", "hello", "done", "failed", "bye", {}, None):
                frame = msgpack.packb({"type": kind, "step": [1], "rank": "x", "dp_rank": -1, "dp_size": 1})
                with contextlib.suppress(zmq.Again):
                    await socket.send_multipart(self._random.choice(([frame], [frame, b""], [self._bytes(20)], [b""])))
                    self.sent["frames"] += 1
            await asyncio.sleep(0.2)
        finally:
            context.destroy(linger=0)

    def _bytes(self, length: int) -> bytes:
        return self._random.randbytes(length)

    def _mutated(self, payload: bytes) -> bytes:
        changed = bytearray(payload)
        for _ in range(self._random.randint(1, 8)):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed[: self._random.randint(1, len(changed))])


class _Reconnect(Exception):
    pass


def _learner_ports(directory: str) -> list[int]:
    """Return the ports that the feeder and the ranks of the run in this directory listen on."""
    ports: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if directory in " ".join(words) and ("feeder" in words or "rank" in words):
            with contextlib.suppress(psutil.Error):
                ports += [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return sorted(set(ports))
