"""`tidemill up` on written answers alone: no engine, no actor, no reward; the learner is killed once."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.auditor import judge
from tests.chaos.storm import standing_bus
from tests.held_steps import HELD
from tests.launched import run_tidemill
from tests.whole.running import ROOT, SMOKE, assert_books_balance, kill, live, records, until_step, up
from tidemill.bus.streams.bus import connect

SFT = ROOT / "launch/configs/sft.yaml"
ROWS, STEPS = 512, 32


@pytest.mark.slow
async def test_one_pass_over_written_answers_with_the_learner_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is trained once, the loss falls, and no step is lost or taken twice with other rows."""
    goes_on = tmp_path / "goes-on"
    monkeypatch.setenv(HELD, f"12:{goes_on}")
    settings = (
        "learner.hooks.before_step=tests.held_steps:hold",
        f"prepare.count={ROWS}",
        "learner.num_epochs=1",
        "learner.groups_per_step=16",
        "learner.checkpoint_every=8",
        "bus.lease_s=3",
    )
    with up(tmp_path, *settings, "learner.weights_digest=true", config=SFT, flags=("--fresh",)) as run:
        run.run = "sft"
        async with run.bus() as bus:
            await until_step(bus, 11)
            kill((await live(bus, "feeder")).pid)
            goes_on.touch()
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert (summary["steps"], summary["samples_trained"], summary["tasks_given_up"]) == (STEPS, ROWS, {})
    assert summary["restarts"], "the learner was started again"
    losses = [line["train/sft_loss"] for line in run.metrics]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert not [log for log in (run.directory / "logs").iterdir() if log.name.startswith(("engine", "actor"))]
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
        async with connect(url, run.run, name="test") as bus:
            offsets = {task.id: task.offset async for task in bus.tasks.scan()}
            plans, _ = await records(bus)
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    assert (verdict.steps, verdict.steps_without_digest) == (STEPS, 0), verdict
    assert Counter(offsets[int(task)] for plan in plans for task in plan.tasks) == Counter(range(ROWS))


@pytest.mark.slow
def test_archived_samples_of_another_run_are_trained_with_topr(tmp_path: Path) -> None:
    """Groups of four with rewards and log-probs, of a run that is over: one step for each eight groups, and no
    engine.
    """
    first, rows = tmp_path / "first", tmp_path / "rows.jsonl"
    first.mkdir()
    with up(first, "learner.steps=2", "bus.history_samples=1000") as sampled:
        assert sampled.wait() == 0, sampled.log[-4000:]
    archive = tmp_path / "archive"
    _tidemill("archive", "--run-dir", str(sampled.directory), "--out", str(archive))
    said = _tidemill("data", "import", str(archive), "-o", str(rows))
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) >= 16 and f"{len(found)} rows, {sum(len(row['responses']) for row in found)} responses" in said
    config = tmp_path / "topr.yaml"
    config.write_text(
        json.dumps(
            {
                "prepare": None,
                "model": {"path": str(sampled.directory / "prepared" / "model")},
                "rollouts": {"recorded": {"use": "dataset"}},
                "data": {
                    "path": str(rows),
                    "rollout": "recorded",
                    "responses_key": "responses",
                    "metadata_key": "metadata",
                },
                "learner": {
                    "algorithm": {"correction": "topr"},
                    "num_epochs": 1,
                    "steps": 100,
                    "groups_per_step": 8,
                    "checkpoint_every": 0,
                },
                "actor": {"reward": ""},
            }
        )
    )
    second = tmp_path / "second"
    second.mkdir()
    with up(second, config=[SMOKE, config], flags=("--fresh",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["samples_trained"] == sum(len(row["responses"]) for row in found)
    scores = [
        response["reward"] if isinstance(response["reward"], float) else sum(response["reward"].values())
        for row in found
        for response in row["responses"]
    ]
    total = sum(line["train/reward_mean"] * line["data/samples"] for line in run.metrics)
    assert total == pytest.approx(sum(scores), rel=1e-5)
    # The first steps train nearly the weights that sampled the first groups: the log-probs are those of the archive.
    assert run.metrics[0]["offpolicy/logprob_diff_abs"] < 0.1
    assert run.metrics[0]["offpolicy/logprob_diff_max"] > 0


def _tidemill(*words: str) -> str:
    done = run_tidemill(*words)
    assert done.returncode == 0, done.output
    return done.output
