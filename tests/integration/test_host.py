"""`tidemill host`, with real processes: the desired number of actors, never two of one name, through kills of any
process.
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tests.forked import Forked
from tests.launched import tidemill
from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tests.whole.prepared import put_prepared
from tests.whole.running import SMOKE
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.auth import credentials_file
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.rows import LiveRow, NodeRow
from tidemill.launch.cli.main import main
from tidemill.launch.run import desired, host
from tidemill.launch.run.host import SETTLE_S, HostLearner
from tidemill.launch.run.supervisor import Supervisor
from tidemill.launch.settings.config_loader import from_map
from tidemill.learner.nodes.rows import node_of

pytestmark = pytest.mark.usefixtures("fork_server")

Hosts = Callable[..., "RunningHost"]


class RunningHost:
    """A `tidemill host` and its log."""

    def __init__(self, process: Forked, log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, LIMIT_S)


@pytest.fixture
def hosts(nats_server: EmbeddedServer, tmp_path: Path) -> Iterator[Hosts]:
    """Return a function: ``hosts("name", "actors=2", "--pool", "p")`` starts one; each is ended with the test."""
    with ExitStack() as stack:

        def start(name: str, *arguments: str, directory: str = "") -> RunningHost:
            return stack.enter_context(_running(nats_server.url, name, tmp_path, directory or name, arguments))

        yield start


@contextmanager
def _running(url: str, name: str, tmp_path: Path, directory: str, arguments: tuple[str, ...]) -> Iterator[RunningHost]:
    log = tmp_path / f"{directory}.log"
    words = ("host", "--bus", url, "--name", name, "--dir", str(tmp_path / directory), "--drain", "20", *arguments)
    process = tidemill(*words, output=log)
    try:
        yield RunningHost(process, log)
    finally:
        process.kill()
        process.wait()


async def configured(bus: Bus, **actor: Any) -> None:
    """Write the run's config row with the actors' settings, as a learner does."""
    await bus.rows("run").put("config", {"actor": {"reward": "digits", **actor}})


LOOK_S = 0.5
"""Seconds between two looks at rows that no write has announced: of a process that died without one."""


async def rows_until(bus: Bus, role: str, enough: Callable[[list[LiveRow]], bool]) -> list[LiveRow]:
    """Wait until the rows of a role fit, woken by each write of one, and return them. (Bounded by the test's own
    limit.)
    """
    waiter, view = Waiter(), LiveView(bus)
    async with view.on_change(role, waiter.wake):
        while True:
            rows = [row for row, _ in await view.refresh(role)]
            if enough(rows):
                return rows
            await waiter.wait(LOOK_S)


def living(rows: list[LiveRow]) -> dict[str, int]:
    """Return the rows' processes that are alive: id -> process id."""
    return {row.id: row.pid for row in rows if alive(row.pid)}


async def actors(bus: Bus) -> dict[str, int]:
    return living(await rows_until(bus, "actor", lambda rows: True))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def gone(*pids: int) -> None:
    await until(lambda: not any(alive(pid) for pid in pids))  # another process has no event here


async def until_actors(bus: Bus, *names: str) -> dict[str, int]:
    """Wait until exactly these actors are alive, each by its own row."""
    return living(await rows_until(bus, "actor", lambda rows: sorted(living(rows)) == sorted(names)))


async def host_row(bus: Bus, name: str, what: Callable[[LiveRow], bool]) -> LiveRow:
    rows = await rows_until(bus, "host", lambda rows: any(row.id == name and what(row) for row in rows))
    return next(row for row in rows if row.id == name)


async def test_a_host_runs_the_desired_numbers_and_drains(open_bus: BusOpener, hosts: Hosts) -> None:
    async with open_bus() as bus:
        await configured(bus)
        host = hosts("h", "--run", bus.run)
        await host_row(bus, "h", lambda row: True)
        await desired.change(bus, desired.ALL, {"actor": 3})
        first = await until_actors(bus, "actor-h-0", "actor-h-1", "actor-h-2")
        await desired.change(bus, desired.ALL, {"actor": 1})
        left = await until_actors(bus, "actor-h-0")
        assert left["actor-h-0"] == first["actor-h-0"], "the oldest stays"
        await desired.change(bus, desired.ALL, {"actor": 2})
        await until_actors(bus, "actor-h-0", "actor-h-1")
        await host_row(bus, "h", lambda row: row.load.get("actors_wanted") == 2)
        await desired.change(bus, desired.ALL, {"actor": 1})
        await host_row(bus, "h", lambda row: row.load.get("actors_wanted") == 1)
        await desired.change(bus, desired.ALL, {"actor": 2})  # scaled up while one drains: never two of one name
        await host_row(bus, "h", lambda row: row.load["draining"] == 0 and row.load["actors"] == 2)
        await desired.change(bus, desired.ALL, {"actor": 1})
        await until_actors(bus, "actor-h-0")
        for how in (signal.SIGKILL, signal.SIGTERM):  # an actor that ended with code 0 is restarted, too
            os.kill(left["actor-h-0"], how)
            await gone(left["actor-h-0"])
            left = await until_actors(bus, "actor-h-0")
        host.process.send_signal(signal.SIGTERM)
        assert await host.ended() == 0, host.log
        assert await actors(bus) == {}
        assert await LiveView(bus).refresh("host") == [], "it leaves no row behind"


async def test_a_host_that_is_there_before_the_run_waits_for_its_streams(open_bus: BusOpener, hosts: Hosts) -> None:
    async with open_bus(layout=False) as bus:
        host = hosts("h", "--run", bus.run, "actors=1")
        await until(lambda: (f"waiting for the streams of run {bus.run}") in host.log)  # a log file has no event here
        await bus.create_layout()
        await configured(bus)
        await until_actors(bus, "actor-h-0")


async def test_a_killed_host_takes_its_children_with_it_and_a_restart_doubles_nothing(
    open_bus: BusOpener, hosts: Hosts
) -> None:
    async with open_bus() as bus:
        await configured(bus)
        host = hosts("h", "--run", bus.run, "actors=2")
        before = await until_actors(bus, "actor-h-0", "actor-h-1")
        host.process.kill()
        await host.ended()
        await gone(*before.values())
        hosts("h", "--run", bus.run)
        after = await until_actors(bus, "actor-h-0", "actor-h-1")
        assert not set(before.values()) & set(after.values())


async def test_a_second_host_of_a_name_is_refused(open_bus: BusOpener, hosts: Hosts) -> None:
    async with open_bus() as bus:
        await configured(bus)
        hosts("h", "--run", bus.run, "actors=1")
        there = await until_actors(bus, "actor-h-0")
        here, elsewhere = hosts("h", "--run", bus.run), hosts("h", "--run", bus.run, directory="elsewhere")
        assert await here.ended() == await elsewhere.ended() == 2
        assert "host h is running in" in here.log
        assert f"host h of run {bus.run} is running on" in elsewhere.log
        assert await actors(bus) == there


async def test_a_process_that_cannot_run_is_given_up_with_the_reason_until_the_numbers_change(
    open_bus: BusOpener, hosts: Hosts
) -> None:
    async with open_bus() as bus:
        await configured(bus, reward="nobody.knows:it")
        host = hosts("h", "--run", bus.run, "actors=1", "--allow", "actor.reward=nobody.*")
        row = await host_row(bus, "h", lambda row: "given up" in row.waits_for)
        assert (
            row.waits_for
            == "actor-h-0 given up: reward 'nobody.knows:it': cannot import nobody.knows: No module named 'nobody'"
        )
        await until(
            lambda: (
                "ERROR   host h: tidemill.launch.run.host: actor-h-0: reward 'nobody.knows:it': cannot import"
                in host.log
            )
        )
        assert row.load["restarted"] == 0, "no restart could cure it"
        assert row.load["actors"] == 0
        await configured(bus)
        await desired.change(bus, desired.host_key("h"), {"actor": 2})
        await until_actors(bus, "actor-h-0", "actor-h-1")
        await host_row(bus, "h", lambda row: row.waits_for == "")


async def test_a_process_with_a_wrong_password_is_started_again_when_its_file_changes(
    open_bus: BusOpener, hosts: Hosts, tmp_path: Path
) -> None:
    file = tmp_path / "users" / "actor-0.env"
    file.parent.mkdir()
    file.write_text("TIDEMILL_BUS_USER=actor-0\n")
    async with open_bus() as bus:
        await configured(bus)
        hosts("h", "--run", bus.run, "--users", str(file.parent), "actors=1")
        await host_row(bus, "h", lambda row: "actor-0 given up: " in row.waits_for)
        file.write_text("TIDEMILL_BUS_USER=actor-0\nTIDEMILL_BUS_PASSWORD=new\n")
        await until_actors(bus, "actor-0")
        await host_row(bus, "h", lambda row: row.waits_for == "")


async def test_code_that_the_bus_names_is_not_run_unless_the_host_allows_it(open_bus: BusOpener, hosts: Hosts) -> None:
    async with open_bus() as bus:
        await configured(bus, reward="tests.poison:ones")
        hosts("h", "--run", bus.run, "actors=1")
        row = await host_row(bus, "h", lambda row: "given up" in row.waits_for)
        assert "actor.reward=tests.poison:ones names code" in row.waits_for
        assert "--allow actor.reward=tests.poison:ones" in row.waits_for
        hosts("allowing", "--run", bus.run, "actors=1", "--allow", "actor.reward=tests.*")
        await until_actors(bus, "actor-allowing-0")


async def test_hosts_share_a_total_and_take_over_from_one_that_dies(open_bus: BusOpener, hosts: Hosts) -> None:
    async with open_bus() as bus:
        await configured(bus)
        await desired.change(bus, desired.pool_key("p"), {"actor": 3})
        hosts("a", "--run", bus.run, "--pool", "p")
        await until_actors(bus, "actor-a-0", "actor-a-1", "actor-a-2")
        second = hosts("b", "--run", bus.run, "--pool", "p")
        await until_actors(bus, "actor-a-0", "actor-a-1", "actor-b-0")
        second.process.kill()
        await until_actors(bus, "actor-a-0", "actor-a-1", "actor-a-2")


async def test_without_the_bus_a_host_changes_nothing(
    open_bus: BusOpener, hosts: Hosts, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus:
        await configured(bus)
        hosts("a", "--run", bus.run)
        hosts("b", "--run", bus.run)
        await host_row(bus, "a", lambda row: True)
        await host_row(bus, "b", lambda row: True)
        await desired.change(bus, desired.ALL, {"actor": 2})
        before = await until_actors(bus, "actor-a-0", "actor-b-0")
        nats_server.kill()
        await asyncio.sleep(6)  # longer than the time after which a host counts as dead
        nats_server.start()
        await bus.wait_connected(LIMIT_S)
        for name in ("a", "b"):
            await host_row(bus, name, lambda row: row.load.get("actors_wanted") == 1.0)
        await asyncio.sleep(SETTLE_S + 2)  # by then they look at the numbers again
        assert await actors(bus) == before, "none started, none ended"


async def test_after_a_short_outage_a_host_waits_for_the_rows_of_the_others(
    open_bus: BusOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of three seconds ends well, and yet every other host may have been silent for as long as a dead one."""
    clock, looks, reconciled, draining = [100.0], 0, list[float](), asyncio.Event()
    read = desired.read

    async def late(bus: Bus) -> desired.DesiredRoles:
        nonlocal looks
        looks += 1
        clock[0] += 3.0 if looks == 3 else 0.5  # as long as this read takes
        return await read(bus)

    monkeypatch.setattr(desired, "read", late)
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(host, "LOOK_EVERY_S", 0.01)
    async with open_bus() as bus:
        supervisor = Supervisor(tmp_path, restarts=0, window_s=60, on_event=lambda text: None)
        one = host.Host(bus, supervisor, desired.LiveHost("a", ""), arguments=lambda role, id: [], drain_s=1)
        monkeypatch.setattr(one, "reconcile", lambda counts, revision: reconciled.append(clock[0]))
        running = asyncio.create_task(one.run(draining))
        await until(lambda: len(reconciled) >= 4)
        draining.set()
        await running
    assert reconciled[:2] == [100.5, 101.0], "before"
    assert reconciled[2:4] == [104.0 + SETTLE_S, 104.5 + SETTLE_S], (
        "and when all others have had the time to write their rows"
    )


async def node_row(bus: Bus, what: Callable[[NodeRow], bool]) -> NodeRow:
    """Wait for a row of node 1's agent that fits."""
    found = await row_until(bus.rows("run"), "node.1", lambda value: what(node_of("node.1", value)))
    return node_of("node.1", found)


async def test_a_host_keeps_the_agent_of_its_node_and_drains_it(
    open_bus: BusOpener, hosts: Hosts, tmp_path: Path
) -> None:
    """The other node is never there: the agent waits for it."""
    put_prepared(SMOKE, tmp_path / "run")
    async with open_bus() as bus:
        settings = (
            f"run={bus.run}",
            f"directory={tmp_path / 'run'}",
            "learner.nodes=2",
            "learner.data_parallel=2",
            "bus.lease_s=30",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        host = hosts("h", "--learner-node", "1", "--config", str(SMOKE), *words)
        first = await node_row(bus, lambda row: "node 0" in row.waits_for)
        os.kill(first.pid, signal.SIGKILL)
        again = await node_row(bus, lambda row: row.pid != first.pid and "node 0" in row.waits_for)
        await host_row(bus, "h", lambda row: row.load["restarted"] == 1)
        host.process.send_signal(signal.SIGTERM)
        assert await host.ended() == 0, host.log
        assert not alive(again.pid) and await bus.rows("run").keys("node") == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "learner.nodes=2"], "--config, --set: want --learner-node R"),
        (["--learner-node", "1"], "--learner-node: want --config FILE"),
        (["--learner-node", "0", "--config", str(SMOKE)], r"want learner\.nodes > 1, got 1"),
        (["--learner-node", "2", "--config", str(SMOKE), "--set", "learner.nodes=2"], "--node-rank: want 0 to 1"),
        (
            ["--learner-node", "1", "--config", str(SMOKE), "--set", "learner.nodes=2", "--run", "other"],
            "--run: want smoke, .*, got other",
        ),
    ],
)
def test_a_node_that_a_host_cannot_run_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    more = ["--set", "learner.data_parallel=2"] if "--set" in words else []
    assert main(["host", "--bus", "nats://127.0.0.1:1", "--dir", str(tmp_path), *words, *more]) in (2, 78)
    assert re.search(why, capfd.readouterr().err)


def test_credentials_of_the_learner_are_wanted_beside_those_of_the_hosts_processes(tmp_path: Path) -> None:
    config = from_map({"run": "r"}, "test")
    with refusal(ValueError, place="--users", got="none"):
        HostLearner(config=config, rank=0, arguments=(), users=tmp_path)
    credentials_file(tmp_path, "learner").touch()
    HostLearner(config=config, rank=0, arguments=(), users=tmp_path)
