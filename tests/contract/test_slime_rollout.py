"""``use: slime:MODULE:NAME``: generate functions of slime, unchanged, make episodes; where slime is not installed,
too.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_serving import log_probs_of, scores
from tests.episode_kit import Client, stage, task
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.engines.responses import GenerationFailed
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.port import ProgramFailed
from tidemill.actors.episodes.programs.slime_generate import Slime, SlimeSample
from tidemill.actors.rollout_settings import SLIME, RolloutConfig
from tidemill.bus.section import Sections, read
from tidemill.bus.wire.codec import check_sample

HERE = "tests.slime_functions"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("slime") / "model", max_position_embeddings=1024)


async def made(model_dir: Path, name: str) -> tuple[Any, Any]:
    """Play one episode; return its sample, and that of the function."""
    program = Slime(f"{HERE}:{name}", {"hf_checkpoint": str(model_dir)})
    seen = importlib.import_module(HERE).SEEN
    seen.clear()

    async def run(client: Client) -> Any:
        return await program.run(client.task, client.base_url, client.api_key)

    async with stage(model_dir, run) as scene:
        sample = (await scene.rollout.sample(task(), 2, "n0")).sample
    check_sample(sample)
    return sample, seen[0] if seen else None


async def test_tokens_masks_and_log_probs_are_those_of_the_function_and_of_the_model(model_dir: Path) -> None:
    sample, own = await made(model_dir, "by_ids")
    assert sample.tokens.tolist() == own.tokens and sample.response_length == own.response_length
    assert sample.loss_mask.tolist() == own.loss_mask and 0 in own.loss_mask
    np.testing.assert_allclose(sample.rollout_log_probs, own.rollout_log_probs, atol=1e-6)
    assert sample.reward == {"score": 0.5, "form": 1.0}
    assert (sample.status.value, own.status.value) == ("truncated", "truncated"), (
        "its last answer was cut at max_new_tokens"
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids, length = sample.tokens.tolist(), sample.response_length
    want = log_probs_of((await scores(model, ids[:-length], ids[-length:])) / 0.8, ids[-length:])
    mask = sample.loss_mask == 1
    np.testing.assert_allclose(sample.rollout_log_probs[mask], want[mask], atol=1e-4)


async def test_text_becomes_the_ids_that_were_sampled(model_dir: Path) -> None:
    sample, own = await made(model_dir, "by_text")
    assert sample.turns is not None and len(sample.turns.at) == 2 and len(sample.sizes) == 1
    assert sample.loss_mask.sum() == sample.turns.tokens.sum() <= 12
    assert own.metadata == {"topic": "sums", "evaluation": False} and own.label == "seven" and own.index == 5 * 4 + 2


async def test_several_samples_are_one_episode_with_the_sum_of_their_rewards(model_dir: Path) -> None:
    sample, _ = await made(model_dir, "several")
    assert sample.reward == 0.75 and sample.turns is not None and len(sample.turns.at) == 2


@pytest.mark.parametrize(("name", "complaint"), [("aborted", "status aborted"), ("wrong_key", "401")])
async def test_a_function_that_fails_fails_the_episode(model_dir: Path, name: str, complaint: str) -> None:
    with pytest.raises(GenerationFailed, match=complaint):
        await made(model_dir, name)


async def test_it_runs_in_a_child_and_what_is_no_generate_function_is_refused_at_the_start() -> None:
    found = read(Sections[RolloutConfig], {"a": {"use": f"slime:{HERE}:by_text"}}, "rollouts")["a"]
    assert (found.program, found.module, found.arguments("models/m")) == (SLIME, HERE, {"generate": f"{HERE}:by_text"})
    async with Children(found) as children:
        await children.load()
    for name, complaint in (
        ("plain", "want an async function"),
        ("short", "want a function of"),
        ("nothing", "nothing"),
    ):
        async with Children(RolloutConfig(use=f"slime:{HERE}:{name}")) as children:
            with pytest.raises(ProgramFailed, match=complaint):
                await children.load()


async def test_an_interpreter_that_has_nothing_of_ours(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packages are found by their path alone, without the files in which an installation names ours."""
    (tmp_path / "functions").mkdir()
    shutil.copy(importlib.import_module(HERE).__file__, tmp_path / "functions/of_slime.py")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'functions'}:{Path(aiohttp.__file__).parents[1]}")
    found = read(Sections[RolloutConfig], {"a": {"use": "slime:of_slime:by_ids", "python": str(python)}}, "rollouts")[
        "a"
    ]
    async with Children(replace(found, options={"args": {"hf_checkpoint": str(model_dir)}})) as children:
        await children.load()

        async def run(client: Client) -> Any:
            return (
                await children.run("e", base_url=client.base_url, api_key=client.api_key, task=dict(client.task))
            ).value

        async with stage(model_dir, run) as scene:
            sample = (await scene.rollout.sample(task(), 2, "n0")).sample
    assert sample.reward == {"score": 0.5, "form": 1.0} and 0 in sample.loss_mask


def test_tokens_are_added_as_slime_does() -> None:
    sample = SlimeSample()
    sample.append_response_tokens(
        tokens=[1, 2], log_probs=[-1.0, -2.0], text="ab", meta_info={"finish_reason": {"type": "length"}}
    )
    sample.append_response_tokens(tokens=[3], trainable=False, text="c")
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3], [1, 1, 0], [-1.0, -2.0, 0.0])
    assert (sample.response, sample.response_length, sample.status.value) == ("abc", 3, "truncated")
    with refusal(ValueError, place="log_probs", got="None"):
        sample.append_response_tokens(tokens=[4])
