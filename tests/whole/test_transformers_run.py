"""`tidemill up` with a family that the engine's decoder lacks: transformers runs it in the engine."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.families import family_model
from tests.mtp_models import files_of, heads_of, rewrite
from tests.tiny_models import tiny_model
from tests.whole.prepared import made
from tests.whole.running import SMOKE, assert_books_balance, up

STEPS = 3
OF_FSDP = ("qwen3_5_moe", "gpt_oss")
"""Families that Megatron lacks, too: linear attention with experts, sinks and windows."""
NEAR = 1e-5
"""Nats between learner and engine, float32 on both sides."""


def write_run(directory: Path, family: str) -> Path:
    """Write the configuration of the smoke run with a family in place of its model. Returns its file."""
    prepared = made(SMOKE) / "prepared"
    shutil.copytree(prepared / "model", directory / "model")
    values = json.loads((prepared / "model/config.json").read_text())
    sizes = {name: values[name] for name in ("vocab_size", "eos_token_id", "pad_token_id") if name in values}
    sizes["max_position_embeddings"] = 64
    model = family_model(family, **sizes) if family in OF_FSDP else tiny_model(family, **sizes)
    model.save_pretrained(directory / "model")
    settings = yaml.safe_load(SMOKE.read_text())
    del settings["prepare"]
    settings |= {"model": {"path": str(directory / "model")}, "data": {"path": str(prepared / "prompts.jsonl")}}
    settings["learner"] |= {"steps": STEPS, "checkpoint_every": 0}
    settings["staleness"] = {"max_lag": 0}
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", *OF_FSDP])
async def test_learner_and_engine_have_one_model_after_every_push(tmp_path: Path, family: str) -> None:
    with up(tmp_path, "run=smoke", config=write_run(tmp_path, family), flags=("--fresh",)) as run:
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=0)
    assert run.summary["steps"] == run.summary["pushes"] == STEPS
    differences = [step["offpolicy/logprob_diff_max"] for step in run.metrics]
    assert len(differences) == STEPS and max(differences) < NEAR
    backend = "fsdp" if family in OF_FSDP else "megatron"
    logs = [path.read_text() for path in (run.directory / "logs").iterdir()]
    assert any(f"backend={backend} reason={family}" in log for log in logs)
    assert any("model opened runner=transformers" in log for log in logs)


@pytest.mark.slow
async def test_trained_heads_for_further_tokens_are_pushed_and_in_the_trained_model(tmp_path: Path) -> None:
    """Engines that do not compute them take the pushes. The final directory has every tensor of the first one."""
    file = write_run(tmp_path, "deepseek_v3")
    before = files_of(tmp_path / "model")
    before |= heads_of("deepseek_v3", before)
    rewrite(tmp_path / "model", before)
    settings = ("run=smoke", "learner.mtp_loss_scaling_factor=0.3", "learner.data_parallel=2")
    with up(tmp_path, *settings, config=file, flags=("--fresh",)) as run:
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=0)
    assert max(step["offpolicy/logprob_diff_max"] for step in run.metrics) < NEAR
    assert all(step["train/mtp_loss"] > 0 for step in run.metrics)
    trained = files_of(run.directory / "final")
    assert trained.keys() == before.keys()
    heads = [name for name in before if name.endswith(("eh_proj.weight", "shared_head.norm.weight"))]
    assert len(heads) == 2 and not any(torch.equal(trained[name], before[name]) for name in heads)
    [copy] = [name for name in before if name.endswith("shared_head.head.weight")]
    assert torch.equal(trained[copy], trained["lm_head.weight"])
