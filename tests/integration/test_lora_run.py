"""Real ranks that train adapters, on a real feeder and a real bus: killed and resumed, saved, begun with adapters of a
directory.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.test_megatron_lora import with_adapter
from tests.integration.test_megatron_rank import SHARES, OpenLearner, open_learner  # noqa: F401
from tests.integration.test_weightstore_publisher import state
from tests.receiver_app import digest
from tidemill.learner.settings.lora import LoraConfig
from tidemill.weightstore.store.registry import VersionRegistry

LORA = LoraConfig(rank=2, alpha=4, targets=("q_proj", "v_proj", "down_proj"))


def assert_merged(directory: Path, model_dir: Path) -> None:
    """The saved weights are those of the model with the saved adapters, and others than the model's."""
    merged, by_hand = (
        load_file(directory / "model.safetensors"),
        dict(with_adapter(model_dir, directory / "adapter").named_parameters()),
    )
    base, changed = load_file(model_dir / "model.safetensors"), set()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, by_hand[name].data, atol=1e-6, rtol=0)
        changed |= set() if torch.equal(tensor, base[name]) else {name.split(".")[-2]}
    assert changed == set(LORA.targets)
    assert json.loads((directory / "adapter" / "adapter_config.json").read_text())["target_modules"] == sorted(
        LORA.targets
    )


async def test_a_killed_rank_with_adapters_resumes_and_its_models_are_kept(
    open_learner: OpenLearner,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Two replicas with shares of the optimizer's state, versions rarer than steps: the same bits again, and the models
    that are due.
    """
    saving: dict[str, Any] = {"save_hf_every": 3, "keep_hf": 2, "keep_checkpoints": 2}
    async with open_learner(
        staleness={"max_lag": 2}, weights={"push_every": 2}, steps=16, checkpoint_every=8, lora=LORA, **SHARES, **saving
    ) as learner:
        async with learner.started(steps=11):
            await learner.until(10)
            for rank in learner.ranks:
                rank.kill()
            await learner.ended()
        await learner.finish()
        digests = await learner.digests()
        assert sorted(digests) == list(range(1, 17)) and any(len(same) == 2 for same in digests.values())
        assert all(len(set(same)) == 1 for same in digests.values()), digests
    assert_merged(tmp_path / "final", tmp_path / "model")
    # 12 and 15 are due, 16 has a checkpoint, as 8 has: the two newest stay, and those with a checkpoint.
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["step-15", "step-16", "step-8"]
    assert_merged(tmp_path / "models" / "step-15", tmp_path / "model")
    last, final = (load_file(tmp_path / name / "model.safetensors") for name in ("models/step-16", "final"))
    assert digest(last) == digest(final)


async def test_a_run_that_begins_with_adapters_publishes_them_first(open_learner: OpenLearner, tmp_path: Path) -> None:  # noqa: F811
    async with open_learner(steps=2, lora=LORA) as first:
        await first.finish()
        saved = load_file(tmp_path / "final" / "model.safetensors")
        adapter = replace(LORA, adapter=str(tmp_path / "final" / "adapter"))
        async with first.followed(steps=3, lora=adapter) as (second, engine):
            bus = second.world.bus
            async with second.started_without_actors():
                async with asyncio.timeout(300), second.world.actors():
                    assert await second.ended() == [0]
                await second.feeding
                told = await asyncio.to_thread(state, engine)
            assert await VersionRegistry(bus).steps() == {1: 0, 2: 1, 3: 2, 4: 3}
            assert min([task.min_version async for task in bus.tasks.scan(1)]) == 1
            assert told["ended"][0] == 1 and told["digest"] != digest(saved)
