"""Pause of the bus when the leader of a stream is killed, on a cluster of three, and a check that nothing is lost.

python -m tests.bench.failover [--kills 6] [--streams SAMPLES,TASKS,PLAN]

Under load - samples published and read by cursor, tasks issued, leased and acked, records appended by a fenced writer,
a row changed by compare-and-set - the server that leads a stream is killed with -9, stays away until all activities
continue, comes back, and catches up. The pause of an activity is the longest time between two of its successes around
the kill. At the end the accounting is checked: every acknowledged sample is read once, every task acked, every record
in its place, the row changed as often as acknowledged. One machine, loopback.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests import waits
from tests.bench.sample_path import make_sample
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Sampling, Task

RUN = "failover"
IN_FLIGHT = 4
PACE_S = 0.02
"""Seconds between two successes of one activity: short enough to show a pause, long enough to leave the machine to the
servers.
"""
ROW = "count"
GOES_ON = 5
"""Number of successes of every activity after which the load counts as continued."""
GOES_ON_S = 120.0
CAUGHT_UP_S = 120.0
LOOK_S = 0.1


@dataclass(slots=True)
class Load:
    """The record of all activities, with times."""

    published: list[str] = field(default_factory=list)
    """Message ids of samples with an acknowledgement."""
    read: list[str] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)
    leased: Counter[int] = field(default_factory=Counter)
    appended: list[tuple[int, int]] = field(default_factory=list)
    """Appended records: (sequence, step)."""
    written: int = 0
    """Number of acknowledged changes of the row."""
    when: dict[str, list[float]] = field(default_factory=dict)
    """Monotonic times of the successes of each activity."""

    def done(self, activity: str) -> None:
        self.when.setdefault(activity, []).append(time.monotonic())

    def pause_s(self, activity: str, since: float) -> float:
        """Return the longest time between two successes, of those that ended after ``since``."""
        times = [moment for moment in self.when[activity] if moment >= since - 5]
        return max(later - earlier for earlier, later in pairwise(times) if later >= since)


class Activities:
    """The endless loops of the load, on connections of their own."""

    def __init__(self, load: Load, buses: dict[str, Bus]) -> None:
        self.load, self.buses = load, buses
        self._next = 0
        self.ending = False
        """True = publish nothing more: a message cancelled in flight might be stored without a record here."""

    async def publish(self) -> None:
        while not self.ending:
            self._next += 1
            sample = make_sample(RUN, self._next, 200)
            await self.buses["actor"].samples.publish(sample)
            self.load.published.append(sample.message_id)
            self.load.done("publish")
            await asyncio.sleep(PACE_S * IN_FLIGHT)

    async def read(self) -> None:
        bus = self.buses["reader"]
        async for received in bus.samples.read(None):
            self.load.read.append(received.headers[subjects.MESSAGE_ID])
            self.load.done("read")

    async def issue(self) -> None:
        bus = self.buses["feeder"]
        while True:
            task = Task(
                run=RUN,
                epoch=1,
                prompt="1+1=",
                prompt_tokens=np.array([5, 6], np.int32),
                group_size=1,
                sampling=Sampling(),
                prompt_epoch=0,
                offset=len(self.load.issued),
            )
            self.load.issued.append(await bus.tasks.issue(task))
            self.load.done("issue")
            await asyncio.sleep(PACE_S)

    async def lease(self) -> None:
        bus = self.buses["actor"]
        while True:
            lease = await bus.tasks.lease(1.0)
            if lease is None:
                continue
            self.load.leased[lease.task.id] += 1
            if (
                await lease.ack()
            ):  # without a confirmation it may be stored; the consumer's ack floor shows it at the end
                self.load.done("settle")

    async def append(self) -> None:
        bus, step = self.buses["feeder"], 0
        while True:
            step += 1
            seq = await bus.plans.append(Done(epoch=1, step=step, metrics={"loss": 0.5}))
            self.load.appended.append((seq, step))
            self.load.done("append")
            await asyncio.sleep(PACE_S)

    async def write(self) -> None:
        rows, revision = self.buses["feeder"].rows("run"), 0
        while True:
            try:
                revision = await rows.update(ROW, {"count": self.load.written + 1}, revision)
            except BusUnavailable:  # stored or not: the row shows it
                found = await self.buses["feeder"].jet.retry_for_ever(lambda: rows.get(ROW))
                if found is None or found[0]["count"] != self.load.written + 1:
                    continue
                revision = found[1]
            self.load.written += 1
            self.load.done("write")
            await asyncio.sleep(PACE_S)

    def all(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {"read": self.read, "lease": self.lease, "issue": self.issue, "append": self.append, "write": self.write}


@asynccontextmanager
async def cluster_under_load(directory: Path) -> AsyncIterator[tuple[EmbeddedBus, Load, Activities]]:
    """Run three servers and the load on them; at the end of the block the load comes to rest, with nothing in
    flight.
    """
    config = BusConfig(cluster=3, lease_s=5.0, samples_max_bytes=500_000_000)
    servers, load = EmbeddedBus(directory, RUN, config), Load()
    servers.start()
    try:
        async with AsyncExitStack() as stack:
            names = ("actor", "reader", "feeder")
            buses = {
                name: await stack.enter_async_context(connect(servers.url, RUN, config, name=name)) for name in names
            }
            feeder = buses["feeder"]
            await feeder.jet.retry_for_ever(feeder.create_layout)
            await feeder.tasks.fence(1)
            await feeder.plans.fence(1)
            activities = Activities(load, buses)
            async with asyncio.TaskGroup() as group:
                running = {name: group.create_task(loop(), name=name) for name, loop in activities.all().items()}
                publishing = [group.create_task(activities.publish(), name="publish") for _ in range(IN_FLIGHT)]
                await until(lambda: goes_on(load, 0.0), GOES_ON_S, "the load to begin")
                yield servers, load, activities
                activities.ending = True
                for name in ("issue", "append", "write"):
                    running[name].cancel()
                await asyncio.gather(*publishing)
                await all_settled(load, feeder)
                await until(lambda: set(load.published) <= set(load.read), GOES_ON_S, "all samples to be read")
                for task in running.values():
                    task.cancel()
            await check_books(load, feeder)
    finally:
        servers.stop()


async def fail_over(servers: EmbeddedBus, load: Load, bus: Bus, stream: str) -> dict[str, float]:
    """Kill the leader of a stream, wait until all activities continue, restart it, wait until it has caught up. Return
    pauses in s.
    """
    name = subjects.stream(bus.run, stream)
    victim = await leader(servers, bus, name)
    since = time.monotonic()
    await asyncio.to_thread(victim.kill)
    await until(lambda: goes_on(load, since), GOES_ON_S, f"all to go on without the leader of {stream}")
    pauses = {activity: load.pause_s(activity, since) for activity in load.when}
    await asyncio.to_thread(victim.start)
    started = time.monotonic()
    await caught_up(bus)
    return {**pauses, "caught up": time.monotonic() - started}


def goes_on(load: Load, since: float) -> bool:
    activities = ("publish", "read", "issue", "settle", "append", "write")
    return all(
        sum(moment > since for moment in load.when.get(activity, [])[-GOES_ON:]) == GOES_ON for activity in activities
    )


async def leader(servers: EmbeddedBus, bus: Bus, stream: str) -> EmbeddedServer:
    """Return the server that leads a stream; wait for one when there is none at the moment."""
    async with asyncio.timeout(GOES_ON_S):
        while True:
            name = (await bus.jet.retry_for_ever(lambda: bus.jet.call(f"STREAM.INFO.{stream}")))["cluster"].get(
                "leader", ""
            )
            if name:
                return servers.servers[int(name.removeprefix("n"))]
            await asyncio.sleep(LOOK_S)


async def all_settled(load: Load, bus: Bus) -> None:
    """Wait until the server has an ack of each task."""
    async with asyncio.timeout(GOES_ON_S):
        while await bus.jet.retry_for_ever(bus.tasks.acked_to) < load.issued[-1]:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(LOOK_S)


async def caught_up(bus: Bus) -> None:
    """Wait until every stream has three copies, all current."""
    async with asyncio.timeout(CAUGHT_UP_S):
        while not all(  # noqa: ASYNC110
            [await _complete(bus, subjects.stream(bus.run, name)) for name in ("SAMPLES", "TASKS", "PLAN", "DEAD")]
        ):
            await asyncio.sleep(LOOK_S)


async def _complete(bus: Bus, stream: str) -> bool:
    cluster = (await bus.jet.retry_for_ever(lambda: bus.jet.call(f"STREAM.INFO.{stream}")))["cluster"]
    others = cluster.get("replicas") or []
    return (
        bool(cluster.get("leader"))
        and len(others) == 2
        and all(other["current"] and not other.get("offline") for other in others)
    )


async def check_books(load: Load, bus: Bus) -> None:
    """Raise AssertionError naming lost and doubled messages."""
    doubled = [id for id, times in Counter(load.read).items() if times > 1]
    assert not doubled, f"read twice: {doubled[:5]}"
    assert set(load.published) <= set(load.read), "samples lost"
    state = await bus.samples.info()
    assert (state.messages, state.last_seq) == (len(load.read), len(load.read)), f"{state} for {len(load.read)} read"
    steps = [record.step async for _, record in bus.plans.scan() if isinstance(record, Done)]
    assert steps == list(range(1, len(steps) + 1)), "records out of place"
    assert [step for _, step in load.appended] == steps[: len(load.appended)], "records lost"
    tasks = [task.id async for task in bus.tasks.scan()]
    assert tasks == sorted(set(tasks)) and set(load.issued) <= set(tasks), "tasks lost"
    row = await bus.rows("run").get(ROW)
    assert row is not None and load.written <= row[0]["count"] <= load.written + 1, f"row {row}, {load.written} changes"


async def until(met: Callable[[], bool], within_s: float, what: str) -> None:
    try:
        await waits.until(met, timeout_s=within_s)
    except TimeoutError:
        raise TimeoutError(f"waited {within_s:.0f} s for {what}") from None


def report(stream: str, pauses: dict[str, float]) -> str:
    return f"leader of {stream:8} killed; pause, s: " + "  ".join(
        f"{name} {seconds:.2f}" for name, seconds in sorted(pauses.items())
    )


async def bench(kills: int, streams: list[str]) -> None:
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        async with cluster_under_load(Path(directory)) as (servers, load, activities):
            for kill in range(kills):
                stream = streams[kill % len(streams)]
                rounds.append(await fail_over(servers, load, activities.buses["feeder"], stream))
                print(report(stream, rounds[-1]), flush=True)
    for name in sorted(rounds[0]):
        found = [pauses[name] for pauses in rounds]
        print(f"{name:10} median {statistics.median(found):6.2f} s, longest {max(found):6.2f} s")
    again = sum(times - 1 for times in load.leased.values())
    print(f"{len(load.read)} samples: 0 lost, 0 doubled; {len(load.issued)} tasks: 0 lost, {again} leased again")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--streams", default="SAMPLES,TASKS,PLAN")
    args = parser.parse_args()
    asyncio.run(bench(args.kills, args.streams.split(",")))


if __name__ == "__main__":
    main()
