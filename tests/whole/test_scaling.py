"""Workers come and go while a run goes on: by `tidemill scale`, by hand, and on a machine with access to the bus
alone.
"""

import asyncio
import contextlib
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import launched
from tests.chaos.storm import drained_and_judged
from tests.forked import Forked
from tests.unhurried import UNHURRIED
from tests.waits import LIMIT_S, until, until_gone
from tests.whole.running import assert_books_balance, live, until_step, up
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus


@contextlib.asynccontextmanager
async def senders(bus: Bus) -> AsyncIterator[Counter[str]]:
    """Count the samples of each actor as they are published."""
    seen: Counter[str] = Counter()

    async def count(message: object) -> None:
        seen[str(message.subject).rsplit(".", 1)[1]] += 1  # type: ignore[attr-defined]

    sub = await bus.nc.subscribe(f"tm.{bus.run}.sample.>", cb=count)
    yield seen
    await sub.unsubscribe()


@contextlib.contextmanager
def tidemill(*words: str, output: Path) -> Iterator[Forked]:
    process = launched.tidemill(*words, output=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until_seen(seen: Counter[str], *names: str) -> None:
    await until(lambda: all(seen[name] for name in names))


async def test_actors_are_scaled_by_command_and_by_hand(tmp_path: Path) -> None:
    with up(tmp_path, "learner.steps=1000000", UNHURRIED, "actor.reward_options.wait_s=2") as run:
        async with run.bus() as bus, senders(bus) as seen:
            await until_step(bus, 1)
            scale = ("scale", "--run-dir", str(run.directory))
            said = (await asyncio.to_thread(launched.run_tidemill, *scale, "actors=3")).output
            assert re.search(
                r"all: actors 1 -> 3\nhost up: engines 1 of 1, scorers 0 of 0, actors [123] of 3\n", said
            ), said
            await until_seen(seen, "actor-0", "actor-1", "actor-2")
            said = (await asyncio.to_thread(launched.run_tidemill, *scale, "scorers=1")).output
            assert "no actor asks a scorer of this run" in said
            said = (await asyncio.to_thread(launched.run_tidemill, *scale, "scorers=0")).output
            assert "no actor asks" not in said
            url = (run.directory / "bus.url").read_text().strip()
            with tidemill(
                "actor", "--bus", url, "--id", "by-hand", "--allow", UNHURRIED, output=tmp_path / "by-hand.log"
            ) as by_hand:
                await until_seen(seen, "by-hand")
                by_hand.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(by_hand.wait, LIMIT_S) == 0
            assert (await asyncio.to_thread(launched.run_tidemill, *scale, "actors=1")).returncode == 0
            view = LiveView(bus)  # a row that its process could not remove stays

            async def others() -> set[str]:
                return {row.id for row in await view.alive("actor")} ^ {"actor-0"}

            await until_gone(others)
        verdict = await drained_and_judged(run)
        assert not verdict.dropped, "whoever drained lost nothing"


@pytest.mark.slow
async def test_a_host_that_has_nothing_but_the_bus_runs_engine_and_actor(tmp_path: Path) -> None:
    """It has no configuration and no shared directory: settings come from the bus, the model from the learner."""
    with up(tmp_path, "up.engines=0", "up.actors=0", "learner.steps=12") as run:
        async with run.bus() as bus:
            await live(bus, "learner")
            row = await until(lambda: bus.rows("run").get("config"))
            elsewhere = row[0] | {"model": {"path": "/nowhere/on/this/machine"}}
            await bus.rows("run").put("config", elsewhere)
            away = tmp_path / "away"
            away.mkdir()
            url = (run.directory / "bus.url").read_text().strip()
            words = ("host", "--bus", url, "--name", "away", "--dir", str(away), "engines=1", "actors=1")
            with tidemill(*words, output=tmp_path / "host.log") as host:
                assert await asyncio.to_thread(run.wait) == 0, run.log
                host.send_signal(signal.SIGTERM)
        assert run.summary["steps"] == 12
        assert_books_balance(run.summary, max_lag=2)
        assert (
            "no model on this machine path=/nowhere/on/this/machine"
            in (away / "logs" / "engine-away-0.log").read_text()
        )
