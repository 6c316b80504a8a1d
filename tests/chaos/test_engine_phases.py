"""An engine is killed or frozen in each phase of a push: the learner goes on, and the engine comes back with the newest
version.
"""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.dying import PHASES
from tests.chaos.rounds import HOWS, Round, play

DEADLINE_S, LONG_DEADLINE_S = 6.0, 12.0
"""The long one for the round that every change runs: a sound engine that is later than that is evicted. It is waited
for twice.
"""
SLOW_ROUNDS = 100


def test_an_engine_that_dies_or_freezes_in_the_middle_of_a_push_holds_up_nobody(tmp_path: Path) -> None:
    play(tmp_path, [Round(phase="writing", how="STOP")], deadline_s=LONG_DEADLINE_S)


@pytest.mark.slow
def test_a_hundred_rounds_over_every_phase(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    chance = random.Random(pytestconfig.getoption("--storm-seed") or 1)
    every = [Round(phase=phase, how=how) for phase in PHASES for how in HOWS]
    play(tmp_path, every + [chance.choice(every) for _ in range(SLOW_ROUNDS - len(every))], deadline_s=DEADLINE_S)


COHORT: dict[str, Any] = {"deadline_s": 4.0, "settings": ("weights.group=all",), "others": ("engine-a", "engine-b")}
"""Settings for the victim and two others in one process group with the learner. An engine slow within the deadline is
not frozen.
"""


@pytest.mark.slow
def test_the_others_of_its_cohort_get_every_version(tmp_path: Path) -> None:
    log = play(tmp_path, [Round(phase="receiving", how="STOP")], **COHORT)
    assert re.search(r"push broke off .* engines=3 failed=engine-0\n", log), "it was in a group with the others"


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_the_others_of_its_cohort_get_every_version_whatever_the_phase(tmp_path: Path, how: str) -> None:
    play(tmp_path, [Round(phase=phase, how=how) for phase in PHASES], **COHORT)
