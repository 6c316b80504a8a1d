"""Results of tools in episodes of a real engine: the learner does not train them, and a learner that did would end
elsewhere.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.episode_kit import Client, stage, task
from tests.integration.test_megatron_trainer import make  # noqa: F401 - a fixture
from tests.learner_steps import make_batches
from tests.tiny_models import write_tiny_model
from tidemill.actors.episodes.programs.multi_turn import MultiTurn
from tidemill.bus.wire.messages import Sample

HERE = "tests.integration.test_tool_tokens"


def told(text: str) -> str:
    """Say something."""
    return "the tool says so"


async def episodes(model: Path) -> list[Sample]:
    """Return a group of episodes in which the tool is called after each answer but the last, with rewards that
    differ.
    """
    rollout = MultiTurn(tools=[f"{HERE}:told"], protocol="text", call=r"([\s\S]*)", max_turns=3)

    async def program(client: Client) -> Any:
        await rollout.run(client.task, client.base_url, client.api_key)
        return float(client.task["index"] % 2)

    async with stage(model, program) as scene:
        return [replace((await scene.rollout.sample(task(), index, "n0")).sample, group_size=4) for index in range(4)]


async def test_tool_tokens_are_not_trained(make: Any, tmp_path: Path) -> None:  # noqa: F811
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    samples = await episodes(model)
    tool = [one.loss_mask == 0 for one in samples]
    assert all(mask.any() and not one.rollout_log_probs[mask].any() for one, mask in zip(samples, tool, strict=True))

    def trained(given: list[Sample]) -> tuple[dict[str, float], str]:
        trainer, policy, _, _ = make(model=model, with_proximal=False)
        return trainer.train(make_batches(given, step=1)[0]), policy.digest()

    metrics, weights = trained(samples)
    assert (
        metrics["train/tokens"] == sum(int(one.loss_mask.sum()) for one in samples) and metrics["train/grad_norm"] > 0
    )
    others = [
        replace(one, rollout_log_probs=np.where(mask, np.float32(-3.0), one.rollout_log_probs))
        for one, mask in zip(samples, tool, strict=True)
    ]
    unread, same = trained(others)
    assert same == weights and unread["train/grad_norm"] == metrics["train/grad_norm"], (
        "log-probs of tool tokens are not read"
    )
    unmasked, moved = trained([replace(one, loss_mask=np.ones_like(one.loss_mask)) for one in samples])
    assert unmasked["train/tokens"] == sum(one.response_length for one in samples)
    assert moved != weights and unmasked["train/grad_norm"] != pytest.approx(metrics["train/grad_norm"], rel=1e-3)
