"""The run's directory belongs to one `up` at a time, and `up` removes only directories that it has made."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.refusals import refusal
from tidemill.launch.cli.main import main
from tidemill.launch.run.directory import LOCK_FILE, CannotBegin, directory_of_one
from tidemill.launch.run.up import CONFIG_FILE

ROOT = Path(__file__).resolve().parents[2]
HOLDS_IT = """
import sys, pathlib
from tidemill.launch.run.directory import directory_of_one
with directory_of_one(pathlib.Path(sys.argv[1]), resume=False, fresh=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def opened(root: Path, *, resume: bool = False, fresh: bool = False) -> None:
    with directory_of_one(root, resume=resume, fresh=fresh):
        (root / CONFIG_FILE).write_text("{}")
        (root / "bus").mkdir(exist_ok=True)
        (root / "bus" / "data").write_text("streams")


def test_a_run_is_never_begun_over_another(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "r"
    opened(root)
    with pytest.raises(CannotBegin, match=r"--resume.*--fresh"):
        opened(root)
    opened(root, resume=True)
    assert (root / "bus" / "data").exists()


def test_fresh_leaves_nothing_of_the_old_run(tmp_path: Path) -> None:
    opened(tmp_path / "r")
    with directory_of_one(tmp_path / "r", resume=False, fresh=True):
        assert [path.name for path in (tmp_path / "r").iterdir()] == [LOCK_FILE]


def test_fresh_removes_no_foreign_directory_and_no_target_of_a_link(tmp_path: Path) -> None:
    strange, kept = tmp_path / "strange", tmp_path / "kept"
    for directory in (strange, kept):
        directory.mkdir()
        (directory / "thesis.tex").write_text("years of work")
    with refusal(CannotBegin, place="--fresh"):
        opened(strange, fresh=True)
    opened(tmp_path / "r")
    (tmp_path / "r" / "final").symlink_to(kept)
    opened(tmp_path / "r", fresh=True)
    assert (strange / "thesis.tex").exists()
    assert (kept / "thesis.tex").exists()


def test_a_start_that_was_cut_short_can_be_begun_again(tmp_path: Path) -> None:
    """The start was killed between the directory and its configuration: there are logs and a lock, and no more."""
    with directory_of_one(tmp_path / "r", resume=False, fresh=False):
        (tmp_path / "r" / "logs").mkdir()
    opened(tmp_path / "r", fresh=True)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with refusal(CannotBegin, place="--resume"):
        opened(tmp_path / "r", resume=True)
    assert not (tmp_path / "r").exists()


def test_a_directory_in_use_is_not_touched_until_its_process_is_gone(tmp_path: Path) -> None:
    """The lock also ends with kill -9: the kernel releases it."""
    root = tmp_path / "r"
    command = [sys.executable, "-c", HOLDS_IT, str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (root / CONFIG_FILE).write_text("{}")
        for how in ({"fresh": True}, {"resume": True}, {}):
            with pytest.raises(CannotBegin, match=rf"process {holder.pid}.*is running"):
                opened(root, **how)
        assert (root / CONFIG_FILE).exists()
        holder.kill()
    opened(root, fresh=True)


def test_a_checkpoint_to_begin_with_is_not_thrown_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "r" / "checkpoints" / "step-500-epoch-3"
    checkpoint.mkdir(parents=True)
    for file in ("manifest.json", "common.pt"):
        (checkpoint / file).touch()
    smoke = Path(__file__).resolve().parents[2] / "launch" / "configs" / "smoke.yaml"
    command = [
        "up",
        str(smoke),
        "--fresh",
        "--set",
        f"directory={tmp_path / 'r'}",
        "--from-checkpoint",
        str(checkpoint),
    ]
    assert main(command) == 2
    assert (
        f"--fresh: would remove the checkpoint to begin with, {checkpoint}; set another directory"
        in capsys.readouterr().err
    )
    assert checkpoint.exists()
