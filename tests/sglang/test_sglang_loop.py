"""The whole loop on real SGLang: it learns, every server receives pushes while it generates, engines join, the
accounting balances.
"""

from pathlib import Path

import pytest

from tests.sglang.server import OVERLAY
from tests.whole.running import SMOKE, Up, assert_books_balance, up

AGREE = 1e-4
"""Largest difference in nats between engine and learner on tokens of the trained weights, in fp32."""
LIMIT_S = 900.0
"""Seconds of wall time on shared cores, the servers' start included."""


def on_sglang(python: str, *settings: str) -> tuple[str, ...]:
    return ("run=smoke", f"engine.sglang.python={python}", *settings)


def assert_pushed_without_a_pause_in_the_run(run: Up, *, steps: int, engines: int) -> None:
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert (summary["steps"], summary["pushes"], summary["restarts"]) == (steps, steps, {})
    assert summary["samples_aborted"] == 0 and summary["samples_dropped"] == {}
    assert summary["multi_version_samples"] > 0, "weights changed in the middle of responses"
    for number in range(engines):
        assert "weights updated version=" in (run.directory / "logs" / f"engine-{number}.log").read_text()


def assert_agreement(run: Up) -> None:
    for step in run.metrics:
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < AGREE, step


@pytest.mark.slow
def test_a_run_on_two_real_servers(python: str, tmp_path: Path) -> None:
    """Every push reaches every server while it generates; nothing is aborted, lost or trained twice."""
    settings = on_sglang(
        python, "up.engines=2", "learner.steps=12", "sampling.max_new_tokens=24", "weights.min_engines=2"
    )
    with up(tmp_path, *settings, config=(SMOKE, OVERLAY)) as run:
        assert run.wait(LIMIT_S) == 0, run.log[-4000:]
    assert_pushed_without_a_pause_in_the_run(run, steps=12, engines=2)
    assert_agreement(run)


@pytest.mark.slow
def test_a_run_in_turns_on_a_server_that_shares_the_accelerator(python: str, tmp_path: Path) -> None:
    """The server releases its memory for every step, has it back with every version, and ends no request."""
    settings = (
        "learner.colocated=true",
        "learner.steps=8",
        "learner.checkpoint_every=4",
        "weights.push_every=2",
        "weights.min_engines=1",
    )
    longer = ("sampling.max_new_tokens=24",)
    with up(tmp_path, *on_sglang(python, *settings, *longer), config=(SMOKE, OVERLAY)) as run:
        assert run.wait(LIMIT_S) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["pushes"]) == (8, 4) and not run.summary["restarts"]
    assert_agreement(run)
    assert all(step["turn/engines"] == 1 or step["step"] == 1 for step in run.metrics), run.metrics
    engine = (run.directory / "logs" / "engine-0.log").read_text()
    assert engine.count("memory released") >= 7
    assert (
        engine.count("memory resumed tags=weights")
        == engine.count("memory resumed tags=kv_cache")
        == engine.count("memory released")
    )


@pytest.mark.slow
def test_a_run_on_a_server_of_two_ranks(python: str, tmp_path: Path) -> None:
    """With tensor parallelism both ranks receive every push, and their common output equals the learner's."""
    ranks = ("engine.sglang.arguments.tp_size=2", "engine.sglang.environment.SGLANG_CPU_OMP_THREADS_BIND=0|1")
    with up(tmp_path, *on_sglang(python, *ranks, "learner.steps=12"), config=(SMOKE, OVERLAY)) as run:
        assert run.wait(LIMIT_S) == 0, run.log[-4000:]
    assert_pushed_without_a_pause_in_the_run(run, steps=12, engines=1)
    assert_agreement(run)


def test_the_digits_are_learned_on_a_real_server(python: str, tmp_path: Path) -> None:
    config = (SMOKE.with_name("digits.yaml"), OVERLAY)
    with up(tmp_path, *on_sglang(python, "learner.steps=70", "up.require_reward=0.7"), config=config) as run:
        assert run.wait(LIMIT_S) == 0, run.log[-4000:]
    assert_pushed_without_a_pause_in_the_run(run, steps=70, engines=1)
    assert_agreement(run)
    assert run.summary["reward_first"] < 0.2 and run.summary["reward_last"] >= 0.7, run.summary


@pytest.mark.slow
def test_the_form_of_an_answer_is_learned_from_real_questions(python: str, tmp_path: Path) -> None:
    config = (SMOKE.with_name("gsm8k.yaml"), OVERLAY)
    with up(tmp_path, *on_sglang(python), config=config) as run:
        assert run.wait(LIMIT_S) == 0, run.log[-4000:]
    assert_pushed_without_a_pause_in_the_run(run, steps=100, engines=1)
    assert_agreement(run)
    assert run.summary["reward_last"] > 5 * max(run.summary["reward_first"], 0.02), run.summary
