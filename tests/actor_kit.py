"""Kit for actor tests: a tiny model, the real built-in engine on the bus, tasks, and actors as real processes."""

import asyncio
import atexit
import functools
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests import actor_child
from tests.forked import Forked
from tests.waits import until
from tidemill.actors.config import ActorConfig, EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.client.rows import Rows
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, raise_epoch
from tidemill.bus.wire.messages import Sample, Sampling, Status, Task
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.settings.prepare import PrepareConfig, prepare

PROMPT = "482="
LABEL = "284"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
}
SHAPE = PrepareConfig(count=8, model={**SIZES, "vocab_size": 97, "max_position_embeddings": 256})
"""Shape of the model, with a vocabulary of 97: random weights seldom generate end-of-sequence."""


@functools.cache
def model_dir() -> Path:
    """Return a model with random weights; made once a test session."""
    directory = Path(tempfile.mkdtemp(prefix="tidemill-actor-kit-"))
    atexit.register(shutil.rmtree, directory)
    return prepare(SHAPE, directory).model


@functools.cache
def prompt_tokens() -> tuple[int, ...]:
    from transformers import AutoTokenizer

    return tuple(AutoTokenizer.from_pretrained(model_dir())(PROMPT)["input_ids"])


@asynccontextmanager
async def engine(
    bus: Bus | None = None, *, id: str = "e1", phase: str = "serving", version: int = 0
) -> AsyncIterator[BuiltinEngine]:
    """Run the built-in engine in this process, with a live row if there is a bus."""
    built = BuiltinEngine(
        model_dir(), EngineConfig(max_running=32), version=version, authority=Authority(unguarded=True)
    )
    await asyncio.to_thread(built.load)
    address = await built.start()
    built.phase = phase
    try:
        if bus is None:
            yield built
        else:
            async with HeartbeatPublisher(bus, engine_row(address, id=id, phase=phase, version=version), every_s=0.2):
                yield built
    finally:
        await built.close()


def engine_row(address: str, *, id: str = "e1", phase: str = "serving", version: int = 0) -> LiveRow:
    return LiveRow(
        role="engine", id=id, host=socket.gethostname(), pid=os.getpid(), phase=phase, address=address, version=version
    )


async def take_over(bus: Bus) -> int:
    """Become the learner of this run, and return its epoch."""
    epoch = await raise_epoch(bus)
    await bus.tasks.fence(epoch)
    return epoch


async def issue(bus: Bus, epoch: int, count: int = 1, **changes: Any) -> list[int]:
    """Issue ``count`` tasks, and return their ids."""
    settings = {"group_size": 4, "sampling": Sampling(max_new_tokens=8, seed=100), "label": LABEL, **changes}
    prompt = np.array(prompt_tokens(), np.int32)
    return [
        await bus.tasks.issue(
            Task(
                run=bus.run, epoch=epoch, prompt=PROMPT, prompt_tokens=prompt, prompt_epoch=0, offset=offset, **settings
            )
        )
        for offset in range(count)
    ]


async def samples_until(bus: Bus, enough: Callable[[list[Sample]], bool]) -> list[Sample]:
    """Read SAMPLES from the beginning until ``enough`` is true; every sample must be valid."""
    found: list[Sample] = []
    reading = bus.samples.read(None)
    try:
        while not enough(found):
            received = await anext(reading)
            assert isinstance(received.sample, Sample), received.sample
            found.append(received.sample)
    finally:
        await reading.aclose()  # type: ignore[attr-defined]
    return found


async def all_samples(bus: Bus) -> list[Sample]:
    """Return the present content of SAMPLES."""
    return [
        received.sample
        async for received in bus.samples.tail(last=10_000, follow=False)
        if isinstance(received.sample, Sample)
    ]


def complete(tasks: list[int], group_size: int = 4) -> Callable[[list[Sample]], bool]:
    """Return a condition: every (task, index) has a valid sample."""
    wanted = {(task, index) for task in tasks for index in range(group_size)}
    return lambda found: (
        wanted <= {(s.task, s.index) for s in found if s.status in (Status.COMPLETED, Status.TRUNCATED)}
    )


async def row_until(rows: Rows, key: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Watch a row until ``reached`` is true of it, and return it."""
    watching = rows.watch(key, every_s=0.1)
    try:
        async for row in watching:
            if row is not None and reached(row[0]):
                return row[0]
    finally:
        await watching.aclose()  # type: ignore[attr-defined]
    raise AssertionError("a watch ended")


async def settled(bus: Bus) -> None:
    """Return when no task waits and none is leased."""

    async def nothing_left() -> bool:
        return await bus.tasks.backlog() == (0, 0)

    await until(nothing_left)


async def at_work(built: BuiltinEngine, requests: int) -> None:
    """Return when the engine has this many unfinished requests."""
    await until(lambda: built.stats()["waiting"] + built.stats()["running"] == requests, every_s=0.005)


@asynccontextmanager
async def paused(built: BuiltinEngine) -> AsyncIterator[HttpEngine]:
    """Pause the engine's requests until ``resume`` of the yielded client."""
    client = HttpEngine(built.url)
    try:
        await client.pause()
        yield client
    finally:
        await client.close()


class ActorProcess:
    """A real process of an actor or scorer."""

    def __init__(self, process: Forked) -> None:
        self._process = process

    @property
    def log(self) -> str:
        return self._process.output.read_text()

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    async def exit_code(self) -> int:
        return await self._process.ended()


@asynccontextmanager
async def actor_process(
    url: str,
    run: str,
    config: ActorConfig | None,
    *,
    id: str,
    drain_s: float = 30.0,
    program: Callable[[dict[str, Any]], int] = actor_child.main,
    **bus_settings: Any,
) -> AsyncIterator[ActorProcess]:
    """Start an actor, or another ``program``; it is killed at the end if it is still there."""
    told = {
        "url": url,
        "run": run,
        "id": id,
        "drain_s": drain_s,
        "actor": None if config is None else asdict(config),
        "bus": None if config is None else bus_settings,
    }
    with tempfile.TemporaryDirectory(prefix="tidemill-actor-") as directory:
        process = await asyncio.to_thread(Forked, program, (told,), {}, Path(directory) / "log")
        try:
            yield ActorProcess(process)
        finally:
            process.kill()
            await process.ended()
            print(process.output.read_text())
