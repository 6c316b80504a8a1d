"""`tidemill up` with a tiny mixture of experts and `routing_replay: rollout`: samples have the engine's experts, and
all are used.
"""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.tiny_models import tiny_model
from tests.whole.prepared import made
from tests.whole.running import SMOKE, assert_books_balance, up
from tidemill.bus.wire.messages import Kind, Sample
from tidemill.bus.wire.routed_experts import RoutedShape, check_routed_experts, unknown_rows

STEPS = 3


def write_run(directory: Path, rollout: str) -> Path:
    """Write the configuration of the smoke run with a mixture of experts in place of its model. Returns its file."""
    prepared = made(SMOKE) / "prepared"
    shutil.copytree(prepared / "model", directory / "model")
    values = json.loads((prepared / "model/config.json").read_text())
    sizes = {name: values[name] for name in ("vocab_size", "eos_token_id", "pad_token_id") if name in values}
    model = tiny_model("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, max_position_embeddings=64, **sizes)
    model.save_pretrained(directory / "model")
    settings = yaml.safe_load(SMOKE.read_text())
    del settings["prepare"]
    settings |= {"model": {"path": str(directory / "model")}, "data": {"path": str(prepared / "prompts.jsonl")}}
    settings["learner"] |= {"steps": STEPS, "minibatches": 2, "routing_replay": "rollout", "checkpoint_every": 0}
    if rollout:
        settings["rollouts"] = {"it": {"use": rollout, "budget": {"turns": 4, "context": 64}}}
        settings["data"]["rollout"] = "it"
    file = directory / "moe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["", "agent:tests.rollout_programs:Tries"], ids=["single turns", "episodes"])
async def test_a_run_replays_what_its_engine_has_chosen(tmp_path: Path, rollout: str) -> None:
    config = write_run(tmp_path, rollout)
    shape = RoutedShape.of(json.loads((tmp_path / "model/config.json").read_text()))
    assert shape is not None and shape.layers == (1, 3)
    with up(tmp_path, "run=smoke", config=config, flags=("--fresh",)) as run:
        async with run.bus() as bus:
            seen = 0
            async for received in bus.samples.read(None, kinds=(Kind.TRAIN,), routed=shape):
                sample = received.sample
                assert isinstance(sample, Sample) and sample.routed_experts is not None, sample
                check_routed_experts(sample.routed_experts, len(sample.tokens), shape)
                assert len(sample.sizes) == (2 if rollout else 1)
                assert np.flatnonzero(unknown_rows(sample.routed_experts)).tolist() == [
                    *np.cumsum([size[0] for size in sample.sizes]) - 1
                ]
                if (seen := seen + 1) == 16:
                    break
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["steps"] == STEPS
    assert [step["train/routing_known"] for step in run.metrics] == [1.0] * STEPS
