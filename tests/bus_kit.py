"""Samples, tasks and a proxy for tests of the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self, TypeVar

import numpy as np

from tests.waits import until
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.codec import Joining, PartsManifest
from tidemill.bus.wire.messages import Partial, Sample, Sampling, SequenceSize, Span, Status, Task, Turns

T = TypeVar("T")


def make_sample(run: str = "r", *, task: int = 1, index: int = 0, length: int = 8, **changes: Any) -> Sample:
    """Return a valid sample with ``length`` response tokens after three prompt tokens."""
    fields: dict[str, Any] = {
        "run": run,
        "task": task,
        "index": index,
        "group_size": 8,
        "attempt": "a0",
        "prompt": "1+1=",
        "tokens": np.arange(length + 3, dtype=np.int32),
        "response_length": length,
        "response": "two",
        "rollout_log_probs": np.full(length, -0.5, np.float32),
        "loss_mask": np.ones(length, np.uint8),
        "spans": (Span(version=3, num_tokens=length),) if length else (),
        "reward": 1.0,
        "status": Status.COMPLETED,
        "sampling": Sampling(),
        "actor": "a1",
    }
    return Sample(**{**fields, **changes})


def make_episode(run: str = "r", *, task: int = 41, **changes: Any) -> Sample:
    """Return the example of docs/wire.md: two sequences, three turns, one result of a tool in the first sequence."""
    fields: dict[str, Any] = {
        "index": 3,
        "attempt": "b7Qk",
        "rollout": "calc",
        "tokens": np.array([1, 2, 3, 4, 50, 51, 90, 91, 52, 53, 1, 2, 8, 9, 54, 55], np.int32),
        "response_length": 8,
        "sequences": (SequenceSize(10, 6), SequenceSize(6, 2)),
        "loss_mask": np.array([1, 1, 0, 0, 1, 1, 1, 1], np.uint8),
        "rollout_log_probs": np.array([-0.2, -0.1, 0, 0, -0.7, -0.3, -0.1, -0.4], np.float32),
        "spans": (Span(version=5, num_tokens=2), Span(version=6, num_tokens=4), Span(version=6, num_tokens=2)),
        "turns": make_turns(),
        "transcript": ({"role": "user", "content": "12*7-5?"}, {"role": "assistant", "turn": 0, "content": "84"}),
        "response": "79",
        "reward": {"score": 1.1, "answer": 1.0, "format": 0.1},
    }
    return make_sample(run, task=task, **{**fields, **changes})


def make_turns(**changes: Any) -> Turns:
    fields: dict[str, Any] = {
        "at": np.array([0, 4, 6], np.int32),
        "tokens": np.array([2, 2, 2], np.int32),
        "begin_s": np.array([0.0, 1.9, 4.0], np.float32),
        "seconds": np.array([0.8, 0.9, 0.7], np.float32),
        "tools_s": np.array([0.3, 0.0, 0.0], np.float32),
        "id": ("t-0", "t-1", "t-2"),
        "finish": ("stop", "stop", "stop"),
        "agent": ("", "", ""),
        "rewards": ((1, 0.1),),
    }
    return Turns(**{**fields, **changes})


async def issue(bus: Bus, to: int) -> None:
    """Issue tasks up to this id, behind a fence."""
    await bus.tasks.fence(1)
    while await bus.tasks.last_id() < to:
        await bus.tasks.issue(make_task(bus.run, epoch=1))


def make_task(run: str = "r", *, epoch: int = 1, offset: int = 0, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "run": run,
        "epoch": epoch,
        "prompt": "1+1=",
        "prompt_tokens": np.array([5, 6, 7], np.int32),
        "group_size": 2,
        "sampling": Sampling(),
        "prompt_epoch": 0,
        "offset": offset,
    }
    return Task(**{**fields, **changes})


def make_partial(run: str = "r", task: int = 1, index: int = 0, **changes: Any) -> Partial:
    fields: dict[str, Any] = {
        "run": run,
        "task": task,
        "index": index,
        "attempt": "n0nce",
        "tokens": np.array([8, 9, 8], np.int32),
        "rollout_log_probs": np.array([-0.5, -0.25, -1.0], np.float32),
        "spans": (Span(version=3, num_tokens=2), Span(version=4, num_tokens=1)),
        "response": "two",
        "seed": 12,
        "position": 6,
    }
    return Partial(**{**fields, **changes})


def join(manifest: PartsManifest, pieces: Iterable[bytes]) -> bytes:
    """Return the bytes that the parts of a sample make."""
    joining = Joining(manifest)
    for piece in pieces:
        joining.add(piece)
    return joining.whole()


async def take(stream: AsyncIterator[T], count: int, timeout_s: float = 60.0) -> list[T]:
    """Return the next ``count`` items; the stream stays open."""
    async with asyncio.timeout(timeout_s):
        return [await anext(stream) for _ in range(count)]


class Proxy:
    """A TCP proxy in front of the server that can break its connections, or drop everything that the server sends."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.deaf = False
        """True = nothing from the server reaches the client; the other direction still works."""
        self.swallowed = 0
        self.sent = bytearray()  # By the clients

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, upstream_writer]
        pumps = {
            asyncio.create_task(self._pump(reader, upstream_writer, False)),
            asyncio.create_task(self._pump(upstream, writer, True)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps)
        self._pumps -= pumps

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, downwards: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if downwards and self.deaf:
                    self.swallowed += len(data)
                else:
                    self.sent += b"" if downwards else data
                    writer.write(data)
        writer.close()


async def until_backlog(bus: Bus, waiting: int, leased: int, rollout: str | None = None) -> None:
    """Wait until the queue has these numbers: the server counts a stored task for its consumers a moment later."""

    async def counted() -> bool:
        return await bus.tasks.backlog(rollout=rollout) == (waiting, leased)

    await until(counted)
