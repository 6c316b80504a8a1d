"""Hooks of ranks, which find them by import path: a run holds before a step, until a test lets it go on."""

import os
import time
from pathlib import Path

from tidemill.learner.megatron.hooks import BeforeStep

HELD = "HELD_STEP"
"""Environment variable ``STEP:FILE``: no rank takes this step, or a later one, while the file does not exist."""


def hold(moment: BeforeStep) -> None:
    step, _, file = os.environ[HELD].partition(":")
    while moment.batch.step >= int(step) and not Path(file).exists():
        time.sleep(0.02)
