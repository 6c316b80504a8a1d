"""A run whose processes are exchanged for those of another release, one after the other, in the middle of its steps.

The other release is the wheel of an older commit of this repository, in an environment of its own beside the packages
of this one.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.deploy.processes import Processes, alive, samples_by_actor, step_after
from tidemill.bus.streams.bus import Bus

ROOT = Path(__file__).resolve().parents[2]
OLDER = ("dbd23a305", "23c70c4a2")
"""Commits whose wheels stand for the last releases: none is published yet."""


@pytest.fixture(scope="module", params=OLDER, ids=lambda commit: commit[:8])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command ``tidemill`` of an older commit, installed from its wheel."""
    directory = tmp_path_factory.mktemp("older")
    source = directory / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", ROOT, "archive", request.param], capture_output=True)
    if archive.returncode:
        pytest.skip(f"commit {request.param[:8]} is not in this repository: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": "0.0.1"}
    python, venv = sys.executable, directory / "venv"
    build = (python, "-m", "build", "--wheel", "--outdir", directory, source)
    subprocess.run(build, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    # A line of a .pth file adds a directory, and none of its .pth files: the editable installation stays out
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (venv / "bin/nats-server").symlink_to(Path(python).with_name("nats-server"))
    install = ("-m", "pip", "--python", venv / "bin/python", "install", "--quiet", "--no-deps", "--no-compile")
    subprocess.run([python, *install, next(directory.glob("*.whl"))], check=True)
    return venv / "bin/tidemill"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
async def test_every_process_is_exchanged_for_another_release_while_the_run_goes_on(
    older: Path, tmp_path: Path, first: str, second: str
) -> None:
    """An upgrade, and the way back from it: workers first, then the learner, then the bus."""
    with Processes(tmp_path / "run", older=str(older)) as run:
        bus_process, learner = run.start("bus", release=first), run.start("learner", release=first)
        others = [run.start("engine", release=first), run.start("actor", release=first)]
        async with run.bus() as bus:
            await step_after(run, bus, 3)
            workers = await _exchanged(run, bus, others, release=second)
            done = await step_after(run, bus, 4)  # workers of the second release with the learner of the first
            await run.drain(learner)
            learner = run.start("learner", release=second)
            workers = await _exchanged(run, bus, workers, release=first)
            assert await step_after(run, bus, 4) > done  # and the other way round
            await run.drain(bus_process)
            run.start("bus", release=second)
            workers = await _exchanged(run, bus, workers, release=second)
            last = await step_after(run, bus, 4)
            for name in (learner, *workers):
                await run.drain(name)
            assert (await run.audited(bus))[-1].step >= last
            assert {name.split("-")[1] for name in await samples_by_actor(bus)} == {"old", "new"}


async def _exchanged(run: Processes, bus: Bus, workers: list[str], *, release: str) -> list[str]:
    """Start engine and actor of a release, and drain the others once these work. Returns the new ones."""
    started = [run.start("engine", release=release), run.start("actor", release=release)]
    await alive(run, bus, *started)
    for name in reversed(workers):  # the actor first: it finishes its responses
        await run.drain(name)
    return started
