"""``python -m tests.bench rewards``: it measures every reward that ships, and each of its rows and the whole of it
run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import plain_rewards, rewards
from tidemill.rewards import group
from tidemill.rewards.registry import ASKING, TABLE, bind

LEAST = 0.9
"""Share of equal results of a row and its reference; what differs is in ``docs/rewards.md``."""
DIFFERENT = {"math:latex", "math:rest"}
"""Rows with answers on which the reference is known to differ more often."""


def test_every_reward_has_a_row_or_a_reason_to_have_none() -> None:
    rows = {name.partition(":")[0] for name in rewards.ROWS}
    assert rows | rewards.ASKED.keys() | rewards.UNMEASURED.keys() == TABLE.keys() | group.TABLE.keys()
    assert rewards.ASKED.keys() == ASKING and not rows & rewards.UNMEASURED.keys()


@pytest.mark.parametrize("name", rewards.ROWS)
def test_a_row_has_a_rate_and_its_reference_the_same_results(name: str) -> None:
    line = rewards.measure(name, 0.0, 1 if name == "code" else 10)  # a program takes 50 ms
    assert line.startswith(name) and " samples/s per core" in line
    row = rewards.ROWS[name]
    if row.reference is None:
        assert line.endswith("no reference")
        return
    same, of = (int(word) for word in line.split("; ")[1].removesuffix(" results are the same").split(" of "))
    assert "ratio " in line and of > 0
    assert same >= LEAST * of or name in DIFFERENT


@pytest.mark.parametrize("name", [name for name, row in rewards.ROWS.items() if row.reference is not None])
def test_the_responses_of_a_row_get_different_scores(name: str) -> None:
    row = rewards.ROWS[name]
    assert row.reference is not None
    assert len({str(plain_rewards.score(row.reference(one))) for one in row.work(20)}) > 1


def test_the_programs_of_the_row_of_code_run() -> None:
    """A response without a program would be scored without running anything."""
    found = [bind("code", {"seconds": 60.0})(one) for one in rewards.programs(1)]
    assert found == [{"score": 1.0, "passed": 2.0, "tests": 2.0}, {"score": 0.0, "passed": 0.0, "tests": 2.0}]


def lines_of(*options: str) -> list[str]:
    words = [sys.executable, "-m", "tests.bench", "rewards", "--seconds", "0", "--lines", "1", *options]
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        words, cwd=root, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[1:]


def test_some_rows_are_measured_from_the_command() -> None:
    lines = lines_of("--names", "digits,judge,remote,reward_model")
    names = ["digits", "judge", "remote", "reward_model", "by_rollout", "sentence"]
    assert [line.split(" ")[0] for line in lines] == names
    assert all("2 of 2 results are right" in line for line in lines[1:4])


@pytest.mark.slow
def test_without_options_all_of_it_is_measured() -> None:
    first = [line.split(" ")[0] for line in lines_of()]
    assert first == [*rewards.ROWS, *rewards.ASKED, *rewards.UNMEASURED, *["children"] * 4, *["scorer"] * 4]


def test_a_name_that_is_no_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench rewards", "--names", "maths"])
    with pytest.raises(SystemExit, match="got maths"):
        rewards.main()
