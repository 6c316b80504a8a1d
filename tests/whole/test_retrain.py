"""`tidemill replay --train`: a learner alone takes recorded steps again."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole.running import ROOT, assert_books_balance, up


def retrain(run: Path, out: Path, *settings: str) -> str:
    command = [sys.executable, "-m", "launch", "replay", "--run-dir", str(run), "--train", str(out)]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(run: Path) -> str:
    return hashlib.sha256((run / "final/model.safetensors").read_bytes()).hexdigest()


def test_a_learner_alone_reproduces_the_bits_and_another_rate_changes_them(tmp_path: Path) -> None:
    with up(tmp_path, "learner.steps=6") as run:
        assert run.wait() == 0, run.log
    again, other = tmp_path / "again", tmp_path / "other"
    streams = sorted(path.stat().st_mtime_ns for path in (run.directory / "bus/store").rglob("*.blk"))
    assert "steps 1 to 6 again" in retrain(run.directory, again)
    assert sorted(path.stat().st_mtime_ns for path in (run.directory / "bus/store").rglob("*.blk")) == streams, "the run is not touched"
    assert weights(again) == weights(run.directory)
    summary = json.loads((again / "summary.json").read_text())
    assert_books_balance(summary, max_lag=2)
    assert summary["samples_trained"] == run.summary["samples_trained"]
    assert "steps 1 to 6 again" in retrain(run.directory, other, "learner.optimizer.lr=1e-5")
    assert weights(other) != weights(run.directory)


@pytest.mark.slow
def test_where_samples_were_trimmed_it_begins_behind_the_oldest_checkpoint(tmp_path: Path) -> None:
    settings = ("learner.steps=8", "learner.checkpoint_every=2", "learner.keep_checkpoints=2", "bus.history_samples=0")
    with up(tmp_path, *settings) as run:
        assert run.wait() == 0, run.log
    assert "steps 7 to 8 again" in retrain(run.directory, tmp_path / "again")
    assert weights(tmp_path / "again") == weights(run.directory)
