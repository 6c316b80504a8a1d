"""`tidemill up` without a learner's ranks, then without engines and actors on the files of that run."""

import json
from pathlib import Path

import pytest

from tests.whole.running import assert_books_balance, up
from tidemill.learner.debug.comparison import compare_train
from tidemill.learner.debug.config import ProfileRequest, write_request
from tidemill.learner.debug.rollout_file import load_rollout
from tidemill.learner.debug.train_file import read_modules, read_train, record_path

STEPS = 3


@pytest.mark.slow
def test_generation_alone_then_training_alone(tmp_path: Path) -> None:
    files, output = f"{tmp_path}/rollout_{{step}}.msgpack", f"{tmp_path}/train_{{step}}_{{rank}}.safetensors"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    settings = (f"learner.steps={STEPS}", "staleness.max_lag=1")
    with up(tmp_path / "first", *settings, "debug.rollout_only=true", f"debug.save_rollout={files}") as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=STEPS)
    assert "no model: nothing was trained" in run.log and not (run.directory / "final").exists()
    assert "megatron" not in (run.directory / "logs" / "learner.log").read_text()
    assert [line["data/samples"] for line in run.metrics] == [32] * STEPS
    rollouts = [load_rollout(Path(files.format(step=step))) for step in range(1, STEPS + 1)]
    assert all(len(one.samples) == 32 and one.plan.version_steps == {0: 0} for one in rollouts)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[3, 4, 5, 6]\n")
    modes = (
        f"debug.load_rollout={files}",
        f"debug.save_train={output}",
        "debug.dump_modules.step=2",
        f"debug.dump_modules.prompts={prompts}",
        "learner.context_parallel=2",
    )
    write_request(tmp_path / "second" / "run", ProfileRequest(steps=50))
    with up(tmp_path / "second", *settings, *modes) as run:
        assert run.wait() == 0, run.log[-4000:]
    for step, (one, line) in enumerate(zip(rollouts, run.metrics, strict=True), 1):
        assert abs(sum(sample.score for sample in one.samples) / 32 - line["data/reward_mean"]) < 1e-5
        dump = read_train(Path(output.format(step=step, rank=0)))
        assert dump.metrics["train/loss"] == line["train/loss"]
        assert len(dump.steps[0].debug_data["sequence_ids"]) == 32
        assert compare_train(dump, read_train(record_path(Path(output.format(step=step, rank=0)))), 0.0).first is None
    assert (run.directory / "final" / "config.json").exists()
    log = (run.directory / "logs" / "learner.log").read_text()
    assert "report step=1 ok   log-probs, learner - engine: mean |delta|" in log
    assert "report step=1 LOOK entropy: " in log  # the model has learnt nothing
    assert "report step=1 ok   sampled text: ...'" in log  # and its tokens are as likely as the entropy has it
    assert [line.get("debug/report_look") for line in run.metrics] == [
        *(log.count(f"report step={step} LOOK") for step in (1, 2)),
        None,
    ]
    assert "report step=2" in log and "memory, host" in log and "report step=3" not in log
    dumped = read_modules(run.directory / "debug" / "modules.safetensors")
    assert (
        dumped.source == "learner, step 2" and len(dumped.outputs["0.layers.0.attention.qkv"]) == 4
    )  # tokens of both ranks
    assert (run.directory / "debug" / "profile_rank0_1_3.json.gz").exists()  # the run ended before the request
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == STEPS
