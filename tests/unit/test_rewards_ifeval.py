"""IFEval's instructions against verdicts of the reference implementation (``tests/data/ifeval_reference.json``)."""

import json
from pathlib import Path
from typing import Any

import pytest

from rewards.ifeval import INSTRUCTIONS, follows

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
