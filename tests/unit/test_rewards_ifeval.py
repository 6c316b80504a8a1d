"""IFEval's instructions against verdicts of the reference implementation (``tests/data/ifeval_reference.json``)."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.ifeval import INSTRUCTIONS, follows
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import UNBOUNDED
from tidemill.rewards.scorers import opened

REFERENCE = json.loads((Path(__file__).parents[1] / "data/ifeval_reference.json").read_text(encoding="utf-8"))
OF_CASE = ("change_case:english_capital", "change_case:english_lowercase")
"""The reference also asks langdetect whether the response is English, which it denies for most short ones."""
UNCOMPARED = {"change_case:capital_word_frequency", "length_constraints:number_sentences"}
"""The reference counts with models of nltk, which are downloaded."""


@pytest.mark.parametrize("check", REFERENCE["checks"], ids=lambda check: f"{check['instruction']} {check['kwargs']}")
def test_the_verdicts_are_those_of_the_reference(check: dict[str, Any]) -> None:
    name, arguments = check["instruction"], check["kwargs"]
    ours = [place for place, response in enumerate(REFERENCE["responses"]) if follows(name, arguments, response)]
    assert 0 < len(check["followed"]) < len(REFERENCE["responses"])
    if name in OF_CASE:
        assert set(ours) >= set(check["followed"])
    else:
        assert ours == check["followed"]


def test_every_instruction_is_compared() -> None:
    assert {check["instruction"] for check in REFERENCE["checks"]} | UNCOMPARED == INSTRUCTIONS.keys()
    assert len(REFERENCE["responses"]) >= 50


async def test_it_runs_in_child_processes_because_a_prompt_may_have_any_number_of_instructions() -> None:
    assert "ifeval" in UNBOUNDED
    here, number = psutil.Process(os.getpid()), 500
    rules = {"instruction_id_list": ["ratio:sentence_balance"] * number, "kwargs": [{}] * number}
    async with opened("ifeval", {}, ProcessLimits(timeout_s=0.5, workers=1)) as score:
        with pytest.raises(TimeoutError):  # tens of seconds of work, which would hold this loop up
            await score(RewardRequest(prompt="p", response="A! " * 20_000, label=rules, status=Status.COMPLETED))
        assert len(here.children()) >= 1, "its keeper"
    few = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    async with opened("ifeval", {}, ProcessLimits(workers=1)) as score:
        assert await score(RewardRequest(prompt="p", response="a", label=few, status=Status.COMPLETED)) == {
            "score": 1.0,
            "followed": 1.0,
        }
