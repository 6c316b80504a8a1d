"""The report on the first two steps: a verdict for each question, from metrics and facts alone."""

import math
from dataclasses import replace

import pytest

from tidemill.learner.debug.report import Excerpt, Facts, Line, report

GOOD = {
    "train/entropy": 0.4,
    "train/truncated_share": 0.1,
    "train/ppo_kl": 0.0,
    "train/kl_reference": 0.0,
    "train/grad_norm_max": 0.7,
    "train/skipped_minibatches": 0.0,
    "offpolicy/fresh_logprob_diff_abs": 2e-4,
    "offpolicy/logprob_diff_max": 3e-3,
}
FACTS = Facts(
    vocab_size=1000, dtype="float32", log_prob_mean=-0.3, own_reference=True, minibatches=1, memory={"host": [1e9]}
)


def wrong(lines: list[Line]) -> list[str]:
    return [line.subject for line in lines if not line.good]


def test_a_sound_run_has_no_wrong_line() -> None:
    first = report(1, GOOD, FACTS)
    assert wrong(first) == []
    assert len(first) == 7
    assert all(str(line).startswith("ok ") for line in first)
    second = report(2, GOOD, replace(FACTS, before={"host": [0.95e9]}))
    assert [line.subject for line in second] == ["log-probs, learner - engine", "gradient", "memory, host"]
    assert wrong(second) == []


@pytest.mark.parametrize(
    ("metrics", "facts", "subject"),
    [
        ({}, {"log_prob_mean": -6.0}, "rollout"),
        ({}, {"excerpt": Excerpt(prompt="", response="", log_prob_mean=-6.0)}, "sampled text"),
        ({"train/entropy": 6.5}, {}, "entropy"),
        ({"train/truncated_share": 0.9}, {}, "finished responses"),
        ({"train/kl_reference": 1e-4}, {}, "log-probs, learner - reference"),
        ({"train/ppo_kl": 1e-4}, {}, "change within the first update"),
        ({"offpolicy/fresh_logprob_diff_abs": 5e-3}, {}, "log-probs, learner - engine"),
        ({"train/grad_norm_max": 400.0}, {}, "gradient"),
        ({"train/grad_norm_max": math.inf}, {}, "gradient"),
        ({"train/skipped_minibatches": 1.0}, {}, "gradient"),
        ({}, {"before": {"host": [0.5e9]}}, "memory, host"),
    ],
)
def test_each_fault_has_its_line_with_a_cure(metrics: dict[str, float], facts: dict[str, object], subject: str) -> None:
    lines = report(1, GOOD | metrics, replace(FACTS, **facts))  # type: ignore[arg-type]
    assert wrong(lines) == [subject]
    (line,) = [line for line in lines if not line.good]
    assert str(line).startswith("LOOK ") and "; look at: " in str(line)


@pytest.mark.parametrize(
    ("entropy", "log_prob", "likely"), [(2.84, -2.9, True), (2.84, -3.8, True), (2.84, -4.5, False), (0.1, -1.2, False)]
)
def test_sampled_tokens_are_as_likely_as_the_entropy_has_it(entropy: float, log_prob: float, likely: bool) -> None:
    """The expected log-prob of a sampled token is the negated entropy: a model that is undecided samples unlikely
    tokens rightly.
    """
    text = Excerpt(prompt="", response="", log_prob_mean=log_prob)
    lines = report(1, GOOD | {"train/entropy": entropy}, replace(FACTS, log_prob_mean=log_prob, excerpt=text))
    assert wrong(lines) == ([] if likely else ["rollout", "sampled text"])
    assert f"{-entropy:.4f} expected" in str(lines[0])


def test_what_need_not_be_equal_is_not_judged() -> None:
    moved = GOOD | {"train/kl_reference": 0.3, "train/ppo_kl": 0.2, "offpolicy/fresh_logprob_diff_abs": 4e-2}
    assert (
        wrong(report(1, moved, replace(FACTS, minibatches=4, dtype="bfloat16"))) == []
    )  # earlier minibatches moved the policy
    assert wrong(report(1, moved | {"train/ppo_kl": 0.0}, replace(FACTS, own_reference=False, dtype="bfloat16"))) == []
    stale = {name: value for name, value in GOOD.items() if "fresh" not in name} | {"offpolicy/logprob_diff_abs": 0.3}
    lines = report(2, stale, FACTS)
    assert wrong(lines) == [] and "of older weights" in str(lines[0])
    assert wrong(report(1, {"train/skipped_minibatches": 1.0}, replace(FACTS, log_prob_mean=None))) == ["gradient"]


def test_a_sampled_text_is_shown_escaped_or_the_reason_why_not() -> None:
    shown = Excerpt(prompt="2 + 2?\n", response="4\x1b[31m \u202e", log_prob_mean=-0.25)
    lines = [
        str(report(1, GOOD, replace(FACTS, excerpt=one))[1])
        for one in (shown, replace(shown, missing="m/tokenizer.json: no such file"))
    ]
    assert lines[0] == r"ok   sampled text: ...'2 + 2?\n' -> '4\x1b[31m \u202e'... mean log-prob -0.2500"
    assert "cannot be decoded (m/tokenizer.json: no such file)" in lines[1] and lines[1].endswith(
        "mean log-prob -0.2500"
    )
    assert "sampled text" not in str([str(line) for line in report(2, GOOD, replace(FACTS, excerpt=shown))])


def test_memory_is_that_of_every_rank() -> None:
    """The rank with most is named, and the one that has grown most, which has the verdict."""
    before, now = {"device": [4e9, 2e9, 2e9]}, {"device": [4e9, 3e9, 2e9]}
    line = report(2, GOOD, replace(FACTS, before=before, memory=now))[-1]
    assert (line.subject, line.good) == ("memory, device", False)
    assert line.finding == "at most 3815 MiB (rank 0), 1.50 x that of the step before (rank 1)"
