"""A real SGLang engine, or its server alone, is killed or frozen in each phase of a push: the learner goes on, the
engine comes back.
"""

import re
from pathlib import Path

import pytest
import yaml

from tests.chaos.dying import PHASES, SGLANG_PHASES
from tests.chaos.joining import join
from tests.chaos.rounds import HOWS, Round, play
from tests.sglang.server import ARGUMENTS, ENVIRONMENT

DEADLINE_S = 10.0
SLOW_ROUNDS = 5


def victims(python: str, tmp_path: Path) -> tuple[str, ...]:
    """Return the settings of an engine with a server on CPU; the other engine of the run is built in."""
    sglang = {"python": python, "arguments": ARGUMENTS, "environment": ENVIRONMENT, "log": str(tmp_path / "sglang.log")}
    values = {"kind": "sglang", "max_running": 32, "sglang": sglang}
    return ("engine=" + yaml.safe_dump(values, default_flow_style=True, width=100_000),)


def test_a_real_engine_that_dies_in_the_middle_of_a_push_holds_up_nobody(python: str, tmp_path: Path) -> None:
    play(
        tmp_path,
        [Round(phase="sglang receiving", how="KILL")],
        deadline_s=DEADLINE_S,
        victims=victims(python, tmp_path),
    )


@pytest.mark.slow
def test_a_real_engine_that_freezes_in_the_middle_of_a_push_holds_up_nobody(python: str, tmp_path: Path) -> None:
    rounds = [Round(phase="sglang ending", how="STOP", may_end=True)]
    play(tmp_path, rounds, deadline_s=DEADLINE_S, victims=victims(python, tmp_path))


@pytest.mark.slow
def test_a_real_engine_that_dies_in_a_cohort_with_a_built_in_one(python: str, tmp_path: Path) -> None:
    rounds = [Round(phase="sglang receiving", how="KILL")]
    log = play(
        tmp_path, rounds, deadline_s=DEADLINE_S, victims=victims(python, tmp_path), settings=("weights.group=all",)
    )
    assert re.search(r"push broke off .* phase=bucket .* engines=2 failed=engine-0\n", log), "they shared a group"


@pytest.mark.slow
def test_a_real_engine_whose_cohort_loses_a_built_in_one(python: str, tmp_path: Path) -> None:
    """SGLang answers no request while it waits for a group, or receives: it must not be taken for the lost one."""
    log = _lose_built_in(python, tmp_path, [Round(phase="joining", how="KILL")])
    assert re.search(r"push broke off .* phase=join engines=2 failed=engine-0\n", log), "they shared a group"


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_real_engine_whose_cohort_loses_built_in_ones_in_every_phase(python: str, tmp_path: Path, how: str) -> None:
    _lose_built_in(python, tmp_path, [Round(phase=phase, how=how) for phase in PHASES])


def _lose_built_in(python: str, tmp_path: Path, rounds: list[Round]) -> str:
    settings = ("weights.group=all", *victims(python, tmp_path))
    return play(tmp_path, rounds, deadline_s=DEADLINE_S, victims=("engine.kind=builtin",), settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("how", [*HOWS, "KILL-SERVER", "STOP-SERVER"])
@pytest.mark.parametrize("number", range(SLOW_ROUNDS))
def test_rounds_over_every_phase(python: str, tmp_path: Path, number: int, how: str) -> None:
    rounds = [Round(phase=phase, how=how, may_end=True) for phase in SGLANG_PHASES]
    play(tmp_path, rounds, deadline_s=DEADLINE_S, victims=victims(python, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("how", [*HOWS, "KILL-SERVER", "STOP-SERVER"])
def test_rounds_over_every_phase_in_a_cohort(python: str, tmp_path: Path, how: str) -> None:
    rounds = [Round(phase=phase, how=how, may_end=True) for phase in SGLANG_PHASES]
    play(tmp_path, rounds, deadline_s=DEADLINE_S, victims=victims(python, tmp_path), settings=("weights.group=all",))


@pytest.mark.slow
def test_a_real_engine_that_joins_serves_the_newest_version_first_and_nobody_waits_for_it(
    python: str, tmp_path: Path
) -> None:
    join(tmp_path, victims(python, tmp_path))
