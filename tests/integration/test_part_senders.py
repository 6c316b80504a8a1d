"""Ranks that share a model, and each send their part of it: the engine, the saved models and the final one have the
same bits.
"""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from tests.integration.test_lora_run import LORA, assert_merged
from tests.integration.test_megatron_rank import OpenLearner, open_learner  # noqa: F401
from tests.integration.test_weightstore_publisher import state
from tests.receiver_app import Behaviour, digest, receivers
from tests.tiny_models import write_tiny_model
from tests.waits import until
from tidemill.learner.settings.lora import LoraConfig
from tidemill.weightstore.store.registry import VersionRegistry

PART = re.compile(r"part of the weights rank=\d+ tensors=(\d+)")
OF_EXPERTS = LoraConfig(rank=2, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
MIXTURE = {"family": "qwen3_moe", "num_hidden_layers": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "tp2, adapters": ({"tensor_parallel": 2, "lora": LORA}, {}, {}, 1),
    "tp2, one sender": ({"tensor_parallel": 2}, {}, {"senders_per_stage": 1}, 1),
    "pp2": ({"pipeline_parallel": 2}, {}, {"verify": "always"}, 2),
    "ep2": ({"data_parallel": 2, "expert_parallel": 2}, MIXTURE, {"verify": "always"}, 2),
    "fsdp on 2": ({"backend": "fsdp", "data_parallel": 2}, {}, {"verify": "always"}, 2),
    "fsdp, 2 copies": ({"backend": "fsdp", "data_parallel": 2, "fsdp_replicas": 2}, {}, {"verify": "always"}, 1),
    "fsdp on 2, adapters": ({"backend": "fsdp", "data_parallel": 2, "lora": LORA}, {}, {}, 1),
    "fsdp on 2, adapters of experts": ({"data_parallel": 2, "lora": OF_EXPERTS}, MIXTURE, {"verify": "always"}, 2),
    "tp2 x pp2": (
        {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
        {"num_hidden_layers": 4},
        {},
        4,
    ),
}
"""Settings of the learner, of the model and of the pushes, and ranks that send."""
SLOW = (
    "pp2",
    "tp2, one sender",
    "tp2 x pp2",
    "fsdp, 2 copies",
    "fsdp on 2, adapters",
    "fsdp on 2, adapters of experts",
)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
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
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(learner.world.learner.num_ranks)]
    parts = {rank: found for rank, log in enumerate(logs) if (found := PART.search(log))}
    assert list(parts) == list(range(1, senders))
    assert 0 <= sum(int(part[1]) for part in parts.values()) < len(final)
    assert all(int(part[1]) > 0 for part in parts.values())
    assert ("merged weights are pushed, not adapters" in logs[0]) is (settings.get("lora") is OF_EXPERTS)
    if settings.get("lora") is LORA:
        for name in ("final", "models/step-2", "models/step-4"):
            assert_merged(tmp_path / name, tmp_path / "model")


async def test_ranks_that_leave_together_end_the_push_under_way(open_learner: OpenLearner, tmp_path: Path) -> None:  # noqa: F811
    """The engine is stopped in the middle of the push of step 2, behind which there is none, until both ranks are
    drained, and goes on.
    """
    write_tiny_model(tmp_path / "model", vocab_size=300)
    weights = {"bucket_bytes": 8_000, "phase_deadline_s": 600.0}
    async with open_learner(pipeline_parallel=2, steps=200, checkpoint_every=50, weights=weights) as learner:
        here = receivers(
            learner.world.url,
            learner.world.run,
            {"stopped": Behaviour(fails="stop", at="bucket", once_served=1, only_once=True)},
        )
        engines = await asyncio.to_thread(here.__enter__)
        url, engine = engines["stopped"]
        try:
            async with learner.started(steps=2):
                await until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED)
                for rank in learner.ranks:  # both wait for a batch: neither leaves before the other has its signal
                    rank.send_signal(signal.SIGTERM)
                for number in range(2):
                    await until(
                        lambda number=number: f"drained rank={number}" in (tmp_path / f"rank-{number}.log").read_text()
                    )
                engine.send_signal(signal.SIGCONT)
                assert await learner.ended() == [0, 0]
            head = await VersionRegistry(learner.world.bus).head()
            told = await asyncio.to_thread(state, url)
        finally:
            await asyncio.to_thread(here.__exit__, None, None, None)
    assert head is not None and (head.version, told["version"], told["ended"]) == (2, 2, [1, 2])
    assert "evicted engine" not in (tmp_path / "rank-0.log").read_text()
