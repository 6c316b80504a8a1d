"""A disk of the bus that is really full: every process gets the reason, all waits, and all that was published is stored
once.
"""

import argparse
import asyncio
import dataclasses
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.bus_kit import make_sample
from tests.refusals import refusal
from tests.small_disk import SmallDisk, small_disk
from tests.waits import until
from tidemill.bus.config import needed_bytes
from tidemill.bus.errors import BusFull
from tidemill.bus.exit_codes import CONFIG
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import beside
from tidemill.bus.system.files import lacking
from tidemill.bus.wire import subjects
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.machine import check_places
from tidemill.launch.cli.status import show_status
from tidemill.launch.run.access import BUS_URL_FILE
from tidemill.launch.run.bus_process import run_bus
from tidemill.launch.run.up import Up
from tidemill.launch.run.watch import RunWatch
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig

MB = 1_000_000
RUN = "full"
SMOKE = Path(__file__).resolve().parents[2] / "launch/configs/smoke.yaml"
LONG_S = 120.0
TOKENS = 60_000
"""Length of a response: half a megabyte a sample."""


def config_in(disk: SmallDisk, *settings: str) -> RunConfig:
    directory = f"directory={disk.root}/run"
    return load(SMOKE, [f"run={RUN}", directory, f"bus.samples_max_bytes={20 * MB}", *settings]).config


@asynccontextmanager
async def running(config: RunConfig) -> AsyncIterator[Bus]:
    """Run the bus in this process, and yield a connection to it."""
    draining, address = asyncio.Event(), config.root / BUS_URL_FILE
    keeping = asyncio.create_task(run_bus(config, draining))
    try:
        await until(lambda: address.exists() or keeping.done())
        assert not keeping.done(), keeping.result()
        async with connect(address.read_text(), RUN, config.bus, name="test") as bus:
            yield bus
    finally:
        draining.set()
        await keeping


async def test_a_killed_server_is_started_again_and_named(tmp_path: Path) -> None:
    config = load(SMOKE, [f"run={RUN}", f"directory={tmp_path}/run"]).config
    async with running(config) as bus:
        watch = RunWatch(bus, steps=9)
        async with beside(watch.run()), asyncio.timeout(LONG_S):
            rows = await until(lambda: bus.rows("live").all("bus"))
            ((value, _),) = rows.values()
            os.kill(value["pid"], signal.SIGKILL)
            await until(
                lambda: any(
                    f"nats-server (process {value['pid']}) ended and is started again" in text for text in watch.events
                )
            )


async def full(bus: Bus, *, reason: str) -> str:
    """Wait until the bus gives this reason for storing nothing, or, without ``reason``, none. Return the whole text."""
    text = ""

    async def gives_it() -> bool:
        nonlocal text
        text = await bus.full()
        return reason in text and bool(text) == bool(reason)

    await until(gives_it, timeout_s=LONG_S)
    return text


async def stored_ids(bus: Bus) -> Counter[tuple[int, int]]:
    last = (await bus.samples.info()).last_seq
    found: Counter[tuple[int, int]] = Counter()
    for seq in range(1, last + 1):
        sample = await bus.samples.fetch(seq)
        assert sample is not None
        found[sample.task, sample.index] += 1
    return found


@pytest.mark.parametrize(
    ("kind", "cluster", "reason"),
    [
        pytest.param("bytes", 1, "MB free on the disk of", id="bytes"),
        pytest.param("inodes", 1, "no inodes free", id="inodes"),
        pytest.param("bytes", 3, "MB free on the disk of", id="three servers", marks=pytest.mark.slow),
    ],
)
async def test_a_full_disk_is_named_and_waited_for_and_nothing_is_lost(
    tmp_path: Path, kind: str, cluster: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "nr_inodes=400" if kind == "inodes" else ""
    with small_disk(tmp_path / "disk", size_bytes=150 * MB, options=options) as disk:
        config = config_in(disk, f"bus.cluster={cluster}")
        async with running(config) as bus, asyncio.timeout(LONG_S), beside((watch := RunWatch(bus, steps=1)).run()):
            await bus.samples.publish(make_sample(RUN, task=1, length=TOKENS))
            disk.fill_inodes() if kind == "inodes" else disk.fill(leaving=MB)
            samples = [make_sample(RUN, task=2, index=index, group_size=24, length=TOKENS) for index in range(24)]
            publishing = asyncio.gather(*[bus.samples.publish(sample) for sample in samples])
            got = await full(bus, reason=reason)
            assert got.startswith("no room: ") and str(disk.root) in got
            with refusal(BusFull, reason=re.compile(reason)):
                await refused(bus)
            writing = asyncio.gather(
                *[bus.rows("run").put(f"row.{number}", {"x": "x" * 900_000}) for number in range(3)]
            )
            assert not publishing.done()
            shown = await status_of(bus, capsys)
            assert shown.startswith("the bus stores nothing, the run waits: no room: ") and reason in shown, shown
            disk.clear()
            await full(bus, reason="")
            await asyncio.gather(publishing, writing)
            assert len(await bus.rows("run").all("row")) == 3
            assert await stored_ids(bus) == {(1, 0): 1, **{(2, index): 1 for index in range(24)}}
            await until(lambda: len(watch.events) >= 2)
            began, over = list(watch.events)[:2]
            assert "the run waits: no room" in began and "stores again" in over


async def test_a_server_that_ends_on_a_full_disk_is_started_again_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=100 * MB) as disk:
        config = config_in(disk)
        room = partial(lacking, config.root / "bus", needed_bytes(config.bus))
        async with (
            running(config) as bus,
            asyncio.timeout(LONG_S),
            beside((watch := RunWatch(bus, steps=1, room=room)).run()),
        ):
            disk.fill(leaving=0)
            (server,) = [child for child in psutil.Process().children() if child.name() == "nats-server"]
            server.kill()
            publishing = asyncio.create_task(bus.samples.publish(make_sample(RUN)))
            await until(lambda: watch.events)
            assert "the run waits: no room: 0.0 MB free" in watch.events[0] and not publishing.done()
            disk.clear()
            assert await publishing == 1


async def status_of(bus: Bus, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    await show_status(bus, argparse.Namespace(json=False))
    return " ".join(capsys.readouterr().out.split())


async def refused(bus: Bus) -> None:
    """Send a sample again and again until the stream of samples gives no answer."""
    number = 0
    while True:
        number += 1
        await bus.jet.outbox.attempt(subjects.samples_of(RUN, "x"), bytes(MB), {subjects.MESSAGE_ID: f"x.{number}"})


async def test_a_bus_that_is_started_on_a_full_disk_waits_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=100 * MB) as disk:
        disk.fill(leaving=MB)
        opening = running(config_in(disk))
        beginning = asyncio.create_task(opening.__aenter__())
        async with asyncio.timeout(LONG_S):
            await until(lambda: "the bus is not started: no room: " in caplog.text)
            disk.clear()
            bus = await beginning
            assert await bus.samples.publish(make_sample(RUN)) == 1
        await opening.__aexit__(None, None, None)


async def test_the_limit_that_a_server_takes_at_its_start_grows_with_the_room(tmp_path: Path) -> None:
    """It is three quarters of what was free then; nats-server refuses every write beyond it, with error 10023."""
    with small_disk(tmp_path / "disk", size_bytes=200 * MB) as disk:
        disk.fill(leaving=45 * MB)
        async with running(config_in(disk, "bus.samples_max_bytes=1000000")) as bus, asyncio.timeout(LONG_S):
            disk.clear()
            subject = subjects.partial(RUN, 1, 0)
            storing = [
                bus.jet.outbox.store(subject, bytes(MB), {subjects.MESSAGE_ID: f"p.{number}"}) for number in range(60)
            ]
            assert sorted(ack.seq for ack in await asyncio.gather(*storing)) == [*range(1, 61)]


def test_a_disk_without_room_for_the_bus_is_named_before_a_start_and_refused_by_up(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=100 * MB) as disk:
        disk.fill(leaving=MB)
        config = dataclasses.replace(config_in(disk), prepare=None)
        (config.root / "bus").mkdir(parents=True)  # of a run that goes on: its streams have their room, and grow
        report = Report()
        check_places(report, config, None)
        (warning,) = report.warnings
        assert "got no room: 1.0 MB free on the disk of " in warning.text and "want 32.0 MB" in warning.text
        up = Up(config, Console(), resume=True)
        asyncio.run(up.run(asyncio.Event()))
        assert up.code == CONFIG and up.failure.startswith("the bus is not started: no room: "), up.failure
