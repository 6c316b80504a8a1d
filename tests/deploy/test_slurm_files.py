"""The files of `tidemill slurm`, without a cluster: whole texts beside this file (``slurm_files/``), and refusals."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.waits import LIMIT_S
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.slurm import TEMPLATES, Jobs, Place, changed_settings, files, refuse_running
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_paths import CONFIGS

GOLDEN = Path(__file__).parent / "slurm_files"
PLACE = Place(
    working_directory=Path("/home/me/my project"), programs=Path("/opt/tidemill/bin"), out=Path("runs/smoke/slurm")
)
SMALL = Jobs(counts={"engine": 1, "scorer": 0, "actor": 2})
LARGE = Jobs(
    counts={"engine": 16, "scorer": 2, "actor": 64},
    per_job={"engine": 8, "actor": 16},
    partition="gpu",
    engine_partition="spot",
    account="lab",
    time="12:00:00",
    gpus_per_node=8,
    lines={"": ["--qos=high"], "engines": ["--constraint=h100", "--exclude=bad[1-3]"]},
)
NODES = ("learner.nodes=2", "learner.data_parallel=16", "actor.reward=my reward:word", "engine.device=auto")
CASES = {"small": (SMALL, ()), "large": (LARGE, NODES)}


def config(*settings: str, jobs: Jobs = SMALL) -> RunConfig:
    """Return the configuration smoke as `tidemill slurm` completes it."""
    loaded = load([CONFIGS / "smoke.yaml"], settings, {}).config
    return load([CONFIGS / "smoke.yaml"], [*changed_settings(loaded, jobs), *settings], {}).config


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_a_run(name: str) -> None:
    jobs, settings = CASES[name]
    texts = files(config(*settings, jobs=jobs), jobs, PLACE)
    before = {file.name: file.read_text() for file in (GOLDEN / name).glob("*")}
    if not before:
        (GOLDEN / name).mkdir(parents=True)
        for file, text in texts.items():
            (GOLDEN / name / file).write_text(text)
    assert texts == before, (
        f"after an intended change: rm -r {GOLDEN / name}, run this test again and read the new files"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_shell_scripts_without_gaps(name: str) -> None:
    for file in sorted((GOLDEN / name).glob("*")):
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=LIMIT_S)
        assert re.findall("@[A-Z_]+@", file.read_text()) == [], file


def test_the_templates_are_in_the_package() -> None:
    assert {file.name for file in TEMPLATES.glob("*")} == {"head.sbatch", "workers.sbatch", "job.sh"}


def test_a_run_on_slurm_has_users_on_its_bus_and_a_port_that_stays() -> None:
    first, again = config(jobs=LARGE), config(jobs=LARGE)
    assert first.bus.auth
    assert first.bus.port == again.bus.port > 0
    assert first.bus.auth_users == 64, "one for each actor"
    assert not config("bus.insecure=true").bus.auth
    assert config("bus.port=4222").bus.port == 4222
    assert config(*NODES).learner.checkpoint.store == "shared"


@pytest.mark.parametrize(
    "setting", ["bus.url=nats://a:4222", "bus.cluster=3", "learner.nodes=0", "learner.colocated=true"]
)
def test_a_run_that_slurm_cannot_have_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        config(setting)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "3", "--per-job", "engines=2"], "--per-job engines: want a divisor of 3"),
        (["--sbatch=qos=high"], "--sbatch: want an option such as --qos=high"),
        (["--sbatch=learner:--qos=high"], "--sbatch: want an option"),
        (["--time", "1:00\n#SBATCH --uid=0"], "--time: want one word"),
        (["--engines", "-1"], "--engines: want a number from 0"),
        (["--gpus-per-node", "-1"], "--gpus-per-node: want a number from 0"),
        (["--gpus-per-node", "8", "--set", "learner.device=auto"], "--gpus-per-node: want 1, the ranks of the learner"),
        (["--submit"], "sbatch: no such program here; cure: run this on a login node"),
    ],
)
def test_a_command_that_cannot_work_says_why(
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["slurm", "smoke", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_ranks_of_a_node_may_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = ["learner.nodes=2", "learner.data_parallel=16", "learner.device=auto"]
    settings = [word for setting in ranks for word in ("--set", setting)]
    assert cli.main(["slurm", "smoke", "--gpus-per-node", "8", *settings]) == 0
    assert "--gpus-per-node=8" in (tmp_path / "runs/smoke/slurm/head.sbatch").read_text()


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program squeue that prints the first line of a file and removes it, or fails with the words behind ``!``."""
    answers, program = tmp_path / "answers", tmp_path / "squeue"
    program.write_text(
        f"#!/bin/sh\nline=$(head -n 1 {answers})\nsed -i 1d {answers}\n"
        'case "$line" in "!"*) echo "${line#!}" >&2; exit 1;; *) echo "$line";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "jobs").write_text("head 17\nengines 18\n")
    return answers


def test_jobs_that_slurm_is_ending_are_awaited(
    squeue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue.write_text("COMPLETING\n!slurm_load_jobs error: Invalid job id specified\n")
    refuse_running(tmp_path)
    assert "waits up to 120 s for the jobs that Slurm is ending: 17 18" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("RUNNING", "wait or run \\(RUNNING\\); cure: scancel 17 18"),
        ("!slurm_load_jobs error: Unable to contact slurm controller", "Unable to contact slurm controller"),
    ],
)
def test_jobs_that_may_run_are_refused(squeue: Path, tmp_path: Path, answer: str, words: str) -> None:
    squeue.write_text(f"{answer}\n")
    with pytest.raises(ValueError, match=words):
        refuse_running(tmp_path)
