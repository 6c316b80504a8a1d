"""`tidemill up` and the scripts as a user calls them: errors appear at once, and a drained run is not reported as
done.
"""

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import data_kit
from tests.bus_fixtures import BusOpener
from tests.check_kit import write_model, write_prompts
from tests.forked import Forked
from tests.launched import Ended, run_tidemill, tidemill
from tests.refusals import refusal
from tests.unhurried import UNHURRIED
from tests.waits import LIMIT_S, turn, until
from tests.whole.running import ROOT, SMOKE, UP_LIMIT_S, live, until_step, up
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.run.up import Up, with_bus
from tidemill.launch.settings.config_loader import load

pytestmark = pytest.mark.usefixtures("fork_server")
SCRIPTS = ROOT / "launch" / "scripts"
Script = Callable[[str, Path, dict[str, str]], AbstractContextManager[Any]]


def run_up(tmp_path: Path, *settings: str) -> Ended:
    """Run `tidemill up` with an existing model and prompts, and nothing else."""
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl")
    inputs = ("prepare=null", f"model.path={tmp_path}/model", f"data.path={tmp_path}/prompts.jsonl")
    words = [word for setting in (f"directory={tmp_path}/run", *inputs, *settings) for word in ("--set", setting)]
    return run_tidemill("up", str(SMOKE), *words)


@pytest.mark.parametrize(
    ("settings", "code", "complaint"),
    [
        (["model.path=no/model"], 78, "model.path: want a directory with a Hugging Face model"),
        (["data.path=no/prompts.jsonl"], 78, "no/prompts.jsonl: want a file of prompts, got no such file"),
        (["prepare.task=copy", "model.path=''", "data.path=''"], 78, "they were not made by this program"),
        (["bus.host=203.0.113.1", "bus.insecure=true"], 1, "bus ended with code"),
    ],
    ids=["no-model", "no-prompts", "prepare", "bus"],
)
def test_errors_before_the_start_are_printed_on_the_terminal(
    tmp_path: Path, settings: list[str], code: int, complaint: str
) -> None:
    (tmp_path / "run" / "prepared" / "model").mkdir(parents=True)  # not made by prepare, which refuses it
    result = run_up(tmp_path, *settings, "up.restarts=0")
    assert result.returncode == code, result.output
    assert complaint in result.output, result.output


def test_a_bus_that_holds_a_run_of_this_name_is_not_trained_into(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    """An external bus outlives the directory that --fresh deletes."""

    async def leave_a_run() -> None:
        async with connect(nats_server.url, "smoke", BusConfig(lease_s=10), name="test") as bus:
            await bus.create_layout()
            await bus.tasks.fence(1)
            await bus.tasks.issue(data_kit.task(1, run="smoke"))

    asyncio.run(leave_a_run())
    result = run_up(tmp_path, f"bus.url={nats_server.url}")
    assert result.returncode == 2, result.output
    assert "has a run named smoke already" in result.out


@contextlib.contextmanager
def executed(name: str, tmp_path: Path, settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Execute a script."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / f"{name}.log").open("wb") as log:
        environment = {**os.environ, "PATH": path, **settings}
        process = subprocess.Popen(
            ["bash", str(SCRIPTS / f"{name}.sh")], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def forked(name: str, tmp_path: Path, settings: dict[str, str]) -> Iterator[Forked]:
    """Run the commands of a script, which a `tidemill` that prints its words shows: all but the last to their ends."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    shown = tmp_path / "bin" / "tidemill"
    shown.write_text("#!/bin/sh\nprintf '%s\\037' \"$@\"\necho\n")
    shown.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **settings}
    lines = subprocess.check_output(["bash", str(SCRIPTS / f"{name}.sh")], cwd=ROOT, env=environment, text=True)
    *before, last = [line.split("\037")[:-1] for line in lines.splitlines()]
    for words in before:
        done = run_tidemill(*words)
        assert done.returncode == 0, done.output
    process = tidemill(*last, output=tmp_path / f"{name}.log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_children_that_end_or_stop_while_they_are_needed_are_on_the_terminal(tmp_path: Path) -> None:
    """The bus is drained by another program, then its server is frozen; at last the learner is drained, and the run
    with it.
    """

    async def shown(text: str) -> None:
        """Wait until the terminal shows the text. (Bounded by the test's own limit.)"""
        await until(lambda: text in run.log or run.process.returncode is not None)
        assert text in run.log, run.log

    with up(tmp_path, "learner.steps=5000", UNHURRIED) as run:
        async with run.bus() as bus:
            await until_step(bus, 1)
            keeper = Path(f"{run.directory}/logs/up.log").read_text().partition("process=bus pid=")[2].split()[0]  # noqa: ASYNC240
            os.kill(int(keeper), signal.SIGTERM)
            await shown("bus ended with code 0; started again in ")
            server = (await live(bus, "bus")).pid
            os.kill(server, signal.SIGSTOP)
            await shown(f"(process {server}) is stopped by a signal (SIGSTOP)")
            await shown(" s   the bus has not answered for ")
            os.kill(server, signal.SIGCONT)
            await shown("the bus answers again (the bus has not answered for ")
            await until_step(
                bus, max([record.step async for _, record in bus.plans.scan() if isinstance(record, Done)]) + 1
            )
            os.kill((await live(bus, "learner")).pid, signal.SIGTERM)
        assert await asyncio.to_thread(run.wait) == 0, run.log
    assert "the learner was drained by a signal of another program, so the run is drained" in run.log
    assert "the learner drained at step" in run.log
    assert f"tidemill up {run.directory}/config.yaml --resume" in run.log
    assert json.loads((run.directory / "summary.json").read_text())["ended_by"] == "drained"
    assert not (run.directory / "bus.url").exists()


@pytest.mark.parametrize("script", [forked, pytest.param(executed, marks=pytest.mark.slow)])
async def test_the_scripts_make_a_run_in_any_order(tmp_path: Path, script: Script) -> None:
    """They are given the bus's address, and started with the actor first: each waits for its dependencies.

    Forked: the commands of the scripts; executed: the scripts themselves.
    """
    config = tmp_path / "smoke.yaml"
    config.write_text(SMOKE.read_text() + f"directory: {tmp_path}/run\n")
    with KeptPort() as kept:
        port = kept.number
        settings = {"CONFIG": str(config), "BUS": f"nats://127.0.0.1:{port}", "RUN": "smoke", "PORT": str(port)}
        only_bus = {name: value for name, value in settings.items() if name != "RUN"}
        with script("actor", tmp_path, only_bus) as actor, script("engine", tmp_path, settings) as engine:
            with script("learner", tmp_path, settings) as learner, script("bus", tmp_path, settings) as bus:
                await until(lambda: (tmp_path / "run" / "bus.url").exists())
                async with connect(settings["BUS"], "smoke", name="test") as found:
                    loaded = Path(f"/proc/{(await live(found, 'feeder')).pid}/maps").read_text()  # noqa: ASYNC240
                assert script is forked or ("tokenizers" in loaded and "libtorch" not in loaded), (
                    "the feeder needs transformers' tokenizers, and no torch"
                )
                assert await asyncio.to_thread(learner.wait, UP_LIMIT_S) == 0, (tmp_path / "learner.log").read_text()
                for process, name in ((actor, "actor"), (engine, "engine"), (bus, "bus")):
                    process.send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(process.wait, LIMIT_S) == 0, (tmp_path / f"{name}.log").read_text()
    assert (tmp_path / "run" / "final" / "config.json").exists()


async def test_processes_not_drained_in_time_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 8}')
    (tmp_path / "prompts.jsonl").touch()
    sets = [f"directory={tmp_path}/run", "run=r", f"model.path={tmp_path}", f"data.path={tmp_path}/prompts.jsonl"]
    run = Up(load([], sets).config, Console(file=io.StringIO()), resume=False)
    work = asyncio.create_task(run.run(asyncio.Event()))
    await until(lambda: "bus" in run.supervisor.running)
    work.cancel()  # as at the second SIGTERM, and at the deadline
    with pytest.raises(asyncio.CancelledError):
        await work
    assert run.failure == "not drained in time; still running: bus"
    assert run.supervisor.running == {}


@pytest.mark.parametrize("given_up", [False, True])
async def test_an_audit_does_not_wait_for_ever_for_a_bus_that_is_gone(
    tmp_path: Path, nats_server: EmbeddedServer, open_bus: BusOpener, given_up: bool
) -> None:
    """An external bus is away for too long, or the supervisor gives up the one of this machine."""
    supervisor = Supervisor(tmp_path, restarts=0, window_s=60)
    async with open_bus() as bus:
        if given_up:
            (tmp_path / "file").touch()
            supervisor.keep("bus", ["bus", "--config", str(SMOKE), "--set", f"directory={tmp_path}/file/run"])
        nats_server.kill()
        with refusal(GaveUp, name="bus") if given_up else refusal(BusUnavailable, reason=re.compile("not connected")):
            await with_bus(asyncio.Event().wait(), bus, supervisor, away_s=3600 if given_up else 0.1)
        await with_bus(turn(), bus, Supervisor(tmp_path, restarts=0, window_s=60))
