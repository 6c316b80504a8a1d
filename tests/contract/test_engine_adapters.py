"""Adapters beside the weights of the built-in engine against the same adapters merged into the weights: scores, rows of
several adapters in one batch, and keys and values that belong to the adapter that wrote them.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.adapters import TARGETS, adapter, weights_of, with_adapter
from tests.engine_decoding import load
from tests.engine_serving import serving
from tests.tiny_models import SERVED, write_tiny_model
from tidemill.actors.errors import UpdateRefused
from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.blocks import BlockTable
from tidemill.actors.serving.builtin.input_scores import without_cache
from tidemill.actors.serving.builtin.lora import Adapter, AdapterRows, IncomingAdapter
from tidemill.actors.serving.builtin.runner import DecoderRunner
from tidemill.actors.serving.builtin.scheduler import OTHER_WEIGHTS
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest
from tidemill.actors.serving.builtin.sequence import Sequence as Response
from tidemill.actors.serving.builtin.weights import Weights
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.adapters import AdapterHeader, read_directory

SCALE = 1.5


def received(weights: Weights, matrices: dict[str, Tensor]) -> Adapter:
    """Return an adapter as a push brings it."""
    header = AdapterHeader(scale=SCALE, num_tensors=len(matrices))
    incoming = IncomingAdapter(header, weights.shape, dtype=weights.dtype, device=weights.device)
    incoming.load(matrices)
    return incoming.built()


def merged(weights: Weights, directory: Path, matrices: dict[str, Tensor]) -> Weights:
    """Return the same weights with the adapter merged into them."""
    merged_weights = Weights(weights.shape, dtype=weights.dtype, device=weights.device)
    tensors = with_adapter(weights_of(directory), matrices, SCALE)
    for name, tensor in merged_weights.named.items():
        tensor.copy_(tensors[name])
    merged_weights.finalize()
    return merged_weights


def log_probs(weights: Weights, tokens_BT: Tensor, uses: Sequence[AdapterRows] = ()) -> Tensor:
    angles = decoder.RopeTable(weights, tokens_BT.shape[1]).at(torch.arange(tokens_BT.shape[1])[None])
    x_BTE = decoder.forward(weights, tokens_BT, angles, without_cache, adapters=uses)
    return decoder.logits(weights, x_BTE).log_softmax(-1)


def near(got: Tensor, want: Tensor) -> bool:
    """Return whether log-probs are within 1e-5 of the largest, as the decoder's are of transformers'."""
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max())


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from([family for family in SERVED if family != "qwen3_moe"]),
    targets=st.sets(st.sampled_from(TARGETS), min_size=1),
    rank=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 1000),
)
@torch.inference_mode()
def test_rows_with_several_adapters_score_as_merged_weights(
    family: str, targets: set[str], rank: int, seed: int
) -> None:
    """Rows of two adapters and of none in one batch: each within 1e-5 of the largest log-prob of its merged model."""
    with TemporaryDirectory() as directory:
        weights = load(write_tiny_model(Path(directory), family))
        named = weights_of(Path(directory))
        # GLM-4 has gate and up in one matrix, which has no adapter.
        targets = {target for target in targets if any(f".{target}." in name for name in named)} or {"q_proj"}
        matrices = [adapter(named, seed + number, rank=rank, targets=targets) for number in range(2)]
        models = [weights, *(merged(weights, Path(directory), one) for one in matrices)]
    adapters = [received(weights, one) for one in matrices]
    draws = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(3, 299, (5, 24), generator=draws)
    owners = torch.randint(0, 3, (5,), generator=draws)
    uses = [AdapterRows(adapters[number], (owners == number + 1).nonzero()[:, 0]) for number in range(2)]
    got = log_probs(weights, tokens_BT, uses)
    for row, owner in enumerate(owners.tolist()):
        want = log_probs(models[owner], tokens_BT[row, None])[0]
        assert near(got[row], want)
        if owner:
            assert (want - log_probs(weights, tokens_BT[row, None])[0]).abs().max() > 1e-3, "the adapter has an effect"
    alone = log_probs(weights, tokens_BT, [AdapterRows(adapters[0], None)])
    assert near(alone, log_probs(models[1], tokens_BT))


@torch.inference_mode()
def test_a_runner_decodes_rows_of_different_lengths_with_their_adapters(tmp_path: Path) -> None:
    """Prefill, then steps in which the rows are sorted by length, against merged weights without a cache."""
    weights = load(write_tiny_model(tmp_path))
    matrices = {name: adapter(weights_of(tmp_path), seed) for seed, name in enumerate(("", "second"))}
    models = {name: merged(weights, tmp_path, one) for name, one in matrices.items()} | {"none": weights}
    runner = DecoderRunner(weights, num_blocks=64)
    runner.adapters = {name: received(weights, one) for name, one in matrices.items()}
    runner.memory.touch(64)
    draws = np.random.default_rng(3)
    names = ["second", "", "none", "", "second"]
    rows = [draws.integers(3, 299, length).astype(np.int32) for length in (5, 90, 17, 33, 100)]
    tables = [BlockTable(list(range(8 * row, 8 * row + 8)), 0, 0) for row in range(5)]
    scores, _ = runner.prefill(rows, [0] * 5, tables, range(5), names)
    for _ in range(3):
        for row, name in enumerate(names):
            want = log_probs(models[name], torch.from_numpy(rows[row].astype(np.int64))[None])[0, -1]
            assert near(scores[row].log_softmax(-1), want)
        rows = [np.append(row, draws.integers(3, 299)).astype(np.int32) for row in rows]
        runner.set_rows(tables, names)
        scores = runner.decode(
            np.array([row[-1] for row in rows], np.int64), np.array([len(row) - 1 for row in rows], np.int64)
        )


def test_digests_of_blocks_have_the_adapter_and_its_version() -> None:
    model = Model(eos_ids=frozenset(), max_context=512, text=None)

    def response(adapter_name: str) -> Response:
        request = ResponseRequest(
            rid="r", prompt=np.arange(64, dtype=np.int32), params=SamplingParams(), seed=1, adapter=adapter_name
        )
        return Response(request, model=model, sink=lambda *_: None)

    same, other = response("a"), response("b")
    digests = [same.digests(64, 1), other.digests(64, 1), same.digests(64, 2)]
    assert len({digest for of_blocks in digests for digest in of_blocks}) == 12
    assert same.digests(64, 1) == response("a").digests(64, 1) == digests[0]
    assert same.key != other.key and same.key == response("a").key


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.popitem(), "adapter: want 28 tensors, got 27"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), "no tensor"),
        (lambda tensors: tensors.update({next(iter(tensors)): torch.ones(4, 7)}), "want shape"),
        (lambda tensors: tensors.update({next(iter(tensors)): torch.ones(5, 64)}), "want A and B of one rank"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, change: object, reason: str) -> None:
    weights = load(write_tiny_model(tmp_path))
    tensors = adapter(weights_of(tmp_path), 1)
    change(tensors)  # type: ignore[operator]
    header = AdapterHeader(scale=SCALE, num_tensors=28)
    incoming = IncomingAdapter(header, weights.shape, dtype=weights.dtype, device=weights.device)
    with pytest.raises(UpdateRefused, match=reason):
        incoming.load(tensors)
        incoming.built()


def peft_directory(directory: Path, matrices: dict[str, Tensor], **config: object) -> Path:
    """Write an adapter as PEFT does."""
    directory.mkdir()
    save_file(matrices, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6.0, **config}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 8}, "lora_A.weight: want rank 8, as in .*, got shape .4, 64."),
        ({"r": 0}, "want r > 0 and a finite lora_alpha, got 0 and 6.0"),
        ({"r": -4, "use_rslora": True}, "want r > 0"),
        ({"lora_alpha": "nan"}, "got 4 and nan"),
        ({"r": "four"}, "PEFT's configuration with r and lora_alpha"),
        ({"peft_type": "IA3"}, "peft_type: want LORA, got IA3"),
        ({"use_dora": True}, "use_dora: want False"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: want False"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: want {}"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern: want {}"),
    ],
)
def test_an_adapter_that_is_more_than_its_two_matrices_is_refused(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    """Its matrices alone would be served without an error, with other log-probs than its merged model has."""
    matrices = adapter(weights_of(write_tiny_model(tmp_path / "model")), 1)
    with pytest.raises(BadManifest, match=reason):
        read_directory(peft_directory(tmp_path / "adapter", matrices, **config))
    none = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": None, "bias": "none", "layers_to_transform": [0]}
    header, tensors = read_directory(peft_directory(tmp_path / "plain", matrices, **none))
    assert (header.scale, tensors.keys()) == (1.5, matrices.keys())


async def test_an_adapter_with_numbers_that_are_not_finite_or_the_models_name_is_refused(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    matrices = adapter(weights_of(model_dir), 1)
    async with serving(model_dir) as served:

        async def refused(lora_name: str, directory: Path) -> str:
            body = {"lora_name": lora_name, "lora_path": str(directory)}
            status, answer = await served.post("/load_lora_adapter", body)
            assert status == 400, answer
            return str(answer["message"])

        good = peft_directory(tmp_path / "good", matrices)
        assert "lora_name: want another name than the model's, got 'model'" in await refused("model", good)
        name = next(iter(matrices))
        matrices[name][0, 0] = torch.nan
        assert f"{name}: want finite numbers" in await refused("bad", peft_directory(tmp_path / "bad", matrices))
        odd = peft_directory(tmp_path / "odd", adapter(weights_of(model_dir), 1), r=0)
        assert "want r > 0" in await refused("odd", odd)
        assert served.engine.scheduler.adapters == ("",)


async def test_requests_name_adapters_and_share_a_batch(tmp_path: Path) -> None:
    """Two adapters and the weights alone, one prompt: each response has the log-probs of its merged model, prefixes are
    shared by name, an adapter in use stays, and new weights end the responses of adapters.
    """
    model_dir = write_tiny_model(tmp_path / "model", eos_token_id=None)
    named = weights_of(model_dir)
    matrices = {name: adapter(named, seed) for seed, name in enumerate(("first", "second"))}
    base = load(model_dir)
    models = {name: merged(base, model_dir, one) for name, one in matrices.items()} | {None: base}
    prompt = list(range(5, 45))
    async with serving(model_dir) as served:
        for version, name in enumerate(matrices, 3):
            directory = peft_directory(tmp_path / name, matrices[name])
            body = {"lora_name": name, "lora_path": str(directory), "weight_version": str(version)}
            status, answer = await served.post("/load_lora_adapter", body)
            assert status == 200, answer
        assert answer["loaded_adapters"] == ["first", "second"]

        async def response(name: str | None, **params: object) -> dict[str, Any]:
            sampling = {"max_new_tokens": 6, "temperature": 1.0} | params
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "lora_path": name}
            status, answer = await served.post("/generate", body)
            assert status == 200, answer
            return dict(answer)

        await served.client.pause()
        names = [None, "first", "second", "first", None]
        tasks = [asyncio.ensure_future(response(name)) for name in names]
        await served.until(lambda: len(served.engine.scheduler.waiting) == len(names))
        await served.client.resume()
        for name, answer in zip(names, await asyncio.gather(*tasks), strict=True):
            tokens = torch.tensor(prompt + answer["output_ids"])
            with torch.inference_mode():
                want = log_probs(models[name], tokens[None])[0, len(prompt) - 1 : -1]
            want = want.gather(-1, tokens[len(prompt) :, None])[:, 0]
            got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
            assert near(got, want), name
            assert answer["meta_info"]["weight_version"] == {None: "0", "first": "3", "second": "4"}[name]
        asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        for name in (None, "first"):
            greedy = await response(name, temperature=0)
            _, completed = await served.post("/v1/completions", asked | {"model": name or model_dir.name})
            assert completed["choices"][0]["token_ids"] == greedy["output_ids"]
            assert completed["model"] == (name or model_dir.name)
        listed = (await served.get("/v1/models"))[1]["data"]
        assert [one["id"] for one in listed] == [model_dir.name, "first", "second"]
        scored = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
        _, answer = await served.post("/generate", scored | {"logprob_start_len": 0, "lora_path": "second"})
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
        with torch.inference_mode():
            want = log_probs(models["second"], torch.tensor(prompt)[None])[0, :-1]
        assert near(got, want.gather(-1, torch.tensor(prompt)[1:, None])[:, 0])

        assert (await served.post("/generate", {"input_ids": prompt, "lora_path": "third"}))[0] == 400
        gate = served.hold(after=1)
        running = asyncio.ensure_future(response("first", max_new_tokens=400))
        await served.until(lambda: served.engine.scheduler.running)
        status, answer = await served.post("/unload_lora_adapter", {"lora_name": "first"})
        assert status == 400 and "in use by 1 requests" in str(answer)
        status, answer = await served.post("/unload_lora_adapter", {"lora_name": "second"})
        assert (status, answer["loaded_adapters"]) == (200, ["first"])
        await served.engine.load_snapshot(model_dir, 1)
        assert (await running)["meta_info"]["finish_reason"]["message"] == OTHER_WEIGHTS
        assert served.engine.scheduler.adapters == ("",)
        gate.open()
