"""A run without models for the browser: a real bus and a real feeder, scripted actors and ranks, heartbeats.

    test -> ``advance`` -> rank 0 trains the next steps -> PLAN, SAMPLES, rows -> `tidemill dashboard` -> browser

Steps are taken when the test asks for them, so nothing depends on time.
"""

import asyncio
import dataclasses
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.data_kit import sample
from tests.feeder_kit import World
from tests.launched import tidemill
from tests.waits import LIMIT_S, poll
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.streams.samples import headers_of
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Dead, Sample, Task
from tidemill.bus.wire.rows import LiveRow
from tidemill.bus.wire.subjects import END_KEY
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig

STEPS = 200
RUN, SECRET = "page", "sk-of-a-judge"
HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><style>*{display:none}</style>",
    "</script><!-- {{7*7}} javascript:window.pwned=1 \u2028",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00",
    "right \u202eleft\u202c \u2066isolated\u2069",
)


def metrics(step: int) -> dict[str, float]:
    """Metrics of a step, as a learner reports them."""
    lag = 0.0 if step == 1 else 0.4
    return {
        "data/reward_mean": 1 - math.exp(-step / 20),
        "train/reward_mean": 1 - math.exp(-step / 20),
        "train/entropy": 2 * math.exp(-step / 30),
        "train/grad_norm": 40.0 if step == 1 else 1 + 0.3 * math.sin(step),
        "train/step_seconds": 0.5,
        "train/wait_share": 0.4,
        "train/wait_seconds": 0.3,
        "offpolicy/k3": 0.01,
        "offpolicy/ess": 0.9,
        "offpolicy/lag_mean": lag,
        "offpolicy/lag_share/0": 1 - lag,
        "offpolicy/lag_share/1": lag,
        "push/version": float(step),
        "push/seconds": 0.03 + step / 1000,
        "push/stall_seconds_max": 0.001,
        "push/bytes": 4e5,
        "push/engines": 1.0,
    }


class LiveRun:
    """The run, in a thread with a loop of its own. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = EmbeddedServer(directory / "nats", BusConfig(port=-1))
        self.done = 0  # Newest step that is trained
        self._allowed = threading.Semaphore(0)
        self._ready: Future[None] = Future()
        self._leaving = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="live-run")

    def __enter__(self) -> Self:
        self.server.start()
        self._thread.start()
        self._ready.result(LIMIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._leaving = True
        self._allowed.release()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(LIMIT_S)
        self.server.stop()

    def advance(self, steps: int) -> int:
        """Train the next steps, and return the newest one."""
        aim = self.done + steps
        self._allowed.release(steps)
        poll(lambda: self.done >= aim)
        return aim

    def publish(self, task: int, index: int, **changes: Any) -> int:
        """Store one more sample beside those of the actors, and return its sequence."""
        return self._call(self._publish(task, index, **changes))

    def publish_broken(self) -> int:
        """Store a sample whose response is no UTF-8, and return its sequence."""
        return self._call(self._publish_broken())

    def give_up(self, task: int) -> None:
        """Store the dead letter of a task of its own."""
        letter = Dead(task=task, reason="no answer", attempts=3, actor="a0", prompt="p", root=task)
        self._call(self.world.bus.dead.store(letter))

    def decision(self, task: int) -> str:
        """Return the word of the operator's decision on a dead task; empty = none yet."""
        decided = self._call(self.world.bus.dead.decisions()).get(task)
        return decided.word if decided else ""

    def desired(self) -> dict[str, Any]:
        """Return the rows of desired numbers of processes."""
        return {key: dict(row) for key, (row, _) in self._call(self.world.bus.rows("wanted").all()).items()}

    def finish(self) -> None:
        """Write the row of a run that has ended on purpose."""
        row = {"outcome": "done", "code": 0, "reason": "learner.steps", "step": self.done, "time_s": 0.0}
        self._call(self.world.bus.rows("run").put(END_KEY, row))

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    async def _publish(self, task: int, index: int, **changes: Any) -> int:
        made = dataclasses.replace(sample(_task(task), index, ((0, 3),), actor="a<b>\u202e"), **changes)
        return await self.world.bus.samples.publish(made)

    async def _publish_broken(self) -> int:
        made = sample(_task(9_999), 0, ((0, 3),), response="marker")
        data = encode_sample(made).replace(b"marker", b"\xff\xfe\x80\xc3(\xa0")
        subject = subjects.sample(RUN, made.kind, made.min_version, made.actor)
        return await self.world.bus.samples.publish_bytes(data, subject, headers_of(made), task=made.task)

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        checkpoints = self.directory / "checkpoints"
        checkpoints.mkdir()
        learner = LearnerConfig(steps=STEPS, groups_per_step=2, group_size=2, checkpoint_every=1000)
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(connect(self.server.url, RUN, BusConfig(), name="test", wait_s=60))
            await bus.create_layout()
            options = {"reward_options": {"api_key": SECRET}}
            config = {"learner": {"steps": STEPS}, "staleness": {"max_lag": 1}, "actor": options}
            await bus.rows("run").put("config", config)
            await stack.enter_async_context(beside(_beat_with_devices(bus)))
            self.world = World(
                url=self.server.url,
                run=RUN,
                bus=bus,
                root=checkpoints,
                learner=learner,
                staleness=StalenessConfig(max_lag=1),
                config=BusConfig(),
                metrics=metrics,
            )
            for role, name in (("actor", "a0"), ("actor", "a1"), ("engine", "e0"), ("learner", "l0"), ("host", "h0")):
                load = {"actors": 2, "engines": 1} if role == "host" else {"in_flight": 2}
                row = LiveRow(role=role, id=name, host="here", pid=1, phase="working", version=0, load=load)
                await stack.enter_async_context(HeartbeatPublisher(bus, row))
            url, _ = await stack.enter_async_context(self.world.feeder())
            await stack.enter_async_context(self.world.actors(_respond))
            training = asyncio.create_task(self.world.train(url, stop=self._stop), name="rank")
            self._ready.set_result(None)
            await self._end.wait()
            await training

    def _stop(self, what: str, step: int) -> bool:
        if what == "batch":
            self._allowed.acquire()
        elif what == "publish":
            self.done = step
        return self._leaving


async def _beat_with_devices(bus: Bus) -> None:
    """Background loop: the row of an engine on two GPUs, as its driver would report them."""
    devices = [{"device": "GPU-5a", "utilisation": 0.87, "memory_used_bytes": 61 << 30, "memory_bytes": 80 << 30}]
    devices.append({"device": "GPU-6b", "utilisation": 0.13})
    use = {"cpu_share": 0.5, "memory_bytes": 9 << 20, "devices": devices}
    row = {"role": "engine", "id": "g0", "host": "there", "pid": 2, "phase": "serving", "version": 0, "use": use}
    owned = {"devices": ["GPU-5a", "GPU-6b"], "device_memory_bytes": 80 << 30}
    while True:
        await bus.rows("live").put("engine.g0", row | {"capabilities": owned, "log": "/runs/page/logs/g0.log"})
        await asyncio.sleep(1)


def _task(number: int) -> Task:
    from tests.data_kit import task

    return dataclasses.replace(task(number), run=RUN)


def _respond(task: Task, index: int) -> Sample:
    """A response that is hostile for one task in three."""
    text = HOSTILE[task.id % len(HOSTILE)] if task.id % 3 == 0 else "x" * 3
    return sample(task, index, ((task.min_version, 3),), response=text)


@contextmanager
def dashboard(run: LiveRun, *words: str, port: int = 0) -> Iterator[str]:
    """Serve the page of a run by the real command; yield its address, which has the token if it needs one."""
    file, log = run.directory / f"url-{port}", run.directory / "dashboard.log"
    file.unlink(missing_ok=True)
    command = ("dashboard", "--bus", run.server.url, "--run", RUN, "--port", str(port), "--url-file", str(file), *words)
    process = tidemill(*command, output=log)
    try:
        poll(lambda: file.exists() or process.returncode is not None)
        assert process.returncode is None, log.read_text()[-3000:]
        yield file.read_text().strip()
    finally:
        process.kill()
        process.wait()
