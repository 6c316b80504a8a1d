"""Ranks that share a model, and each send their part of it: the engine, the saved models and the final one have the same bits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_lora_run import LORA, assert_merged
from tests.integration.test_megatron_rank import OpenLearner, open_learner  # noqa: F401
from tests.integration.test_weightstore_publisher import state
from tests.receiver_app import Behaviour, digest, receivers
from tests.tiny_models import write_tiny_model

MIXTURE = {"family": "qwen3_moe", "num_hidden_layers": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "tp2, adapters": ({"tensor_parallel": 2, "lora": LORA}, {}, {}, 2),
    "tp2, one sender": ({"tensor_parallel": 2}, {}, {"senders_per_stage": 1}, 1),
    "pp2": ({"pipeline_parallel": 2}, {}, {"verify": "always"}, 2),
    "ep2": ({"data_parallel": 2, "expert_parallel": 2}, MIXTURE, {"verify": "always"}, 2),
    "tp2 x pp2": ({"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}, {"num_hidden_layers": 4}, {}, 4),
}
"""Settings of the learner, of the model and of the pushes, and ranks that send."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in ("tp2, one sender", "tp2 x pp2") else []) for name in LAYOUTS]
)
async def test_ranks_that_share_the_model_push_and_save_what_they_train(
    open_learner: OpenLearner,  # noqa: F811
    tmp_path: Path,
    layout: str,
) -> None:
    settings, model, weights, senders = LAYOUTS[layout]
    write_tiny_model(tmp_path / "model", vocab_size=300, **model)
    async with open_learner(steps=4, save_hf_every=2, weights=weights, **settings) as learner:
        here = receivers(learner.world.url, learner.world.run, {"good": Behaviour()})
        engines = await asyncio.to_thread(here.__enter__)
        try:
            await learner.finish()
            told = await asyncio.to_thread(state, engines["good"][0])
        finally:
            await asyncio.to_thread(here.__exit__, None, None, None)
    assert (told["version"], told["asked"]) == (4, 4 if weights.get("verify") == "always" else 1)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["step-2", "step-4"]
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert told["digest"] == digest(final) == digest(load_file(tmp_path / "models" / "step-4" / "model.safetensors"))
    assert digest(load_file(tmp_path / "models" / "step-2" / "model.safetensors")) != digest(final)
    assert final.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    served = [
        rank for rank in range(learner.world.learner.num_ranks) if "part of the weights" in (tmp_path / f"rank-{rank}.log").read_text()
    ]
    assert served == list(range(1, senders))
    if "lora" in settings:
        for name in ("final", "models/step-2", "models/step-4"):
            assert_merged(tmp_path / name, tmp_path / "model")
