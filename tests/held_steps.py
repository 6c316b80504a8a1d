"""Hooks of ranks, which find them by import path: a run holds before a step, until a test lets it go on or a version is evaluated."""

import json
import os
import time
from pathlib import Path

from learner.megatron.hooks import BeforeStep

HELD = "HELD_STEP"
"""Environment variable ``STEP:FILE``: no rank takes this step, or a later one, while the file does not exist."""


def hold(moment: BeforeStep) -> None:
    step, _, file = os.environ[HELD].partition(":")
    while moment.batch.step >= int(step) and not Path(file).exists():
        time.sleep(0.02)


EVALUATED = "EVALUATED"
"""Environment variable ``EVERY:SETS:FILE``: no rank leaves a version that is due behind before FILE has the scores of all its sets."""


def until_evaluated(moment: BeforeStep) -> None:
    every, sets, file = os.environ[EVALUATED].split(":", 2)
    version = moment.batch.step - 1
    while version % int(every) == 0 and _scored(Path(file), version) < int(sets):
        time.sleep(0.02)


def _scored(file: Path, version: int) -> int:
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(json.loads(line)["version"] == version for line in lines)
