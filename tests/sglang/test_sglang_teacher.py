"""A real SGLang server as a teacher: its scores of given tokens, and a temperature that it does not score at."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine_serving import log_probs_of, scores
from tests.learner_steps import make_samples
from tests.refusals import refusal
from tests.sglang.server import serving
from tidemill.actors.config import ActorConfig
from tidemill.actors.teachers import TeacherFailed, Teachers
from tidemill.bus.wire.messages import Sampling
from tidemill.launch.cli.main import main

TOLERANCE = 1e-3
"""Tolerance of log-probs, in fp32 on both sides."""


async def test_sglang_scores_given_tokens_at_temperature_1_alone(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    samples = make_samples(vocab=290)
    async with serving(python, server, directories[0]):  # the weights of version 0
        teachers = Teachers(ActorConfig(teachers={"big": {"url": server}}, teacher_top_k=4, teacher_attempts=1))
        try:
            found = await asyncio.gather(*(teachers.score(sample, {}) for sample in samples))
            warm = replace(samples[0], sampling=Sampling(temperature=0.7))
            with refusal(TeacherFailed, reason=re.compile(r"\b1, .*\b0\.7;")):
                await teachers.score(warm, {})
        finally:
            await teachers.close()
    for sample in found:
        prompt, response = (
            sample.tokens[: -sample.response_length].tolist(),
            sample.tokens[-sample.response_length :].tolist(),
        )
        want_RV = await scores(models[0], prompt, response)
        assert sample.teacher_log_probs is not None and sample.teacher_top_log_probs is not None
        np.testing.assert_allclose(sample.teacher_log_probs, log_probs_of(want_RV, response), atol=TOLERANCE)
        top = want_RV.log_softmax(-1).topk(4, -1)
        np.testing.assert_allclose(sample.teacher_top_log_probs, top.values.flatten(), atol=TOLERANCE)
        assert sample.teacher_top_k == 4


async def test_debug_score_asks_a_real_server_and_compare_names_a_difference(
    python: str, server: str, directories: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log-probs are those of the directory that it serves, and not those of another."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[5, 9, 33, 77, 120, 4, 8]\n[17, 3, 200]\n")
    words = ["debug", "score", "--prompts", str(prompts), "--out"]
    ours, theirs, other = (str(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs", "other"))
    async with serving(python, server, directories[0]):  # the weights of version 0
        assert await asyncio.to_thread(main, [*words, theirs, "--engine", server]) == 0
    assert await asyncio.to_thread(main, [*words, ours, "--model", str(directories[0]), "--by", "engine"]) == 0
    assert await asyncio.to_thread(main, [*words, other, "--model", str(directories[1]), "--by", "engine"]) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["debug", "compare", ours, theirs]) == 0
    assert await asyncio.to_thread(main, ["debug", "compare", other, theirs]) == 1
    assert "DIFFERS first in log_probs" in capsys.readouterr().out
