"""The main job, small: `tidemill up` from nothing to a trained model, every part real and in a process of its own; and
trained again.
"""

import asyncio
import hashlib
import json
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.check_kit import write_model
from tests.held_steps import HELD, reached
from tests.launched import run_tidemill
from tests.waits import poll
from tests.whole.running import UP_LIMIT_S, Up, assert_books_balance, until_step, up
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Plan
from tidemill.launch.metrics.dictionary import described
from tidemill.launch.run.bus_process import EndedBus, started
from tidemill.learner.batch.batching import trainable_lags
from tidemill.learner.checkpoints.disk import listed


@pytest.fixture(scope="module")
def from_nothing(tmp_path_factory: pytest.TempPathFactory) -> Up:
    """Return a run of six steps with evaluations that has ended."""
    directory = tmp_path_factory.mktemp("from-nothing")
    (directory / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}=", "label": f"{n}"}) + "\n" for n in range(10, 18))
    )
    held = {"path": str(directory / "held.jsonl"), "samples": 3}
    settings = ("learner.steps=6", "staleness.max_lag=2", "eval.every=3", f"eval.sets={json.dumps({'held': held})}")
    with up(directory, *settings, flags=("--fresh",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    return run


def test_a_run_from_nothing_to_a_model_that_transformers_loads(from_nothing: Up) -> None:
    run = from_nothing
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert summary["steps"] == 6
    assert summary["samples_trained"] == 6 * 8 * 4
    assert summary["samples_published"] >= summary["samples_trained"]
    assert summary["pushes"] >= 5
    assert summary["tokens_trained"] > 0
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert (run.directory / "curves.png").stat().st_size > 5000
    AutoModelForCausalLM.from_pretrained(run.directory / "final")
    AutoTokenizer.from_pretrained(run.directory / "final")


def test_its_metrics_are_described_and_every_token_with_a_gradient_has_its_values(from_nothing: Up) -> None:
    run = from_nothing
    names = {name for line in run.metrics for name in line} - {"step", "epoch", "seconds"}
    assert {name for name in names if described(name) is None} == set()
    assert {line["data/trained_dropped"] for line in run.metrics} == {0.0}
    ended = EndedBus.of(run.directory)
    assert ended is not None
    with started(ended) as url:
        assert asyncio.run(_steps_with_values(url, ended.run)) == [1, 2, 3, 4, 5, 6]


async def _steps_with_values(url: str, run: str) -> list[int]:
    """Return the steps with recorded values, each compared with its plan and its samples."""
    steps = []
    async with connect(url, run, name="test") as bus:
        plans = [record async for _, record in bus.plans.scan() if isinstance(record, Plan)]
        for plan in plans:
            values = {one.seq: one for one in await bus.trained.of_step(plan.step)}
            samples = {int(seq): await bus.samples.fetch(int(seq)) for seq in plan.seqs}
            assert values.keys() <= samples.keys()
            for seq, sample in samples.items():
                group = [one.score for one in samples.values() if one.task == sample.task]
                lags = trainable_lags(sample, plan.version_steps, plan.step, plan.oldest_step)
                trained = (lags >= 0).nonzero()[0].tolist()
                if seq not in values and trained:  # no gradient: its reward is the mean of its group
                    assert sample.score == pytest.approx(sum(group) / len(group)), (plan.step, seq)
                if seq not in values:
                    continue
                one = values[seq]
                assert (one.task, one.index, one.places.tolist()) == (sample.task, sample.index, trained)
                if plan.step == 1:  # the weights that sampled it
                    assert one.log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-4)
            steps.append(plan.step)
    return steps


def test_its_evaluations_are_those_of_the_command_alone(from_nothing: Up) -> None:
    """The last version is evaluated when no push follows, and the command has the same weights: the numbers are
    equal.
    """
    lines = [json.loads(line) for line in (from_nothing.directory / "evaluations.jsonl").read_text().splitlines()]
    assert lines == from_nothing.summary["evaluations"]
    assert lines[0]["version"] == lines[0]["versions_later"] == 0
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions)) and {0, 6} <= set(versions) <= {0, 3, 6}
    assert all((line["set"], line["prompts"], line["samples"], line["missing"]) == ("held", 8, 24, 0) for line in lines)
    config = from_nothing.directory / "config.yaml"
    done = run_tidemill("eval", str(from_nothing.directory / "final"), "--config", str(config), "--json")
    assert done.returncode == 0, done.output
    (alone,) = map(json.loads, done.out.splitlines())
    last = lines[-1]
    assert alone == last | {"version": 0, "step": 0, "versions_later": 0.0} and last["versions_later"] == 0.0


def retrain(run: Path, out: Path, *settings: str) -> str:
    chosen = [word for setting in settings for word in ("--set", setting)]
    done = run_tidemill("replay", "--run-dir", str(run), "--train", str(out), *chosen)
    assert done.returncode == 0, done.output
    return done.output


def weights(run: Path) -> str:
    return hashlib.sha256((run / "final/model.safetensors").read_bytes()).hexdigest()


def test_a_learner_alone_comes_to_the_same_bits(from_nothing: Up, tmp_path: Path) -> None:
    """`tidemill replay --train` takes recorded steps again, and leaves the run as it is."""
    run, again = from_nothing, tmp_path / "again"
    streams = sorted(path.stat().st_mtime_ns for path in (run.directory / "bus/store").rglob("*.blk"))
    printed = retrain(run.directory, again)
    assert "steps 1 to 6 again" in printed
    assert "evaluation" not in printed and json.loads((again / "summary.json").read_text())["evaluations"] == [], (
        "those are the run's"
    )
    assert sorted(path.stat().st_mtime_ns for path in (run.directory / "bus/store").rglob("*.blk")) == streams, (
        "the run is not touched"
    )
    assert weights(again) == weights(run.directory)
    summary = json.loads((again / "summary.json").read_text())
    assert_books_balance(summary, max_lag=2)
    assert summary["samples_trained"] == run.summary["samples_trained"]


@pytest.mark.slow
def test_a_learner_alone_with_another_rate_comes_to_other_bits(from_nothing: Up, tmp_path: Path) -> None:
    assert "steps 1 to 6 again" in retrain(from_nothing.directory, tmp_path / "other", "learner.optimizer.lr=1e-5")
    assert weights(tmp_path / "other") != weights(from_nothing.directory)


@pytest.mark.slow
def test_where_samples_were_trimmed_a_learner_alone_begins_behind_the_oldest_checkpoint(tmp_path: Path) -> None:
    settings = ("learner.steps=8", "learner.checkpoint_every=2", "learner.keep_checkpoints=2", "bus.history_samples=0")
    with up(tmp_path, *settings) as run:
        assert run.wait() == 0, run.log
    assert "steps 7 to 8 again" in retrain(run.directory, tmp_path / "again")
    assert weights(tmp_path / "again") == weights(run.directory)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Up:
    """Return a run of four steps at lag 0 that has ended."""
    with up(tmp_path_factory.mktemp("synchronous"), "learner.steps=4", "staleness.max_lag=0") as run:
        assert run.wait() == 0, run.log[-4000:]
    return run


@pytest.mark.slow
def test_two_data_parallel_ranks_train_the_same_steps_as_one(synchronous: Up, tmp_path: Path) -> None:
    """In the first step: same samples (same seeds, same weights), so the same loss and gradient norm."""
    with up(tmp_path, "learner.steps=4", "staleness.max_lag=0", "learner.data_parallel=2") as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=0)
    for name in ("train/loss", "train/grad_norm", "train/reward_mean"):
        assert synchronous.metrics[0][name] == pytest.approx(run.metrics[0][name], rel=1e-4, abs=1e-6), name


def test_ctrl_c_drains_and_resume_goes_on(tmp_path: Path) -> None:
    """The last step is in a checkpoint and in the files of a run that ends; the next start takes the one behind it, and
    none again.
    """

    async def stop_after_step_2() -> None:
        async with run.bus() as bus:
            await until_step(bus, 2)

    settings = ("learner.checkpoint_every=100", "up.drain_s=120")
    with up(tmp_path, "learner.steps=200", *settings) as run:
        asyncio.run(asyncio.wait_for(stop_after_step_2(), UP_LIMIT_S))
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.log[-4000:]
    assert "--resume" in run.log
    reached = max(line["step"] for line in run.metrics)
    assert [one.step for one in listed(run.directory / "checkpoints")] == [reached]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["ended_by"]) == (reached, "drained")
    assert json.loads((run.directory / "final/manifest.json").read_text())["step"] == reached
    assert (run.directory / "curves.png").exists()
    other = f"model.path={write_model(tmp_path / 'other')}"
    with up(tmp_path, other, "sampling.temperature=0.5", flags=("--resume",)) as refused:
        assert refused.wait() == 78, refused.log[-4000:]
    assert "model.path: want " in refused.log and "qwen3 of 1 layers of 32" in refused.log and "got " in refused.log
    assert "sampling.temperature: want 1.0, with which the run in" in refused.log
    with up(tmp_path, f"learner.steps={reached + 4}", *settings, flags=("--resume",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    epochs = {line["step"]: line["epoch"] for line in run.metrics}
    assert epochs == {step: 1 if step <= reached else 2 for step in range(1, reached + 5)}, "no step is done again"


@pytest.mark.slow
def test_a_learner_that_is_not_drained_in_time_ends_the_run_with_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second step takes longer than ``up.drain_s``: there is no summary, and the next start takes both steps."""
    held = tmp_path / "goes on"
    monkeypatch.setenv(HELD, f"2:{held}")
    settings = ("learner.checkpoint_every=100", "learner.steps=3", "learner.hooks.before_step=tests.held_steps:hold")
    with up(tmp_path, *settings, "up.drain_s=2", "actor.drain_finish_s=1") as run:
        poll(reached(held).exists, timeout_s=UP_LIMIT_S)  # after a signal before it no rank begins the step
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 75, run.log[-4000:]
    assert "the learner was not drained within 2 s (up.drain_s)" in run.log and "--resume" in run.log
    assert not (run.directory / "summary.json").exists()
    held.touch()
    with up(tmp_path, *settings, "up.drain_s=60", flags=("--resume",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert {line["step"]: line["epoch"] for line in run.metrics} == {1: 2, 2: 2, 3: 2}
