"""Commands on a run that is over: they start its bus read-only, write nothing, stop it, and give way to the run
itself.
"""

import asyncio
import contextlib
import fcntl
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests import data_kit
from tests.examples import rarely
from tests.integration.test_launch_status import make_run, tidemill
from tests.launched import ROOT
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import KeptPort, parse
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError
from tidemill.bus.server import nats_server
from tidemill.bus.server.auth import ACCOUNT, credentials_file, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.server.nats_server import in_use
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.files import holder
from tidemill.launch.run import bus_process
from tidemill.launch.run.access import AUTH_DIR
from tidemill.launch.run.directory import directory_of_one
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import RunConfig


async def make_ended(root: Path, *, written: bool = True, **settings: object) -> RunConfig:
    """Make a run in ``root`` of seven samples, the last one long, with all processes ended."""
    config = RunConfig(run="over", directory=str(root), bus=BusConfig(**settings))  # type: ignore[arg-type]
    root.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    (root / bus_process.CONFIG_FILE).write_text(yaml.safe_dump(to_map(config)))
    servers = EmbeddedBus(root / "bus", config.run, config.bus, root / AUTH_DIR)
    await asyncio.to_thread(servers.start)
    try:
        line = parse(servers.url)
        if config.bus.auth:
            user, password = read_credentials(credentials_file(root / AUTH_DIR, "learner"))
            line = parse(line.line().replace("://", f"://{user}:{password}@"))
        async with connect(line.line(), config.run, config.bus, name="maker", wait_s=LIMIT_S) as bus:
            await bus.jet.retry_for_ever(bus.create_layout)
            await make_run(bus)
            long = replace(data_kit.sample(data_kit.task(9), 0), run=bus.run, response="x" * 1_000_000)
            await bus.samples.publish(long)
            await bus.rows("weights").put("head", {"version": 7, "step": 7, "epoch": 1})
    finally:
        await asyncio.to_thread(servers.stop)
    return config


def contents(root: Path) -> dict[str, bytes]:
    """Return messages and metadata of every stream, without the server's own index of them."""
    streams = root / "bus" / "store" / "jetstream" / "$G" / "streams"
    return {
        str(path.relative_to(streams)): path.read_bytes()
        for path in sorted(streams.rglob("*"))
        if (path.is_file() and path.suffix == ".blk") or path.name == "meta.inf"
    }


async def test_every_command_that_reads_answers_and_the_streams_stay_as_they_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await make_ended(run)
    before = contents(run)
    assert len(before) > 10
    wanted = {
        ("tail", "--last", "2"): "#7",
        ("tail", "--follow", "--last", "1"): "#7",
        ("show", "#1"): "trained in step 1",
        ("status",): "3 issued: 2 settled, 1 open",
        ("weights",): "newest version is 7",
        ("dead",): "no dead task",
        ("cursors",): "no reader is registered",
        ("replay", "-o", str(tmp_path / "all.tide")): "7",
        ("archive", "-o", str(tmp_path / "archive")): "",
        ("dashboard", "--export", str(tmp_path / "run.html")): "run.html",
    }
    for (command, *more), text in wanted.items():
        code, out, errors = await tidemill(command, "--run-dir", str(run), *more)
        assert code == 0, f"{command}: {errors}"
        assert text in out + errors, f"{command}: {out}"
        assert sum("the run is not running; its bus is started" in line for line in errors.splitlines()) == 1, errors
        assert not in_use(run / "bus"), f"{command} left a server"
        assert contents(run) == before, f"{command} has written"
    assert not (run / "bus.url").exists()
    assert [path.suffix for path in (tmp_path / "archive").iterdir()] == [".tide"]


async def test_commands_that_change_a_run_need_a_running_one(tmp_path: Path) -> None:
    await make_ended(tmp_path)
    for words in (("scale", "actors=2"), ("cursors", "--forget", "x"), ("dead", "drop", "1")):
        code, _, errors = await tidemill(*words, "--run-dir", str(tmp_path))
        assert code == 2
        assert "no bus is running here" in errors
    code, _, errors = await tidemill("replay", "--to-run", "x", "--run-dir", str(tmp_path))
    assert code == 2
    assert "--to-run: want --to-bus URL as well" in errors


async def test_a_server_for_reading_refuses_to_write_and_is_not_found_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would give it the port of the run, of all those that are free."""
    await make_ended(tmp_path)
    found = bus_process.EndedBus.of(tmp_path)
    assert found is not None
    with contextlib.ExitStack() as stack:
        free = stack.enter_context(KeptPort())  # so that no other process gets it
        port = str(free.number)
        (tmp_path / "bus" / "port").write_text(port)
        given = iter([free.number, 0])
        monkeypatch.setattr(nats_server, "KeptPort", lambda host, number: KeptPort(host, number or next(given)))
        line = stack.enter_context(bus_process.started(found))
        assert parse(line).servers[0].rpartition(":")[2] != port, (
            "an actor that waits for the run's bus would go to work"
        )
        async with connect(line, found.run, name="look", wait_s=60) as bus:
            assert (await bus.samples.info()).messages == 7
            with pytest.raises(BusError):
                await bus.rows("run").put("config", {})
        with pytest.raises(BusError):
            async with connect(parse(line).servers[0], found.run, name="stranger", wait_s=1):
                pass
    assert (tmp_path / "bus" / "port").read_text() == port


async def test_a_run_with_users_and_an_address_that_was_left_behind(tmp_path: Path) -> None:
    await make_ended(tmp_path, auth=True, auth_users=1)
    (tmp_path / "bus.url").write_text("nats://127.0.0.1:1")  # as after a kill of all processes
    assert (tmp_path / "bus" / "store" / "jetstream" / ACCOUNT).is_dir()
    code, out, errors = await tidemill("tail", "--run-dir", str(tmp_path), "--jsonl", "--last", "1")
    assert code == 0, errors
    assert json.loads(out)["seq"] == 7


@pytest.mark.slow
async def test_the_streams_of_a_cluster_can_be_read_too(tmp_path: Path) -> None:
    await make_ended(tmp_path, cluster=3)
    code, out, errors = await tidemill("tail", "--run-dir", str(tmp_path), "--jsonl", "--last", "1")
    assert code == 0, errors
    assert json.loads(out)["seq"] == 7


async def test_the_second_of_two_reading_commands_names_the_first(tmp_path: Path) -> None:
    await make_ended(tmp_path)
    first = await looker(tmp_path)
    code, _, errors = await tidemill("tail", "--run-dir", str(tmp_path))
    first.kill()
    await first.communicate()
    await asyncio.to_thread(wait_until_free, tmp_path)  # its server ends behind it
    assert code == 2
    assert f"process {first.pid} reads this run; end it first" in errors
    code, out, errors = await tidemill("tail", "--run-dir", str(tmp_path), "--jsonl", "--last", "1")
    assert (code, json.loads(out)["seq"]) == (0, 7), errors


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, *rarely([signal.SIGINT])])
async def test_the_server_of_a_reading_command_ends_with_it_however_it_ends(
    tmp_path: Path, how: signal.Signals
) -> None:
    await make_ended(tmp_path)
    look = await looker(tmp_path)
    look.send_signal(how)
    await look.communicate()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.to_thread(wait_until_free, tmp_path)


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
async def test_a_resumed_run_takes_its_bus_back_from_a_reading_command(
    tmp_path: Path, interrupt: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a look from a script in the background, where shells ignore SIGINT."""
    monkeypatch.setattr(nats_server, "_STOP_S", LIMIT_S)
    config = await make_ended(tmp_path)
    look = await looker(tmp_path, interrupt)
    servers = EmbeddedBus(tmp_path / "bus", config.run, config.bus, tmp_path / AUTH_DIR)
    try:
        url = await asyncio.to_thread(servers.start)
        _, errors = await look.communicate()
        assert b"ended by SIGTERM: the run was started again; repeat the command" in errors
        assert look.returncode == 2
        (tmp_path / "bus.url").write_text(url)
        code, out, words = await tidemill("tail", "--run-dir", str(tmp_path), "--jsonl", "--last", "1")
        assert (code, json.loads(out)["seq"], words) == (0, 7, ""), "the bus of the run itself is used"
    finally:
        await asyncio.to_thread(servers.stop)


@pytest.mark.parametrize("fresh", [True, *rarely([False])])
async def test_a_directory_in_which_up_starts_is_not_read(
    tmp_path: Path, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the earlier run must not write into the new files."""
    monkeypatch.setattr(nats_server, "_STOP_S", LIMIT_S)
    await make_ended(tmp_path)
    look = await looker(tmp_path)
    with directory_of_one(tmp_path, resume=not fresh, fresh=fresh):
        assert not holder(tmp_path / "bus")
        assert (tmp_path / "bus").exists() is not fresh
    _, errors = await look.communicate()
    assert b"repeat the command" in errors


async def test_a_closed_output_pipe_ends_a_reading_command(tmp_path: Path) -> None:
    await make_ended(tmp_path)
    command = (
        f"{sys.executable} -m tidemill tail --run-dir {tmp_path} --jsonl --last 6 | head -c 1 > /dev/null; exit "
        f"${{PIPESTATUS[0]}}"
    )
    child = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=ROOT, stderr=subprocess.PIPE)
    await child.communicate()
    assert child.returncode == 0
    assert not in_use(tmp_path / "bus")


async def looker(root: Path, interrupt: signal.Handlers = signal.SIG_DFL) -> asyncio.subprocess.Process:
    """Start a command that looks at an ended run and blocks: its output is not read, as behind a pager."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidemill", "tail", "--run-dir", str(root), "--full"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
    )
    assert child.stdout is not None
    await child.stdout.readexactly(1)
    return child


def wait_until_free(root: Path) -> None:
    with (root / "bus" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
