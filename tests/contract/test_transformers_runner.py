"""The runner over transformers, for families that the engine's decoder lacks: rows that join and leave, scores of given
tokens, weights by the names of the files, and pushes between two tokens, against plain forward passes.
"""

import json
import sys
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine_serving import serving
from tests.examples import THOROUGH
from tests.families import FAMILIES, KINDS, family_model, write_family
from tests.forked import completed
from tests.refusals import refusal
from tests.tiny_models import as_released, write_tiny_model
from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import NotDecoded, UnsupportedModel, UpdateRefused
from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin.batch import Batch
from tidemill.actors.serving.builtin.blocks import BLOCK, RowSizes, budget
from tidemill.actors.serving.builtin.engine import OpenedModel, open_model
from tidemill.actors.serving.builtin.input_scores import Scoring
from tidemill.actors.serving.builtin.row_sizes import read_row_sizes, sizes_on_meta
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest, Sequence
from tidemill.actors.serving.builtin.shape import ModelShape, choose_runner
from tidemill.actors.serving.builtin.transformers_cache import RowCache, probe, row_sizes
from tidemill.actors.serving.builtin.transformers_runner import TransformersRunner
from tidemill.actors.serving.builtin.weights import WeightSet, load_from_bucket, load_from_directory
from tidemill.weightstore.format.manifest import Bucket, spec_of

NEAR = 2e-5
VOCABULARY = 512
EVERY = [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def opened(directory: Path, **settings: Any) -> OpenedModel:
    return open_model(directory, EngineConfig(device="cpu", **{"runner": "transformers", "kv_tokens": 640} | settings))


def requests(lengths: Items[int], new_tokens: Items[int]) -> list[Sequence]:
    random = np.random.default_rng(5)
    prompts = [random.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    prompts[-1] = prompts[0]  # the last one has the first one's prompt
    return sequences_of(prompts, new_tokens)


def sequences_of(prompts: Items[np.ndarray], new_tokens: Items[int]) -> list[Sequence]:
    model = Model(eos_ids=frozenset(), max_context=512, text=None)
    return [
        Sequence(
            ResponseRequest(
                rid=str(seed),
                prompt=prompt,
                params=SamplingParams(max_new_tokens=count, temperature=1.0, ignore_eos=True),
                seed=seed,
            ),
            model=model,
            sink=lambda *_: None,
        )
        for seed, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]


@torch.inference_mode()
def step(batch: Batch) -> None:
    batch.admit()
    if batch.running:
        batch.decode()


def finish(batch: Batch) -> None:
    while batch.running or batch.waiting:
        step(batch)


@torch.inference_mode()
def log_probs(model: Any, tokens: np.ndarray) -> Tensor:
    """Return the log-probs behind each token of one sequence, by one forward pass without a cache, [T, V]."""
    ids_1T = torch.from_numpy(tokens.astype(np.int64))[None]
    logits_TV: Tensor = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    return logits_TV.log_softmax(-1)


def check(sequence: Sequence, model: Any) -> None:
    """Compare the log-probs of a response with one forward pass over all of its tokens."""
    assert sequence.error is None and len(sequence.tokens) == sequence.max_new_tokens
    context, first = sequence.context(), len(sequence.prompt)
    of_tokens = log_probs(model, context)[first - 1 : -1].gather(1, torch.from_numpy(context[first:, None]).long())
    np.testing.assert_allclose(sequence.log_probs, of_tokens[:, 0], atol=NEAR, rtol=0)


@pytest.mark.parametrize("name", EVERY)
def test_rows_join_and_leave_at_any_token_each_at_its_own_position(name: str, tmp_path: Path) -> None:
    """Three rows for seven sequences, with room for fewer tokens than they have together."""
    model = opened(write_family(tmp_path, name), kv_tokens=160)
    batch = Batch(model.runner, max_running=3, share_prefix=True, version=0)
    sequences = requests((5, 12, 31, 20, 1, 31, 5), (20, 9, 60, 75, 30, 12, 20))
    batch.waiting.extend(sequences)
    finish(batch)
    assert batch.counters.preemptions > 0 and batch.pool.available == batch.pool.num_blocks == 10
    reference = family_model(name)
    for sequence in sequences:
        check(sequence, reference)


@pytest.mark.parametrize("name", EVERY)
def test_a_later_prompt_begins_with_known_blocks(name: str, tmp_path: Path) -> None:
    """The next turn of an episode continues its blocks, and another prompt with the same beginning shares them; where
    a family has states, both are computed whole.
    """
    model = opened(write_family(tmp_path, name))
    batch, reference = Batch(model.runner, max_running=4, share_prefix=True, version=0), family_model(name)
    (first,) = requests((45,), (20,))
    batch.waiting.append(first)
    finish(batch)
    whole, known = first.context(), (len(first.context()) - 1) // BLOCK * BLOCK
    prompts = [np.concatenate([whole, whole[:7]]), np.concatenate([whole[: 2 * BLOCK], whole[:3]]), whole[5:11]]
    later = sequences_of(prompts, (9, 9, 9))
    batch.waiting.extend(later)
    before = batch.counters.prefill_tokens
    finish(batch)
    shared = known + 2 * BLOCK if model.runner.finds_prefixes else 0
    assert batch.counters.prefill_tokens - before == sum(map(len, prompts)) - shared
    for sequence in (first, *later):
        check(sequence, reference)


@pytest.mark.parametrize("name", EVERY)
def test_given_tokens_have_the_log_probs_of_a_forward_pass(name: str, tmp_path: Path) -> None:
    runner, reference = opened(write_family(tmp_path, name)).runner, family_model(name)
    random = np.random.default_rng(2)
    batch = [
        Scoring(
            tokens=random.integers(3, VOCABULARY, length).astype(np.int32), start=start, temperature=0.7, top_k=top_k
        )
        for length, start, top_k in ((30, 0, 3), (41, 17, 0), (12, 11, 2))
    ]
    with torch.inference_mode():
        results = runner.scores(batch, 4)
    for scoring, result in zip(batch, results, strict=True):
        tempered_TV = (log_probs(reference, scoring.tokens) / 0.7).log_softmax(-1)[scoring.start : -1]
        targets_P1 = torch.from_numpy(scoring.tokens[scoring.start + 1 :, None]).long()
        np.testing.assert_allclose(result.log_probs_P, tempered_TV.gather(1, targets_P1)[:, 0], atol=NEAR, rtol=0)
        top = tempered_TV.topk(scoring.top_k, -1)
        np.testing.assert_allclose(result.top_log_probs_PK, top.values, atol=NEAR, rtol=0)
        assert result.version == 4


def filled(weights: WeightSet, directory: Path) -> WeightSet:
    """Return another set with the tensors of a directory, received in buckets of five tensors."""
    another, tensors = weights.empty_copy(()), sorted(load_file(directory / "model.safetensors").items())
    for first in range(0, len(tensors), 5):
        part = tensors[first : first + 5]
        specs = tuple(spec_of(name, tensor) for name, tensor in part)
        message = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in part])
        load_from_bucket(another, Bucket(specs=specs, num_bytes=len(message)), message)
    another.finalize()
    return another


@pytest.mark.parametrize("name", EVERY)
def test_files_of_a_second_model_give_that_model(name: str, tmp_path: Path) -> None:
    directories = [write_family(tmp_path / str(seed), name, seed=seed) for seed in range(2)]
    weights = opened(directories[0]).weights
    of_files = load_file(directories[1] / "model.safetensors")
    assert weights.named.keys() == of_files.keys() and weights.final
    assert all(weights.named[name].shape == tensor.shape for name, tensor in of_files.items())
    another, reference = filled(weights, directories[1]), opened(directories[1]).weights
    tokens = np.arange(3, 40)
    assert torch.equal(log_probs(another.model, tokens), log_probs(reference.model, tokens))  # type: ignore[attr-defined]
    assert all(torch.equal(another.named[name], tensor) for name, tensor in of_files.items())
    for directory in reversed(directories):
        load_from_directory(another, directory)
    assert torch.equal(log_probs(another.model, tokens), log_probs(weights.model, tokens))  # type: ignore[attr-defined]


def test_dense_layers_beside_experts_have_the_names_of_their_files(tmp_path: Path) -> None:
    files = as_released(write_family(tmp_path, "kimi_linear"))
    weights = opened(tmp_path).weights
    another = filled(weights, tmp_path)
    assert weights.named.keys() == another.named.keys() == files.keys()
    assert all(torch.equal(another.named[name], tensor) for name, tensor in files.items())


@torch.inference_mode()
def kept_log_probs(models: Items[tuple[Any, int]], sequence: Sequence) -> np.ndarray:
    """Return log-probs of a response whose weights changed on the way and whose cache was kept: ``models`` = (model,
    its number of tokens).
    """
    from transformers import DynamicCache

    cache, values = DynamicCache(config=models[0][0].config), []
    fed, targets = [sequence.prompt, *([token] for token in sequence.tokens)], iter(sequence.tokens)
    for model, count in models:
        for _ in range(count):
            ids = torch.tensor([list(map(int, fed.pop(0)))])
            scores_V = model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].float().log_softmax(-1)
            values.append(float(scores_V[next(targets)]))
    return np.array(values)


@pytest.mark.parametrize("name", EVERY)
def test_a_push_between_two_tokens_keeps_the_cache_and_begins_a_span(name: str, tmp_path: Path) -> None:
    directories = [write_family(tmp_path / str(seed), name, seed=seed) for seed in range(2)]
    model = opened(directories[0])
    batch = Batch(model.runner, max_running=4, share_prefix=True, version=0)
    sequences = requests((5, 31, 20, 5), (30, 24, 30, 30))
    batch.waiting.extend(sequences)
    for _ in range(10):
        step(batch)
    model.runner.weights = filled(model.weights, directories[1])
    batch.flip(1)
    (late,) = requests((7,), (20,))
    batch.waiting.append(late)
    finish(batch)
    references = [family_model(name, seed=seed) for seed in range(2)]
    for sequence in sequences:
        assert sequence.spans == [(0, 0), (1, 11)]  # a prefill gives the first token
        stretches = list(zip(references, (11, len(sequence.tokens) - 11), strict=True))
        np.testing.assert_allclose(sequence.log_probs, kept_log_probs(stretches, sequence), atol=NEAR, rtol=0)
    assert late.spans == [(1, 0)]
    check(late, references[1])


@pytest.mark.parametrize("name", EVERY)
def test_a_check_knows_the_bytes_of_rows_without_the_weights(name: str, tmp_path: Path) -> None:
    model = opened(write_family(tmp_path, name))
    sizes = sizes_on_meta(tmp_path, "float32")
    assert sizes == row_sizes(probe(model.weights.model), 512)  # type: ignore[attr-defined]
    assert sizes.token_bytes == model.runner.memory.size_bytes / 640
    assert 0 < sizes_on_meta(tmp_path, "bfloat16").token_bytes < sizes.token_bytes


def test_a_check_reads_the_bytes_of_rows_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not THOROUGH:
        monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)
    assert read_row_sizes(write_family(tmp_path / "lfm2", "lfm2")) == {
        dtype: sizes_on_meta(tmp_path / "lfm2", dtype) for dtype in ("float32", "bfloat16")
    }
    (tmp_path / "config.json").write_text('{"model_type": "of the future"}')
    monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)
    with pytest.raises(UnsupportedModel) as refused:
        read_row_sizes(tmp_path)
    assert refused.value.where == str(tmp_path / "config.json")


class Unpadded(RowCache):
    """A cache that hides the padding of short rows from the model."""

    def begin_step(self, positions_N: np.ndarray) -> None:
        super().begin_step(positions_N)


def test_a_model_that_decodes_rows_wrongly_is_refused_at_the_start(tmp_path: Path) -> None:
    model = opened(write_family(tmp_path, "olmo3"))
    runner, weights = model.runner, model.weights
    assert isinstance(runner, TransformersRunner) and runner.self_test() < NEAR
    runner.memory = Unpadded(probe(weights.model), num_blocks=10)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel) as refused:
        runner.self_test()
    assert refused.value.where == "model_type olmo3"


def test_a_model_that_leaves_the_cache_empty_is_refused(tmp_path: Path) -> None:
    """RWKV has states of its own, under another argument."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    config = AutoConfig.for_model("rwkv", **sizes, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with refusal(UnsupportedModel, where="model_type rwkv") as refused:
        opened(tmp_path)
    assert refused.value.where == "model_type rwkv"


def test_states_of_rows_take_memory_from_the_blocks_and_are_bounded() -> None:
    sizes = RowSizes(token_bytes=10, state_bytes=100, max_positions=64)
    limits = {"max_running": 4, "max_context": 0, "kv_tokens": 0}
    assert budget(sizes, **limits, memory_bytes=0) == 4 * 64 // BLOCK
    assert budget(sizes, **limits, memory_bytes=4 * (800 + 3 * 10 * BLOCK)) == 3
    with pytest.raises(UnsupportedModel) as refused:
        budget(sizes, **limits, memory_bytes=4 * 800)
    assert refused.value.where == "engine.max_running" and refused.value.reason.startswith("want <= 3: ")


def test_the_decoder_keeps_its_families_and_transformers_runs_the_others(tmp_path: Path) -> None:
    ours = write_tiny_model(tmp_path / "qwen3", "qwen3", tied=False)
    other = write_family(tmp_path / "olmo3", "olmo3")
    for setting, directory, is_decoder in (
        ("auto", ours, True),
        ("auto", other, False),
        ("decoder", ours, True),
        ("transformers", ours, False),
    ):
        shape, _ = choose_runner(setting, lambda directory=directory: ModelShape.read(directory))
        assert (shape is not None) is is_decoder
    with pytest.raises(NotDecoded):
        choose_runner("decoder", lambda: ModelShape.read(other))


def test_other_tensors_of_the_files_may_be_sent_and_are_not_kept(tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = opened(tmp_path).weights
    assert dict(weights.unused) == {"model.layers.4.eh_proj.weight": (64, 128)}
    assert weights.named.keys() == tensors.keys()
    another = filled(weights, tmp_path)
    load_from_directory(another, tmp_path)
    assert another.named.keys() == tensors.keys()


def test_a_model_that_lacks_tensors_or_is_quantised_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "olmo3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UpdateRefused):
        opened(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModel) as refused:
        opened(tmp_path)
    assert refused.value.where.endswith("quantization_config")


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    write_family(tmp_path, "olmo3")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle, which reading it would tell")
    with pytest.raises(UnsupportedModel) as refused:
        opened(tmp_path)
    assert refused.value.where == str(tmp_path)


def test_an_engine_without_the_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path, "olmo3")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModel) as refused:
        opened(tmp_path)
    assert refused.value.where == str(tmp_path) and "pip install" in refused.value.reason


def test_a_context_ends_where_longrope_would_turn_all_rows(tmp_path: Path) -> None:
    """Rows of one decoding step have the angles of the longest one."""
    write_family(tmp_path, "phi3")
    config = json.loads((tmp_path / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    config["rope_parameters"] |= {"rope_type": "longrope", "original_max_position_embeddings": 64} | factors
    (tmp_path / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": 64}))
    assert opened(tmp_path).facts.max_positions == 64
    assert sizes_on_meta(tmp_path, "float32").max_positions == 64


async def test_an_adapter_is_refused_and_not_announced(tmp_path: Path) -> None:
    async with serving(write_family(tmp_path, "lfm2"), max_running=4) as served:
        assert not served.engine.capabilities.adapters
        status, answer = await served.post("/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path)})
        assert status == 400, answer
