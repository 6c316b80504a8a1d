"""A run with graders that misbehave for a third of their calls: no heartbeat is late, and the run ends by itself with
what can be graded.

A heartbeat is measured at the bus: the time between two of the actor's rows, by the server's clock, above the second
that is between them by design. On shared cores rows are late for another reason, too, which says nothing of graders:
their writer has no core. So the time in which the actor's main thread and the threads of the bus were runnable and did
not run (``/proc/PID/task/TID/schedstat``) is subtracted. A grader in the actor's loop, or one that holds the actor's
GIL, is not excused by it: the main thread then runs, or waits for a lock.
"""

# ruff: noqa: ASYNC110, ASYNC240 - rows are read until they have a state; files of /proc do not block

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import nats
import psutil
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from tests import bad_graders
from tests.whole.running import Up, assert_books_balance, live, until_step, up
from tidemill.actors.actor.process import UPDATE_EVERY_S
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Dead

LATE_S = 0.2
"""Most seconds by which graders may delay a heartbeat."""
EVERY_S = 0.02
"""Seconds between two readings of the time without a core."""
STEPS = 4


@dataclass
class Pulse:
    """The rows of one process, and the time for which its writers had no core."""

    rows_s: list[float] = field(default_factory=list)
    """Times of the rows, by the server's clock."""
    starved: list[tuple[float, float]] = field(default_factory=list)
    """(time, seconds without a core so far)."""

    def late_s(self) -> list[float]:
        """Return the seconds by which each row is late, without those for which its writers had no core."""
        return [
            end - begin - UPDATE_EVERY_S - (self._starved_at(end, after=True) - self._starved_at(begin, after=False))
            for begin, end in zip(self.rows_s, self.rows_s[1:], strict=False)
        ]

    def _starved_at(self, time_s: float, *, after: bool) -> float:
        """Return the seconds without a core at the reading next to a time."""
        if after:
            return next((waited for at, waited in self.starved if at >= time_s), self.starved[-1][1])
        return next((waited for at, waited in reversed(self.starved) if at <= time_s), self.starved[0][1])


@asynccontextmanager
async def pulse_of_actor(run: Up, bus: Bus) -> AsyncIterator[Pulse]:
    """Follow the actor's rows, from the first one on which it works, while entered."""
    pulse = Pulse()
    while (row := await live(bus, "actor")).phase != "working":
        await asyncio.sleep(EVERY_S)
    (server,) = [
        child for child in psutil.Process(run.process.pid).children(recursive=True) if child.name() == "nats-server"
    ]
    client = await nats.connect(await run.bus_url())

    async def note(message: nats.aio.msg.Msg) -> None:
        pulse.rows_s.append(message.metadata.timestamp.timestamp())

    unacked = ConsumerConfig(ack_policy=AckPolicy.NONE)
    await client.jetstream().subscribe(subjects.row(bus.run, "live", f"actor.{row.id}"), cb=note, config=unacked)
    reading = asyncio.create_task(_read(pulse, row.pid, server.pid))
    try:
        yield pulse
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.close()


async def _read(pulse: Pulse, actor: int, server: int) -> None:
    while True:
        files = [Path(f"/proc/{actor}/task/{actor}/schedstat"), *Path(f"/proc/{server}/task").glob("*/schedstat")]
        with suppress(OSError):
            pulse.starved.append((time.time(), sum(int(file.read_text().split()[1]) for file in files) / 1e9))
        await asyncio.sleep(EVERY_S)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [bad_graders.OURS, bad_graders.THEIRS], ids=["module", "server"])
async def test_graders_that_misbehave_delay_no_heartbeat_and_end_no_run(
    tmp_path: Path, kinds: Mapping[str, str]
) -> None:
    """The calls for a third of the labels never go well: such prompts are dead, with the reason, and others are
    trained.
    """
    async with bad_graders.serving() as url:
        module = ("actor.reward=tests.bad_graders:graded", "actor.reward_timeout_s=1")
        server = (
            "actor.reward=remote",
            f"actor.reward_options={{url: {url}, timeout_s: 0.5, retries: 0}}",
            "actor.reward_timeout_s=3",
        )
        with up(
            tmp_path, *(module if kinds is bad_graders.OURS else server), f"learner.steps={STEPS}", "bus.max_attempts=2"
        ) as run:
            async with run.bus() as bus:
                async with pulse_of_actor(run, bus) as pulse:
                    await until_step(bus, STEPS)
                dead = [one async for _, one in bus.dead.scan() if isinstance(one, Dead)]
            assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    late_s = pulse.late_s()
    assert len(late_s) >= 5 and max(late_s) <= LATE_S, late_s
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["books_balance"] and run.summary["steps"] == STEPS, run.summary
    found = Counter[str]()
    for one in dead:
        kind = bad_graders.kind_of(str(one.prompt).removesuffix("="), kinds)
        if kind and kinds[kind] in one.reason:
            found[kind] += 1
        else:  # it waited for a core, or, without an answer to eight calls in a row, for a server that is left alone
            assert "no result within" in one.reason, one
    assert found.keys() == kinds.keys(), found
