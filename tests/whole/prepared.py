"""Output of `tidemill prepare` for a configuration, made once by this process and copied into the directories of its runs."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def put_prepared(config: Path, run: Path) -> None:
    """Put model and prompts of ``config`` into a run's directory, which need not exist: the run finds them prepared."""
    shutil.copytree(made(config) / "prepared", run / "prepared")


@functools.cache
def made(config: Path) -> Path:
    """Prepare the files of ``config`` once in this process. Returns their run directory, which is removed when the process ends."""
    kept = Path(tempfile.mkdtemp(prefix="tidemill-prepared-"))
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    command = [sys.executable, "-m", "launch", "prepare", str(config), "--set", f"directory={kept}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return kept
