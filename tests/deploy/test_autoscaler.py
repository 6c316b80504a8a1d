"""The autoscaler on a real bus: one of several decides; in a real run it adds engines for a learner that waits."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import launched
from tests.bus_fixtures import BusOpener
from tests.waits import LIMIT_S, until
from tests.whole.running import up
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import ended
from tidemill.bus.wire.subjects import AUTOSCALE_KEY
from tidemill.launch.deploy import autoscaler
from tidemill.launch.deploy.autoscaler import Autoscaler, Bounds
from tidemill.launch.run import desired

BOUNDS = {"engine": Bounds(2, 4), "actor": Bounds(1, 8)}


@asynccontextmanager
async def running(bus: Bus) -> AsyncIterator["tuple[asyncio.Event, asyncio.Task[None]]"]:
    """Run an autoscaler; yield the event that drains it, and its task."""
    draining = asyncio.Event()
    task = asyncio.create_task(Autoscaler(bus, BOUNDS, settle_s=1.0).run(draining))
    try:
        yield draining, task
    finally:
        await ended(task)


async def owner(bus: Bus) -> str:
    """Return the nonce of the autoscaler that decides; empty for none."""
    row, _ = await bus.rows("wanted").read(AUTOSCALE_KEY)
    return "" if row is None else str(row["owner"])


async def test_one_of_two_decides_and_the_other_takes_over(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "DEAD_S", 600.0)  # a bus on a busy machine may be late by more than five
    async with open_bus(name="first") as first, open_bus(name="second") as second, open_bus() as bus:
        await desired.change(bus, desired.ALL, {"engine": 1, "actor": 3, "scorer": 1})
        async with running(first) as (_, task):
            before = await until(lambda: owner(bus))
            async with running(second) as (draining, heir):
                owners = set[str]()

                async def beats() -> bool:
                    row, _ = await bus.rows("wanted").read(AUTOSCALE_KEY)
                    owners.add("" if row is None else row["owner"])
                    return row is not None and row["beats"] >= 4

                await until(beats)
                assert owners == {before}
                assert (await desired.read(bus)).rows[desired.ALL][0] == {"engine": 2, "actor": 3, "scorer": 1}

                await ended(task)  # as a crash: it removes no row
                monkeypatch.setattr(autoscaler, "DEAD_S", 1.0)

                async def taken() -> bool:
                    return await owner(bus) not in ("", before)

                await until(taken)
                draining.set()
                await heir
        assert await owner(bus) == "", "one that drains leaves no row"


async def test_renewals_are_no_change_for_hosts(open_bus: BusOpener) -> None:
    """Else each would try again what it has given up, every second."""
    async with open_bus() as bus:
        await desired.change(bus, desired.ALL, {"engine": 2, "actor": 1})
        revision = (await desired.read(bus)).revision
        async with running(bus):
            await until(lambda: owner(bus))
            assert (await desired.read(bus)).revision == revision


@pytest.mark.slow
async def test_engines_are_added_for_a_learner_that_waits(tmp_path: Path) -> None:
    settings = ("learner.steps=100000", "up.engines=1", "up.actors=1", "sampling.max_new_tokens=32")
    with up(tmp_path, *settings) as run:
        async with run.bus() as bus:
            log = tmp_path / "autoscaler.log"
            words = ("scale", "--run-dir", str(run.directory), "--autoscale", "engines=1..2", "actors=1..2")
            scaler = launched.tidemill(*words, "--settle", "3", output=log)
            try:

                async def scaled() -> bool:
                    row, _ = await bus.rows("wanted").read(AUTOSCALE_KEY)
                    return row is not None and row["counts"].get("engine") == 2

                await until(scaled, alive=lambda: scaler.returncode is None)
                await until(lambda: re.search(r"engines 1 -> 2, actors \d -> \d: the learner waits", log.read_text()))
                status = await asyncio.to_thread(launched.run_tidemill, "status", "--run-dir", str(run.directory))
                assert "autoscaler: " in status.out, status.output

                async def two_engines() -> bool:
                    shown = await asyncio.to_thread(
                        launched.run_tidemill, "status", "--json", "--run-dir", str(run.directory)
                    )
                    rows = json.loads(shown.out)["processes"]
                    return sum(row["role"] == "engine" and row["phase"] == "serving" for row in rows) == 2

                await until(two_engines, every_s=1)
            finally:
                scaler.send_signal(signal.SIGTERM)
                assert scaler.wait(LIMIT_S) == 0, log.read_text()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
    assert run.summary["samples_lost"] == 0
