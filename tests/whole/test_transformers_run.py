"""`tidemill up` with a family that the engine's decoder lacks: transformers runs it in the engine."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.tiny_models import tiny_model
from tests.whole.prepared import made
from tests.whole.running import SMOKE, assert_books_balance, up

STEPS = 3
NEAR = 1e-5
"""Nats between learner and engine, float32 on both sides."""


def write_run(directory: Path, family: str) -> Path:
    """Write the configuration of the smoke run with a family in place of its model. Returns its file."""
    prepared = made(SMOKE) / "prepared"
    shutil.copytree(prepared / "model", directory / "model")
    values = json.loads((prepared / "model/config.json").read_text())
    sizes = {name: values[name] for name in ("vocab_size", "eos_token_id", "pad_token_id") if name in values}
    tiny_model(family, max_position_embeddings=64, **sizes).save_pretrained(directory / "model")
    settings = yaml.safe_load(SMOKE.read_text())
    del settings["prepare"]
    settings |= {"model": {"path": str(directory / "model")}, "data": {"path": str(prepared / "prompts.jsonl")}}
    settings["learner"] |= {"steps": STEPS, "checkpoint_every": 0}
    settings["staleness"] = {"max_lag": 0}
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
async def test_learner_and_engine_have_one_model_after_every_push(tmp_path: Path, family: str) -> None:
    with up(tmp_path, "run=smoke", config=write_run(tmp_path, family), flags=("--fresh",)) as run:
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=0)
    assert run.summary["steps"] == run.summary["pushes"] == STEPS
    differences = [step["offpolicy/logprob_diff_max"] for step in run.metrics]
    assert len(differences) == STEPS and max(differences) < NEAR
