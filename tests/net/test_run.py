"""One run on six machines with the defaults, under faults of networks, one after the other; its accounting is audited
at the end.

The host names of its machines are an address of the loopback interface, as Debian's installer writes them. Nothing that
concerns a network is set but that the bus and the router listen to other machines, as docs/operating.md has it: no
other host, no lease, deadline or interval. Printed (-s): the time from the end of each trouble to the next step.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.net.lab import TRAP, why_not
from tests.net.site import NO_END, SITE, Site, site
from tests.waits import LIMIT_S, until
from tests.whole.prepared import ROOT
from tidemill.bus.errors import BusError, BusUnavailable
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.status import read_status

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
DIGITS = ROOT / "launch/configs/digits.yaml"
SETTINGS = (f"learner.steps={NO_END}", "learner.groups_per_step=16", "learner.checkpoint_every=10")
"""Sizes of the run: it goes on until the test ends it, its steps are short on a core or two, and every restart finds a
new checkpoint.
"""
REWARD = 0.9
CUT_S = 10.0
LONG_CUT_S = 60.0
BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
"""The cores are shared with other tests then, and times are those of the machine."""
NAMED_S = 30.0 if BESIDE_OTHERS else 5.0
BACK_S = 120.0
GATE, FAR = "gate", "far"
"""A machine with relays, and one that no other machine is reached from."""
ROLES = ["actor", "actor", "bus", "engine", "feeder", "host", "host", "host", "learner", "router"]
LEARNS_S = 390.0


def machines(*often: str) -> list[Any]:
    """Return the machines as parameters; all but these are left to ``make test-net-all``."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in SITE]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("net"), DIGITS, *SETTINGS, machines=SITE, spare=(GATE, FAR), hosts=TRAP) as made:
        made.start()
        yield made


async def newest(bus: Bus) -> Done | None:
    """Return the newest record of a step, in the part of PLAN that the bus has now."""
    found: Done | None = None
    async for _, record in bus.plans.scan():
        if isinstance(record, Done):
            found = record
    return found


async def step(bus: Bus) -> int:
    """Return the newest step; waits while the bus is away."""
    while True:
        with contextlib.suppress(BusError):
            found = await newest(bus)
            return 0 if found is None else found.step
        await asyncio.sleep(0.2)


async def next_steps(run: Site, bus: Bus, number: int = 1, within_s: float = 200.0) -> float:
    """Wait until the bus answers, then for that many further steps; return the seconds from the call to the first of
    them.
    """
    begin, first = time.monotonic(), 0.0
    before = await step(bus)
    try:
        async with asyncio.timeout(within_s):
            while (now := await step(bus)) < before + number:
                first = first or (time.monotonic() - begin if now > before else 0.0)
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{number} steps after step {before}: not within {within_s:g} s\n{run.logs()}")
    return first or time.monotonic() - begin


Process = tuple[str, str, str, int]


async def processes(bus: Bus) -> set[Process]:
    """Return role, id, host and process id of all processes that live."""
    view = LiveView(bus)
    await view.refresh()
    await asyncio.sleep(2.5)
    return {(row.role, row.id, row.host, row.pid) for row, age in await view.refresh() if age < 2.0}


async def complete(run: Site, bus: Bus) -> set[Process]:
    """Wait until every process of the run lives, and return them."""
    now: set[Process] = set()
    try:
        async with asyncio.timeout(BACK_S):
            while sorted(role for role, *_ in now) != ROLES:
                now = await processes(bus)
    except TimeoutError:
        pytest.fail(f"there are {now}\n{run.logs()}")
    return now


async def all_there(run: Site, bus: Bus, before: set[Process]) -> None:
    """Wait until the same processes live as before: none was replaced, none is missing."""
    now: set[Process] = set()
    try:
        async with asyncio.timeout(LIMIT_S):
            while (now := await processes(bus)) != before:
                pass
    except TimeoutError:
        pytest.fail(f"missing {before - now}, new {now - before}\n{run.logs()}")


def report(what: str, seconds: float) -> None:
    print(f"{what}: next step after {seconds:.1f} s", file=sys.stderr)


@pytest.fixture
def healed(run: Site) -> Iterator[Site]:
    """The run; its links are up and undisturbed afterwards."""
    try:
        yield run
    finally:
        for machine in run.lab.machines.values():
            machine.heal()
            machine.lose(0)
            machine.limit("")


async def test_six_machines_with_the_defaults_learn(run: Site) -> None:
    """Of launch/configs/digits.yaml the settings are as they are, but for ``SETTINGS``: sizes of the run on a small
    machine.
    """
    begin = time.monotonic()
    async with run.bus() as bus:
        await next_steps(run, bus, within_s=LEARNS_S)
        report("start of all machines", time.monotonic() - begin)
        rows = {row.role: row for row in await LiveView(bus).alive()}
        assert rows["engine"].address.startswith(f"http://{run.lab['gpu'].address}:")
        assert rows["router"].address.startswith(f"http://{run.lab['router'].address}:")
        reward, best = 0.0, 0
        async with asyncio.timeout(LEARNS_S):
            while reward < REWARD:
                done = await newest(bus)
                if done is not None and done.step > best:
                    best, reward = done.step, max(reward, done.metrics.get("data/reward_mean", 0.0))
                await asyncio.sleep(1)
        print(f"reward {reward:.2f} at step {best}, {time.monotonic() - begin:.0f} s after the start", file=sys.stderr)


async def test_one_percent_of_all_packets_lost(healed: Site) -> None:
    async with healed.bus() as bus:
        before = await complete(healed, bus)
        begin = time.monotonic()
        await next_steps(healed, bus, 8)
        without = time.monotonic() - begin
        for name in SITE:
            healed.lab[name].lose(1)
        begin = time.monotonic()
        await next_steps(healed, bus, 8)
        print(f"8 steps: {without:.1f} s, with 1 % loss {time.monotonic() - begin:.1f} s", file=sys.stderr)
        for name in SITE:
            healed.lab[name].lose(0)
        await all_there(healed, bus, before)


async def test_100_mbit_on_one_machine(healed: Site) -> None:
    async with healed.bus() as bus:
        before = await complete(healed, bus)
        healed.lab["gpu"].limit("100mbit")
        begin = time.monotonic()
        await next_steps(healed, bus, 8)
        print(f"8 steps with 100 Mbit/s at the engine {time.monotonic() - begin:.1f} s", file=sys.stderr)
        await all_there(healed, bus, before)


@pytest.mark.parametrize("name", machines("bus", "node", "gpu", "act0"))
async def test_a_machine_cut_off_for_10_s_is_ridden_out(healed: Site, name: str) -> None:
    await _cut(healed, name, CUT_S)


@pytest.mark.parametrize("name", machines("bus"))
async def test_a_machine_cut_off_for_60_s_is_ridden_out(healed: Site, name: str) -> None:
    await _cut(healed, name, LONG_CUT_S)


async def _cut(run: Site, name: str, seconds: float) -> None:
    async with run.bus() as bus:
        before = await complete(run, bus)
        run.lab[name].cut()
        await asyncio.sleep(seconds)
        run.lab[name].heal()
        report(f"{name} cut for {seconds:g} s", await next_steps(run, bus))
        await all_there(run, bus, before)


async def test_one_direction_dropped(healed: Site) -> None:
    """Packets from the learner to the engine are dropped: no pushes, no snapshots. The engine is named; steps go on
    afterwards.
    """
    async with healed.bus() as bus:
        before = await complete(healed, bus)
        healed.lab["gpu"].drop_from(healed.lab["node"])
        try:
            row = await row_of(bus, "engine", "engine-gpu-0", lambda row: row.trouble != "")
        finally:
            healed.lab["gpu"].receive_all()
        assert "unreachable from learner learner" in row.trouble
        report("one direction dropped", await next_steps(healed, bus))
        await all_there(healed, bus, before)


async def row_of(bus: Bus, role: str, id: str, what: Callable[[LiveRow], bool], within_s: float = 120.0) -> LiveRow:
    """Wait for a row with a property, and return it."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(BusUnavailable):
                for row in await LiveView(bus).alive(role):
                    if row.id == id and what(row):
                        return row
            await asyncio.sleep(0.1)


def one_of(status: JsonObject, id: str) -> JsonObject:
    """Return the row of a process in the values of status."""
    (row,) = [one for one in status["processes"] if one["id"] == id]
    return row


@contextlib.asynccontextmanager
async def rows_written(bus: Bus) -> AsyncIterator[list[tuple[float, JsonObject]]]:
    """While entered, collect all live rows as they are written, each with the time of the loop."""
    found: list[tuple[float, JsonObject]] = []

    async def note(message: Any) -> None:
        """Note a row; the message that removes one has no body."""
        if message.data:
            found.append((asyncio.get_running_loop().time(), json.loads(message.data)))

    async with bus.jet.connection.subscribed(subjects.row(bus.run, "live", "*.*"), note):
        yield found


def first(rows: Sequence[tuple[float, JsonObject]], what: Callable[[JsonObject], bool]) -> float:
    """Return the time of the first row with a property."""
    return next(when for when, row in rows if what(row))


async def test_status_names_an_engine_that_nobody_reaches(run: Site) -> None:
    """From the engine's first row with its address to the row of a witness with the error, both as they are written,
    and status then.
    """
    machine, wrong = run.lab["act1"], "10.77.0.200"
    command = [sys.executable, "-m", "tidemill", "engine", "--bus", run.url, "--id", "wrong", "--advertise", wrong]
    engine = machine.start(command, log=run.lab.directory / "wrong.log", cwd=ROOT)
    try:
        async with run.bus() as bus, rows_written(bus) as rows:
            nonce = (await row_of(bus, "engine", "wrong", lambda row: row.address != "")).nonce
            # rows pass by whoever waits for them
            await until(lambda: any(row["reached"].get(nonce) for _, row in rows), every_s=0.1)
            status = await read_status(bus)  # as `tidemill status` does after its start
            row = one_of(status, "wrong")
            begin = first(rows, lambda row: row["nonce"] == nonce and row["address"] != "")
            seconds = first(rows, lambda row: bool(row["reached"].get(nonce))) - begin
            print(
                f"an address that nobody reaches: in a row after {seconds:.1f} s: {row['unreachable']}", file=sys.stderr
            )
            assert row["unreachable"], status
            assert seconds < NAMED_S
            while not any(
                text.startswith("unreachable from learner learner: ") for text in one_of(status, "wrong")["unreachable"]
            ):
                status = await read_status(bus)  # the first caller, the router or the learner, is named first
            assert (one_of(status, "engine-gpu-0")["verified"], one_of(status, "engine-gpu-0")["unreachable"]) == (
                True,
                [],
            )
            await row_of(bus, "engine", "wrong", lambda row: "cure: engine: --advertise ADDRESS" in row.trouble)
            assert "unreachable from learner learner" in engine.log or "unreachable from router router" in engine.log, (
                "whoever was first"
            )
    finally:
        await asyncio.to_thread(engine.end)


async def test_an_actor_and_an_engine_behind_a_delay_of_50_ms(run: Site) -> None:
    """The actor's machine reaches one other alone, with relays to the bus and to an engine that advertises its relay:
    25 ms each way.
    """
    far, gate, gpu = run.lab[FAR], run.lab[GATE], run.lab["gpu"]
    port = "7001"
    for machine in run.lab.machines.values():
        if machine not in (far, gate):
            far.drop_from(machine)
    relays = [
        gate.start(
            [sys.executable, "-m", "tests.net.relay", gate.address, from_port, target.address, to_port, "25"],
            log=run.lab.directory / f"relay to {target.name}.log",
            cwd=ROOT,
        )
        for from_port, target, to_port in (("4223", run.lab["bus"], "4222"), (port, gpu, port))
    ]
    engine = gpu.start(
        [
            *(sys.executable, "-m", "tidemill", "engine", "--bus", run.url, "--id", "behind"),
            *("--set", f"engine.port={port}", "--advertise", f"{gate.address}:{port}"),
        ],
        log=run.lab.directory / "behind.log",
        cwd=ROOT,
    )
    command = [sys.executable, "-m", "tidemill", "actor", "--bus", f"nats://{gate.address}:4223", "--id", "distant"]
    actor = far.start(command, log=run.lab.directory / "distant.log", cwd=ROOT)
    try:
        async with run.bus() as bus:
            row = await row_of(bus, "engine", "behind", lambda row: row.phase == "serving")
            assert row.address == f"http://{gate.address}:{port}"
            await row_of(
                bus,
                "actor",
                "distant",
                lambda row: row.load.get("samples_published", 0) - row.load.get("failures", 0) > 64,
            )
        for relay in relays:
            assert f"from {far.address}" in relay.log, relay.log
        assert await asyncio.to_thread(actor.end) == 0, actor.log
        assert await asyncio.to_thread(engine.end) == 0, engine.log
    finally:
        for started in (actor, engine, *relays):
            await asyncio.to_thread(started.end)
        far.receive_all()


@pytest.mark.parametrize("name", machines("bus", "node", "gpu", "router"))
async def test_a_machine_vanishes_and_returns(healed: Site, name: str) -> None:
    await _off(healed, name, 3.0)


@pytest.mark.slow
async def test_the_machine_of_the_bus_is_off_for_60_s(healed: Site) -> None:
    await _off(healed, "bus", LONG_CUT_S)


async def _off(run: Site, name: str, seconds: float) -> None:
    """Let a machine lose power, and return; no process of another machine may be replaced meanwhile."""
    async with run.bus() as bus:
        before = await complete(run, bus)
    machine = run.lab[name]
    machine.vanish()
    await asyncio.sleep(seconds)
    machine.boot()
    run.start(name)
    async with run.bus() as bus:
        report(f"{name} vanished for {seconds:g} s", await next_steps(run, bus))
        after = await complete(run, bus)
    assert {one for one in before if one[2] != name} == {one for one in after if one[2] != name}


async def test_the_books_are_right(run: Site) -> None:
    codes = await asyncio.to_thread(run.end_all_but_bus)
    assert set(codes.values()) <= {0}, (codes, run.logs())
    accounting = await run.audited()
    print(
        f"{accounting.trained} samples trained, {dict(accounting.dropped)} dropped, {accounting.duplicates} duplicates",
        file=sys.stderr,
    )
