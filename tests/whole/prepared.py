"""Output of `tidemill prepare` for a configuration, made once by this process and copied into the directories of its
runs.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from tidemill.launch.run.workers import run_prepare
from tidemill.launch.settings.config_loader import load

ROOT = Path(__file__).resolve().parents[2]


def put_prepared(config: Path, run: Path, *settings: str) -> None:
    """Put model and prompts of ``config`` and ``settings`` into a run's directory, which need not exist: the run finds
    them prepared.
    """
    shutil.copytree(
        made(config, *(one for one in settings if one.startswith("prepare."))) / "prepared", run / "prepared"
    )


@functools.cache
def made(config: Path, *settings: str) -> Path:
    """Prepare the files of ``config`` once in this process. Returns their run directory, which is removed when the
    process ends.
    """
    kept = Path(tempfile.mkdtemp(prefix="tidemill-prepared-"))
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    run_prepare(load([config], [f"directory={kept}", *settings], os.environ).config)
    return kept
