"""Prompts that are left out for their pass rate."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.learner.data import DataConfig
from tidemill.learner.feed.issuing import Curriculum, next_prompt
from tidemill.learner.prompts.prompt_file import PromptFile


def made(**changes: Any) -> Curriculum:
    return Curriculum(DataConfig(**({"skip_easy": 1.0, "skip_hard": 0.25, "skip_passes": 2} | changes)))


@pytest.mark.parametrize(
    ("scores", "left_out"),
    [
        ([1, 1, 1, 1], True),
        ([1, 1, 1, 0.9], False),
        ([1, 0, 0, 0], True),
        ([1, 1, 0, 0], False),
        ([0, 0, 0, 0], True),
        ([2, 1], True),
    ],
)
def test_a_prompt_is_left_out_of_the_next_passes_by_its_last_pass_rate(scores: list[float], left_out: bool) -> None:
    curriculum = made()
    curriculum.note(3, 5, scores)
    assert [curriculum.skips(3, epoch) for epoch in range(5, 9)] == [False, left_out, left_out, False]
    assert not curriculum.skips(4, 6)
    curriculum.note(3, 8, [1, 1, 0, 0])
    assert not curriculum.skips(3, 9), "the last time counts"
    assert len(curriculum) == 0


def test_without_a_bound_no_prompt_is_left_out() -> None:
    for changes, scores in (
        ({"skip_easy": 0.0}, [1, 1]),
        ({"skip_hard": -1.0}, [0, 0]),
        ({"skip_easy": 0.0, "skip_hard": -1.0}, [1, 1]),
    ):
        curriculum = made(**changes)
        curriculum.note(1, 0, scores)
        assert not curriculum.skips(1, 1)
    assert not Curriculum(DataConfig()).active
    assert made(passes_at=0.5).active
    low = made(passes_at=0.5)
    low.note(1, 0, [0.5, 0.6])
    assert low.skips(1, 1)


def test_its_state_is_plain_and_restored() -> None:
    curriculum = made()
    for row in (5, 2, 9):
        curriculum.note(row, row, [1.0])
    again = made()
    again.load(json.loads(json.dumps(curriculum.dump())))
    assert again.dump() == curriculum.dump() == [(2, 2), (5, 5), (9, 9)]


def test_the_next_prompt_is_not_left_out_and_of_a_pass_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * size, "label": ""}) + "\n" for size in (1, 2, 9, 4)))
    prompts = PromptFile(file, tokenize=lambda prompt: [1] * len(prompt), max_tokens=8, shuffle=False)
    curriculum = made()

    def found(epoch: int, offset: int, num_epochs: int = 0) -> tuple[int, int] | None:
        drawn = next_prompt(prompts, epoch, offset, curriculum, num_epochs=num_epochs)
        return None if drawn is None else (drawn.epoch, drawn.offset)

    for row in (0, 3):
        curriculum.note(row, 0, [1, 1])
    assert found(0, 0) == (0, 0)
    assert found(1, 0) == (1, 1)
    assert found(1, 2) == (2, 1), "row 2 is too long, row 3 and then row 0 are left out"
    assert found(1, 2, num_epochs=2) is None
    curriculum.note(1, 0, [1, 1])
    assert found(1, 0) == (3, 0), "none is left out for ever"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"skip_easy": 1.1}, "skip_easy: want <= 1, got 1.1"),
        ({"skip_hard": 1.0}, "skip_hard: want < 1, got 1.0"),
        ({"skip_easy": 0.5, "skip_hard": 0.5}, "skip_hard: want < skip_easy = 0.5, got 0.5"),
        ({"skip_passes": 0}, "skip_passes: want > 0, got 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        DataConfig(**settings)
    assert str(refused.value) == complaint
