"""A machine with the actor's packages alone: its wheel in an environment of its own, and a group of
samples made by it.
"""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actor_kit import (
    all_samples,
    complete,
    engine,
    issue,
    model_dir,
    prompt_tokens,
    samples_until,
    settled,
    take_over,
)
from tests.built import ROOT, build, environment, wheel
from tests.bus_fixtures import BusOpener
from tidemill.bus import exit_codes
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus

pytestmark = pytest.mark.slow
"""Installation takes a minute or two."""
HEAVY = {
    "torch",
    "megatron-core",
    "mbridge",
    "transformers",
    "tokenizers",
    "matplotlib",
    "pyarrow",
    "pyzmq",
    "safetensors",
}


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


@pytest.fixture(scope="module")
def actor_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``bin`` of an environment with ``tidemill[actor]`` from the wheel."""
    directory = tmp_path_factory.mktemp("actor")
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    python = directory / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    done = subprocess.run(
        [*install, f"{wheel(build(directory))}[actor]"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return python.parent


def test_an_actor_install_has_none_of_the_heavy_packages(actor_environment: Path) -> None:
    code = "import importlib.metadata as m; print(*(d.metadata['Name'].lower() for d in m.distributions()))"
    done = subprocess.run(
        [actor_environment / "python", "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    installed = set(done.stdout.split())
    assert {"tidemill", "nats-py", "numpy"} <= installed
    assert not installed & HEAVY


async def test_an_actor_install_leases_a_task_and_publishes_its_samples(
    actor_environment: Path, open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The user's command runs against a real bus and a real engine; then ``tail`` of the same environment shows the
    samples.
    """
    async with open_bus() as bus, engine(bus):
        await bus.rows("run").put("config", {"actor": {"reward": "digits"}, "bus": {}})
        tasks = await issue(bus, await take_over(bus))
        on_bus = ("--bus", nats_server.url, "--run", bus.run)
        actor = await asyncio.create_subprocess_exec(
            actor_environment / "tidemill", "actor", *on_bus, "--id", "installed", cwd=tmp_path, env=environment()
        )
        try:
            await _made_by(actor, bus, tasks)
            await settled(bus)
            actor.send_signal(signal.SIGTERM)
            assert await actor.wait() == exit_codes.DONE
        finally:
            if actor.returncode is None:
                actor.kill()
                await actor.wait()
        samples = await all_samples(bus)
        assert [sample.actor for sample in samples] == ["installed"] * 4
        tail = await asyncio.create_subprocess_exec(
            actor_environment / "tidemill",
            "tail",
            *on_bus,
            cwd=tmp_path,
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
        )
        shown, _ = await tail.communicate()
        assert tail.returncode == exit_codes.DONE
        assert shown.count(b"installed") == 4


async def _made_by(actor: asyncio.subprocess.Process, bus: Bus, tasks: list[int]) -> None:
    """Wait until all samples are stored; an actor that ends earlier fails the test at once."""
    making, ended = asyncio.create_task(samples_until(bus, complete(tasks))), asyncio.create_task(actor.wait())
    try:
        await asyncio.wait((making, ended), return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"the actor ended with code {actor.returncode}"
        making.result()
    finally:
        making.cancel()
        ended.cancel()
        await asyncio.gather(making, ended, return_exceptions=True)


def test_a_learner_without_its_packages_names_the_extra_to_install(actor_environment: Path, tmp_path: Path) -> None:
    words = ["learner", "--config", "digits", "--bus", "nats://127.0.0.1:1"]
    done = subprocess.run(
        [actor_environment / "tidemill", *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == exit_codes.CONFIG
    assert done.stderr.startswith(
        "tidemill learner: want the packages of tidemill[learner], got none of the name torch, megatron,"
    )
    assert "pip install 'tidemill[learner]'" in done.stderr
