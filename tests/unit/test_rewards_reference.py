"""Rewards against the code that they are named after: slime's math, deepscaler, f1 and gpqa, verl's gsm8k and dapo,
TRL's shaping.

``reference`` is the result of slime 624b824a8 or verl b178a3cd5 for an input of ours (gsm8k: its flexible and its
strict method). Where our result is another one, the row has it as ``ours``, with the reason.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.math_rewards import dapo, deepscaler, gsm8k, math
from tidemill.rewards.builtin.text import f1, gpqa, overlong, repetition
from tidemill.rewards.port import RewardRequest

ROWS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/reward_references.jsonl").read_text().splitlines()
]
SHAPING = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/shaping_references.jsonl").read_text().splitlines()
]
"""Results of TRL 1.16's ``get_soft_overlong_punishment``, and of its ``get_repetition_penalty_reward`` over words
instead of tokens.
"""
REWARDS: dict[str, Any] = {
    "math": math,
    "deepscaler": deepscaler,
    "f1": f1,
    "gpqa": gpqa,
    "gsm8k": gsm8k,
    "gsm8k_strict": lambda request: gsm8k(request, strict=True),
    "dapo": lambda request: dapo(request)["score"],
}


@pytest.mark.parametrize("name", REWARDS)
def test_results_are_those_of_the_reference_or_differ_for_a_reason(name: str) -> None:
    rows = [row for row in ROWS if row["reward"] == name]
    assert len(rows) >= 60
    wrong = []
    for row in rows:
        asked = RewardRequest(
            prompt="",
            response=row["response"],
            label=row["label"],
            status=Status.COMPLETED,
            metadata=row.get("metadata", {}),
        )
        got = REWARDS[name](asked)
        if got != pytest.approx(row.get("ours", row["reference"]), abs=1e-9):
            wrong.append((row, got))
    assert not wrong, wrong


def test_every_difference_has_a_reason() -> None:
    for row in ROWS:
        assert ("ours" in row) == ("why" in row), row
        assert row.get("ours") != row["reference"], row
    results = Counter((row["reward"], row["reference"]) for row in ROWS)
    assert min(results[name, 1.0] for name in REWARDS) > 5, "each set has right answers, and wrong ones"
    assert all(
        sum(count for (reward, _), count in results.items() if reward == name) - results[name, 1.0] >= 15
        for name in REWARDS
    )


@pytest.mark.parametrize(("name", "function"), [("overlong", overlong), ("repetition", repetition)])
def test_shaping_is_that_of_the_reference(name: str, function: Any) -> None:
    rows = [row for row in SHAPING if row["reward"] == name]
    assert len(rows) >= 60 and len({row["reference"] for row in rows}) >= 10
    for row in rows:
        asked = RewardRequest(
            prompt="",
            response=row.get("response", ""),
            label=None,
            status=Status.COMPLETED,
            sampled_length=row.get("sampled_tokens", 0),
        )
        assert function(asked, **row["options"]) == pytest.approx(row["reference"], abs=1e-12), row
