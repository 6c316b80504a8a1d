"""Families of ``tests.families`` on SGLang: which it has, and exports and pushes of those that it serves on a CPU."""

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine_kinds import sglang_server
from tests.engine_push import joined
from tests.engine_serving import log_probs_of, scores, told_log_probs
from tests.families import (
    FAMILIES,
    ON_CPU,
    PAGE,
    SGLANG,
    config_of,
    family_model,
    page_rows,
    sglang_cells,
    write_family,
)
from tests.integration import fsdp_family_ranks
from tests.learner_steps import run_ranks
from tests.sglang.server import ENVIRONMENT, config, serving
from tests.tiny_models import write_tiny_tokenizer
from tidemill.actors.serving.sglang.registry import Registry, find_refusal, read_registry

REGISTRY = """
import json, logging, sys
from sglang.srt.models.registry import ModelRegistry
print(json.dumps(sorted(ModelRegistry.get_supported_archs())))
"""
PROMPT = [5, 6, 7, 8, 9]
LOG_PROBS = 5e-5
"""Largest difference of a log-prob in float32, in nats."""


@pytest.fixture(scope="module")
def registry(python: str) -> Registry:
    registry = read_registry(config(python).sglang)
    assert registry is not None and registry.release == SGLANG
    return registry


def test_the_page_names_the_families_that_sglang_serves(registry: Registry) -> None:
    rows = page_rows(PAGE.read_text())
    assert {name: cells[-2:] for name, cells in rows.items()} == {
        name: sglang_cells(name, registry) for name in FAMILIES
    }


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "mistral"])
def test_a_window_that_sglang_ignores_is_refused(python: str, name: str) -> None:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FAMILIES[name][0]]
    values = {**config_of(name).to_dict(), "architectures": [architecture]}
    refusal = find_refusal(values, config(python).sglang, context=512)
    # No attention backend of a CPU has the chunks of llama4.
    refused = {"mistral": "sliding_window", "llama4": "attention_chunk_size"}
    assert (refusal and refusal.key) == refused.get(name)
    assert find_refusal(values, config(python).sglang, context=16) is None


@pytest.mark.parametrize(
    ("architecture", "backend", "is_refused"),
    [
        ("Llama4ForConditionalGeneration", "fa3", False),
        ("Llama4ForConditionalGeneration", "triton", True),
        ("Llama4ForCausalLM", "fa3", True),  # whose chunks SGLang computes for the other class alone
        ("Gemma3ForCausalLM", "triton", False),
        ("Gemma3ForCausalLM", "flashinfer", False),
        ("Gemma3ForCausalLM", "flex_attention", True),
    ],
)
def test_a_window_that_an_attention_backend_ignores_is_refused(
    python: str, architecture: str, backend: str, *, is_refused: bool
) -> None:
    name = "gemma3" if "Gemma" in architecture else "llama4"
    values = {**config_of(name).to_dict(), "architectures": [architecture]}
    settings = replace(config(python).sglang, arguments={"attention_backend": backend})
    refusal = find_refusal(values, settings, context=512)
    assert (refusal is not None) == is_refused
    assert refusal is None or (backend in refusal.want and "engine.max_context" in refusal.cure)


@pytest.mark.slow
def test_the_names_are_those_of_sglangs_registry(registry: Registry, python: str) -> None:
    """But for the modules that it cannot import on this machine, and leaves out."""
    done = subprocess.run(
        [python, "-c", REGISTRY], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    imported, logged = set(json.loads(done.stdout.splitlines()[-1])), done.stdout + done.stderr
    assert imported <= registry.architectures
    left_out = [line for line in logged.splitlines() if "Ignore import error when loading sglang.srt.models" in line]
    assert bool(left_out) == bool(registry.architectures - imported)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_an_export_of_two_ranks_is_served_and_pushed_to_by_the_names_of_files(
    python: str, tmp_path: Path, name: str
) -> None:
    """Experts, too: one tensor of each, or of all of them, as in the family's files."""
    exports = tmp_path / "ranks"
    exports.mkdir()
    run_ranks(fsdp_family_ranks.main, ([write_family(tmp_path / name, name)],), world=2, out=exports)
    directory = write_tiny_tokenizer(exports / name)
    models = [family_model(name, seed=seed) for seed in range(2)]

    async def pushed(url: str) -> None:
        async with serving(python, url, directory) as served, joined(served) as push:
            for version, model in enumerate(models):
                if version:
                    await push.whole(model, version)
                answer = await served.generate(PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)
                tokens = answer["output_ids"]
                scores_RV = await scores(model, PROMPT, tokens)
                assert tokens == scores_RV.argmax(-1).tolist()
                assert np.abs(told_log_probs(answer) - log_probs_of(scores_RV, tokens)).max() < LOG_PROBS

    with sglang_server(python, directory, tmp_path / "sglang.log", dtype="float32") as url:
        asyncio.run(pushed(url))
