"""Hooks of ranks, which find them by import path: a run holds before a step, until a test lets it go on."""

import math
import os
from pathlib import Path

from tests.waits import poll
from tidemill.learner.trainer.hooks import BeforeStep

HELD = "HELD_STEP"
"""Environment variable ``STEP:FILE``: no rank takes this step, or a later one, while the file does not exist."""


def reached(file: str | Path) -> Path:
    """Return the file that is there from the moment on at which a rank holds before the step."""
    return Path(f"{file} is awaited")


def hold(moment: BeforeStep) -> None:
    step, _, file = os.environ[HELD].partition(":")
    if moment.batch.step >= int(step):
        reached(file).touch()
    poll(lambda: moment.batch.step < int(step) or Path(file).exists(), timeout_s=math.inf)
