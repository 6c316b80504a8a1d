"""Start, drain and stop of one process, and of supervised ones, with real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bus_fixtures import BusOpener
from tests.examples import rarely
from tests.forked import fork_child
from tests.waits import LIMIT_S, poll, until
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.system.processes import Child
from tidemill.launch.run.process import launched
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.settings.config_loader import load, to_map

ROOT = Path(__file__).resolve().parents[2]

BODY = """
import asyncio, sys
from tidemill.launch.run import process

async def main(draining):
    print("ready", flush=True)
    {body}

sys.exit(process.run(main, drain_s={drain_s}, uvloop={uvloop}, same_signal_s={same_signal_s}))
"""

HEEDING = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""Begins a program that heeds SIGHUP, whatever the tests inherited: under nohup they ignore it."""


def start(body: str, *, drain_s: float = 30, uvloop: bool = True, same_signal_s: float = 1) -> subprocess.Popen[str]:
    code = HEEDING + BODY.format(body=body, drain_s=drain_s, uvloop=uvloop, same_signal_s=same_signal_s)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("uvloop", [True, *rarely([False])])
@pytest.mark.parametrize(
    ("body", "signals", "drain_s", "code"),
    [
        ("await draining.wait()", [signal.SIGTERM], 30, 0),
        ("await draining.wait()", [signal.SIGINT], 30, 0),
        ("await draining.wait()", [signal.SIGHUP], 30, 0),
        ("await asyncio.Event().wait()", [signal.SIGTERM], 0.1, 75),
        ("draining.set(); await asyncio.Event().wait()", [], 0.1, 75),
        ("raise RuntimeError('no good')", [], 30, 1),
        ("e = RuntimeError('no good'); e.exit_code = 78; raise e", [], 30, 78),
        ("async with asyncio.TaskGroup() as g: g.create_task(asyncio.wait_for(draining.wait(), 0.01))", [], 30, 1),
        ("pass", [], 30, 0),
    ],
    ids=[
        "drained",
        "ctrl-c",
        "terminal-closed",
        "not-in-time",
        "ended-not-in-time",
        "crashed",
        "config",
        "crashed-group",
        "done",
    ],
)
def test_exit_codes(body: str, signals: list[signal.Signals], drain_s: float, code: int, uvloop: bool) -> None:
    child = start(body, drain_s=drain_s, uvloop=uvloop)
    for number in signals:
        child.send_signal(number)
    _, errors = child.communicate(timeout=LIMIT_S)
    assert child.returncode == code, errors


def test_a_crash_leaves_its_traceback_and_a_wrong_setting_nothing_but_its_message() -> None:
    crashed = start("raise KeyError('output_layer.weight')")
    _, errors = crashed.communicate(timeout=LIMIT_S)
    assert "Traceback" in errors
    assert errors.splitlines()[-1] == "error: KeyError: 'output_layer.weight'"
    refused = start("e = ValueError('learner.steps: want > 0'); e.exit_code = 78; raise e")
    _, errors = refused.communicate(timeout=LIMIT_S)
    assert errors == "error: learner.steps: want > 0\n"


def test_a_signal_that_follows_at_once_is_the_same() -> None:
    """timeout(1) does this, to the child and to its group. The drain goes on until it is done: here until a line
    arrives.
    """
    body = "await draining.wait(); print('drains', flush=True); await asyncio.to_thread(sys.stdin.readline)"
    child = start(body, drain_s=300, same_signal_s=3600)
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline() == "drains\n"
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate("go on\n", timeout=LIMIT_S)
    assert child.returncode == 0, errors


def test_a_second_signal_does_not_wait() -> None:
    child = start(
        "await draining.wait(); print('drains', flush=True); await asyncio.Event().wait()", drain_s=300, same_signal_s=0
    )
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline() == "drains\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=LIMIT_S)
    assert child.returncode == 75


def test_what_a_second_signal_cancels_has_time_for_its_cleanup() -> None:
    """A run ends its processes then (``CANCELLED_S`` of ``up``), which takes longer than one turn of the loop."""
    body = """await draining.wait(); print("drains", flush=True)
    try: await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0.5)
        print("cleaned", flush=True)"""
    child = start(body, drain_s=300, same_signal_s=0)
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None
    assert child.stdout.readline() == "drains\n"
    child.send_signal(signal.SIGTERM)
    out, errors = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out) == (75, "cleaned\n"), errors


def test_a_terminal_that_closes_twice_still_drains() -> None:
    """The kernel and the shell of a closed terminal both send SIGHUP, at any distance."""
    body = "await draining.wait(); print('drains', flush=True); await asyncio.to_thread(sys.stdin.readline)"
    child = start(body, drain_s=300, same_signal_s=0)
    child.send_signal(signal.SIGHUP)
    assert child.stdout is not None
    assert child.stdout.readline() == "drains\n"
    child.send_signal(signal.SIGHUP)
    _, errors = child.communicate("go on\n", timeout=LIMIT_S)
    assert child.returncode == 0, errors


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_the_parent_ignores_stays_ignored(number: signal.Signals) -> None:
    """By nohup; by a batch script, for the process that it ends last."""
    code = BODY.format(body="await asyncio.to_thread(sys.stdin.readline)", drain_s=0, uvloop=True, same_signal_s=1)
    ignoring = f"import signal; signal.signal({number.value}, signal.SIG_IGN)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", ignoring + code],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(number)
    _, errors = child.communicate("go on\n", timeout=LIMIT_S)
    assert child.returncode == 0, errors


@pytest.mark.parametrize(("drain_s", "code"), [(30, 0), (0, 75)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_after_the_drain_do_not_change_the_exit_code(number: signal.Signals, drain_s: float, code: int) -> None:
    """Ctrl-C, again and again: the process writes its last lines, and Python ends."""
    body = f"await (draining.wait() if {drain_s} else asyncio.Event().wait())"
    program = HEEDING + BODY.replace("sys.exit(", "code = (").format(
        body=body, drain_s=drain_s, uvloop=False, same_signal_s=1
    )
    program += "print('ended', flush=True); sys.stdin.readline(); sys.exit(code)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, **pipes)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "ended\n"
    child.send_signal(number)
    _, errors = child.communicate("go on\n", timeout=LIMIT_S)
    assert child.returncode == code, errors


async def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """After kill -9 of the parent no orphan is left: the kernel ends the child."""
    code = (
        "import asyncio, pathlib\nfrom tidemill.launch.run.process import launched\n"
        "async def main():\n"
        "    child = launched('bus', ['bus', '--config', 'launch/configs/smoke.yaml', '--set', "
        f"'directory={tmp_path}/run'],"
        f" pathlib.Path('{tmp_path}/bus.log'))\n"
        "    await child.start(); print(child.pid, flush=True); await child.wait()\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    handle = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(handle, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(handle)
    os.close(handle)


@pytest.fixture
def forked_children(fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the children of this process: a start is what other tests are about."""
    monkeypatch.setattr(Child, "spawn", fork_child)


@pytest.mark.usefixtures("forked_children")
async def test_a_process_that_keeps_failing_is_given_up_with_the_reason(tmp_path: Path) -> None:
    events: list[str] = []
    (tmp_path / "file").touch()
    supervisor = Supervisor(tmp_path, restarts=1, window_s=3600, on_event=events.append)
    with pytest.raises(GaveUp) as error:
        await supervisor.keep(
            "bus", ["bus", "--config", "launch/configs/smoke.yaml", "--set", f"directory={tmp_path}/file/run"]
        )
    assert error.value.times == 2
    assert error.value.exit_code == 1
    assert "error: NotADirectoryError: " in str(error.value), "its last lines"
    assert len(events) == 1
    assert events[0].startswith("bus ended with code 1: NotADirectoryError: ")
    assert "started again" in events[0]
    assert supervisor.restarted == {"bus": 1}


@pytest.mark.usefixtures("forked_children")
async def test_a_process_whose_settings_are_wrong_is_not_started_again(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    """No restart happens, whatever the budget: here it is the grandchild, the feeder, that finds no model."""
    events: list[str] = []
    file = tmp_path / "wrong.yaml"
    file.write_text(
        f"run: wrong\ndirectory: {tmp_path}/run\nmodel: {{path: {tmp_path}/none}}\ndata: {{path: none.jsonl}}\n"
    )
    supervisor = Supervisor(tmp_path, restarts=5, window_s=60, on_event=events.append)
    for finishes in (False, True):
        with pytest.raises(GaveUp) as error:
            await supervisor.keep(
                f"learner{finishes}", ["learner", "--config", str(file), "--bus", nats_server.url], finishes=finishes
            )
        assert str(error.value).startswith(
            f"learner{finishes}: {file}:3: model.path: want a directory with a Hugging Face model"
        )
        assert error.value.exit_code == 78
    assert events == []
    assert supervisor.restarted == {}


@pytest.mark.usefixtures("forked_children")
async def test_a_program_that_the_bus_names_is_not_run(
    tmp_path: Path, open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    supervisor = Supervisor(tmp_path, restarts=5, window_s=60)
    async with open_bus() as bus:
        config = load(
            Path("launch/configs/smoke.yaml"), [f"run={bus.run}", "engine.kind=sglang", "engine.sglang.python=/tmp/x"]
        ).config
        await bus.rows("run").put("config", to_map(config))
        with pytest.raises(GaveUp) as error:
            await supervisor.keep("engine", ["engine", "--bus", nats_server.url, "--run", bus.run])
    assert str(error.value) == (
        f"engine: run {bus.run}, row run/config: engine.sglang.python=/tmp/x names a program; not accepted "
        "from the bus unless this "
        "machine allows it: --allow engine.sglang.python=/tmp/x (or TIDEMILL_ALLOW)"
    )
    assert error.value.exit_code == 78


async def test_the_reason_is_of_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("error: of an earlier one\n")
    child = launched("config", ["config", "/no/such.yaml"], tmp_path / "log")
    await child.start()
    assert await child.wait() == 78
    assert child.reason() == ""
    assert child.last_lines().startswith("tidemill config: /no/such.yaml: want a YAML file or one of arithmetic, ")


def test_children_keep_their_bytecode_where_this_process_does_not(tmp_path: Path) -> None:
    child = launched("config", [], tmp_path / "log")
    code = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    for environment, printed in (({}, "True"), (child.environment, "False")):
        values = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
        assert subprocess.run(code, env=values, capture_output=True, text=True, check=True).stdout.strip() == printed


async def test_a_good_end_is_no_failure_and_kill_is(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, restarts=3, window_s=60, on_event=lambda text: None)
    await supervisor.keep("config", ["config", "launch/configs/smoke.yaml"], finishes=True)
    assert supervisor.restarted == {}
    supervisor.keep("bus", ["bus", "--config", "launch/configs/smoke.yaml", "--set", f"directory={tmp_path}/run"])
    first = await _running(supervisor, "bus")
    os.killpg(first, signal.SIGKILL)
    (tmp_path / "run" / "bus.url").unlink(missing_ok=True)
    second = await _running(supervisor, "bus", other_than=first)
    assert second != first
    await _until_exists(tmp_path / "run" / "bus.url")
    assert await supervisor.end(["bus"], within_s=LIMIT_S) == {"bus": 0}
    assert supervisor.running == {}


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGTERM, "ended with code 0"), (signal.SIGKILL, "killed by signal 9 (SIGKILL)")]
)
async def test_a_child_that_ends_while_it_is_needed_is_started_again(
    tmp_path: Path, number: signal.Signals, how: str
) -> None:
    """Another program ends it, or asks it to end: a stop of one container."""
    events: list[str] = []
    supervisor = Supervisor(tmp_path, restarts=3, window_s=60, on_event=events.append)
    keeper = supervisor.keep(
        "bus", ["bus", "--config", "launch/configs/smoke.yaml", "--set", f"directory={tmp_path}/run"]
    )
    await _until_exists(tmp_path / "run" / "bus.url")
    first, url = supervisor.running["bus"], (tmp_path / "run" / "bus.url").read_text()
    (tmp_path / "run" / "bus.url").unlink()
    os.kill(first, number)
    await _until_exists(tmp_path / "run" / "bus.url")
    assert supervisor.running["bus"] != first and not keeper.done()
    assert (tmp_path / "run" / "bus.url").read_text() == url, "the other processes of the run know this address"
    assert len(events) == 1 and events[0].startswith(f"bus {how}") and "started again in" in events[0], events
    assert await supervisor.end(["bus"], within_s=LIMIT_S) == {"bus": 0}
    assert len(events) == 1, "ended on purpose"


@pytest.mark.usefixtures("forked_children")
async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """No room for its log, say: here a file is where the directory should be."""
    events: list[str] = []
    (tmp_path / "logs").touch()
    supervisor = Supervisor(
        tmp_path / "logs", restarts=3, window_s=60, on_event=lambda text: (events.append(text), mend())[0]
    )

    def mend() -> None:
        """Remove the obstacle, once it has been met."""
        (tmp_path / "logs").unlink()

    await supervisor.keep("config", ["config", "launch/configs/smoke.yaml"], finishes=True)
    assert len(events) == 1 and events[0].startswith(
        "config ended with code 1: it could not be started: [Errno 17] File exists: "
    )


@pytest.mark.usefixtures("forked_children")
async def test_one_that_does_not_drain_is_killed_and_named(tmp_path: Path) -> None:
    events: list[str] = []
    supervisor = Supervisor(tmp_path, restarts=0, window_s=60, on_event=events.append)
    supervisor.keep("bus", ["bus", "--config", "launch/configs/smoke.yaml", "--set", f"directory={tmp_path}/run"])
    await _until_exists(tmp_path / "run" / "bus.url")
    os.kill(supervisor.running["bus"], signal.SIGSTOP)
    assert await supervisor.end(["bus"], within_s=0.2) == {"bus": -signal.SIGKILL}
    assert events == [f"bus did not drain within 0 s and was killed (log: {tmp_path}/bus.log)"]


async def _running(supervisor: Supervisor, name: str, other_than: int = 0) -> int:
    await _until(lambda: supervisor.running.get(name, other_than) != other_than)
    return supervisor.running[name]


async def _until_exists(path: Path) -> None:
    await _until(path.exists)


async def _until(reached: Callable[[], bool]) -> None:
    await until(reached)


async def test_a_child_that_has_just_died_can_be_asked_to_end(tmp_path: Path) -> None:
    """The process is already gone for the kernel, and not yet for the event loop."""
    child = Child("it", [], tmp_path / "log")
    child.process = await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)
    os.kill(child.pid, signal.SIGKILL)
    poll(lambda: not os.path.exists(f"/proc/{child.pid}"))  # reaped by a thread; the loop is to have no turn
    assert child.running, "the loop has had no turn"
    child.ask_to_end()
    child.send(signal.SIGKILL)
    assert await child.end(5) == -signal.SIGKILL
