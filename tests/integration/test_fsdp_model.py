"""A sharded model of transformers: what it reads, what it refuses, and what it writes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.families import (
    LENGTHS,
    VOCAB,
    config_of,
    one_place,
    plain_model,
    sequences,
    write_family,
)
from tests.integration import fsdp_family_ranks
from tests.integration.fsdp_family_ranks import different, files_of, gap, measured, row_pass
from tests.learner_steps import run_ranks
from tests.refusals import refusal
from tests.tiny_models import as_released
from tidemill.learner import Family
from tidemill.learner.backends.fsdp.model import FsdpModel, Place, open_model
from tidemill.learner.backends.fsdp.self_test import randomize, row_of, self_test
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.packed_rows import PackedRow, packed_row


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with one_place() as here:
        yield here


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models") / "qwen3", "qwen3, tied")


def opened(directory: Path, place: Place, **options: Any) -> FsdpModel:
    return open_model(directory, **{"dtype": "float32", "place": place} | options)


def rewrite(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """Write other tensors into a model's directory, and settings into its configuration."""
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


def without_a_matrix(directory: Path) -> Path:
    """Write a model of which a matrix is missing in the files."""
    write_family(directory, "llama")
    files = files_of(directory)
    del files["model.layers.1.mlp.up_proj.weight"]
    rewrite(directory, files)
    return directory


@torch.no_grad()
def hidden_states(model: FsdpModel, tokens_T: Tensor, packed: PackedRow) -> Tensor:
    hidden_TH: Tensor = model(tokens_T, packed, lambda states_TH: states_TH.clone())
    model.weights_changed()
    return hidden_TH


def test_weights_of_another_directory_come_into_the_live_model(qwen3: Path, place: Place, tmp_path: Path) -> None:
    model = opened(qwen3, place)
    before, _ = row_pass(model)
    model.load(write_family(tmp_path / "other", "qwen3, tied", seed=5))
    assert different(dict(model.export()), files_of(tmp_path / "other")) == []
    after, _ = row_pass(model)
    torch.testing.assert_close(after, row_pass(opened(tmp_path / "other", place))[0])
    assert not torch.allclose(before, after)


@pytest.mark.parametrize(
    ("settings", "tensor"),
    [
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "model.layers.3.input_layernorm.weight"),
        ({"intermediate_size": 128}, "model.layers.0.mlp.down_proj.weight"),
    ],
    ids=["untied", "fewer layers", "wider"],
)
def test_weights_of_a_model_with_other_tensors_are_refused(
    settings: dict[str, Any], tensor: str, qwen3: Path, place: Place, tmp_path: Path
) -> None:
    """Tensors that one of them lacked were left out: a reference had the policy's output layer, or its last layers."""
    config = config_of("qwen3, tied")
    config.update(settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trained, other = opened(qwen3, place), opened(tmp_path, place)
    for model, directory in ((trained, tmp_path), (other, qwen3)):
        with refusal(ConfigRefused, field=str(directory), want=re.compile(re.escape(tensor))):
            model.load(directory)


def test_a_sequence_for_which_longrope_would_turn_the_others_of_its_row_is_refused(
    place: Place, tmp_path: Path
) -> None:
    """10 tokens beside 100 differed by 1.9 nats from themselves alone, with the angles of the long sequence."""
    config = config_of("phi3")
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    config.original_max_position_embeddings = 64
    config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 64} | factors
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(tmp_path)
    ours = opened(tmp_path, place)
    assert ours.findings.packed
    assert len(hidden_states(ours, torch.cat(sequences((64, 10))), row_of((64, 10)))) == 74
    with refusal(ConfigRefused, field="engine.max_context", got=65):
        hidden_states(ours, torch.cat(sequences((65, 10))), row_of((65, 10)))


def test_weights_written_after_a_pass_without_gradient_are_seen_by_the_next_one(qwen3: Path, place: Place) -> None:
    """The root's weights stay whole behind a pass: the embedding and the output layer of 4,160 parameters were those of
    the reference in training, with every metric within 1e-5.
    """
    model, row = opened(qwen3, place), row_of(LENGTHS)
    parts = dict(model.named_weights())
    before = hidden_states(model, torch.cat(sequences()), row)
    with torch.no_grad():
        parts["model.embed_tokens.weight"].add_(1.0)
    model.weights_changed()
    after = hidden_states(model, torch.cat(sequences()), row)
    assert not torch.allclose(before, after)


def test_recomputed_layers_have_the_same_gradients(qwen3: Path, place: Place) -> None:
    _, wanted = row_pass(opened(qwen3, place))
    _, gradients = row_pass(opened(qwen3, place, recompute=True))
    assert gap(gradients, wanted) < 1e-6


def test_bfloat16_computes_near_float32_and_keeps_float32_weights(qwen3: Path, place: Place) -> None:
    model = opened(qwen3, place, dtype="bfloat16")
    assert {part.dtype for _, part in model.named_weights()} == {torch.float32}
    assert {tensor.dtype for _, tensor in model.export()} == {torch.bfloat16}
    (log_probs_TV, gradients), (wanted_TV, wanted) = row_pass(model), row_pass(opened(qwen3, place))
    assert {grad.dtype for grad in gradients.values()} == {torch.float32}
    assert gap(gradients, wanted) < 0.1
    assert (log_probs_TV - wanted_TV).abs().mean() < 0.05


def test_tensors_that_files_have_in_float32_are_exported_so(place: Place, tmp_path: Path) -> None:
    write_family(tmp_path, "granitemoehybrid", dtype=torch.bfloat16)
    files = {name: tensor.float() if name.endswith("A_log") else tensor for name, tensor in files_of(tmp_path).items()}
    rewrite(tmp_path, files)
    exported = dict(opened(tmp_path, place, dtype="bfloat16").export())
    assert different(exported, files) == []
    assert {tensor.dtype for tensor in files.values()} == {torch.float32, torch.bfloat16}


def test_a_critic_begins_with_values_of_zero(qwen3: Path, place: Place) -> None:
    critic = opened(qwen3, place, value_head=True)
    values_T1 = critic(torch.cat(sequences()), row_of(LENGTHS), lambda values: values)
    assert values_T1.shape == (sum(LENGTHS), 1)
    assert values_T1.dtype == torch.float32
    assert not values_T1.any()
    (values_T1 - 1).square().sum().backward()
    gradients = {name: bool(parameter.grad.any()) for name, parameter in critic.named_parameters()}
    assert [name for name, moved in gradients.items() if moved] == ["transformer.lm_head.weight"]


def test_parameters_beside_the_model_stay_and_are_not_exported(qwen3: Path, place: Place) -> None:
    def prepare(transformer: Any) -> None:
        transformer.requires_grad_(False)
        layer = transformer.model.layers[0].self_attn.q_proj
        layer.register_parameter("beside", torch.nn.Parameter(torch.empty(3, layer.in_features)))

    model = opened(qwen3, place, prepare=prepare)
    parts = dict(model.named_weights())
    parts["model.layers.0.self_attn.q_proj.beside"].fill_(7.0)
    model.load(qwen3)
    assert bool((parts["model.layers.0.self_attn.q_proj.beside"] == 7.0).all())
    assert different(dict(model.export()), files_of(qwen3)) == []
    doubled = dict(model.export(lambda name, tensor: tensor * 2))
    assert different(doubled, {name: tensor * 2 for name, tensor in files_of(qwen3).items()}) == []


def test_experts_in_one_tensor_have_the_names_of_their_files(place: Place, tmp_path: Path) -> None:
    model = opened(write_family(tmp_path, "qwen3_moe"), place)
    names = {name: model.file_names(name) for name, _ in model.transformer.named_parameters()}
    assert sorted(name for listed in names.values() for name in listed) == sorted(files_of(tmp_path))
    assert len(names["model.layers.0.mlp.experts.gate_up_proj"]) == 16


def test_files_with_experts_in_one_tensor_are_exported_so(place: Place, tmp_path: Path) -> None:
    fused = plain_model(write_family(tmp_path, "qwen3_moe")).state_dict()
    rewrite(tmp_path, {name: tensor.contiguous() for name, tensor in fused.items()})
    assert different(dict(opened(tmp_path, place).export()), files_of(tmp_path)) == []


def test_dense_layers_beside_experts_keep_the_names_of_their_files(place: Place, tmp_path: Path) -> None:
    files = as_released(write_family(tmp_path, "kimi_linear"))
    model = opened(tmp_path, place)
    assert different(dict(model.export()), files) == []
    assert model.file_names("model.layers.0.mlp.up_proj.weight") == ["model.layers.0.mlp.up_proj.weight"]


def test_the_text_of_a_model_with_images_keeps_the_names_of_its_files(place: Place, tmp_path: Path) -> None:
    sizes = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4}
    vision = {**sizes, "out_hidden_size": 64, "num_position_embeddings": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=config_of("qwen3_5").to_dict(), vision_config=vision)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    exported, files = dict(opened(tmp_path, place).export()), files_of(tmp_path)
    assert exported.keys() == {name for name in files if "visual" not in name}
    assert different(exported, {name: files[name] for name in exported}) == []


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_whole_model_with_images_trains_its_text(kind: str, place: Place, tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, text_config=config_of(kind).to_dict(), vision_config=vision | {"patch_size": 4})
    config.audio_config = None
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(tmp_path)
    ours, result = measured(tmp_path)
    assert (result["log_probs"] < 5e-5, result["gradients"] < 2e-5, result["export"]) == (True, True, [])
    assert ours.head.cap == (30.0 if kind == "gemma4" else 0.0)
    assert ours.config.vocab_size == VOCAB


def test_weights_of_fp8_files_are_decoded(place: Place, tmp_path: Path) -> None:
    files = files_of(write_family(tmp_path, "deepseek_v3"))
    encoded, decoded = {}, dict(files)
    for name, tensor in files.items():
        encoded[name] = tensor
        if "layers" in name and "proj" in name and tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            encoded[name] = (tensor / scale).to(torch.float8_e4m3fn)
            encoded[f"{name}_scale_inv"] = scale[None, None]
            decoded[name] = encoded[name].float() * scale
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    rewrite(tmp_path, encoded, quantization_config=settings)
    exported = dict(opened(tmp_path, place).export())
    assert exported.keys() == files.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, decoded[name])


def test_experts_of_mxfp4_files_are_decoded(place: Place, tmp_path: Path) -> None:
    files = files_of(write_family(tmp_path, "gpt_oss"))
    encoded = dict(files)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for name, tensor in files.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
        exponents = torch.randint(-6, -2, (experts, outputs, inputs // 32))
        numbers = torch.tensor([values[code] for code in codes.flatten()]).view_as(codes) * 2.0 ** exponents[..., None]
        files[name] = numbers.flatten(2).transpose(1, 2)
        del encoded[name]
        encoded[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        encoded[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    rewrite(tmp_path, encoded, quantization_config={"quant_method": "mxfp4"})
    assert different(dict(opened(tmp_path, place).export()), files) == []


def test_weights_that_the_class_lacks_are_left_out(qwen3: Path, place: Place, tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    files = files_of(tmp_path)
    rewrite(tmp_path, {**files, "model.layers.4.eh_proj.weight": torch.zeros(64, 128)})
    assert different(dict(opened(tmp_path, place).export()), files) == []


def test_a_common_prompt_is_computed_once(place: Place, tmp_path: Path) -> None:
    model = opened(write_family(tmp_path, "gpt_oss"), place)
    assert model.prefix_obstacle == ""
    prompt, *responses = sequences((20, 7, 12))
    whole = [torch.cat([prompt, response]) for response in responses]
    wanted = hidden_states(model, torch.cat(whole), row_of([27, 32]))
    positions_T = torch.tensor([*range(27), *range(20, 32)])
    tree = packed_row(np.array([0, 27, 39], np.int32), positions_T, prefixes=[(), ((0, 20),)])
    states = hidden_states(model, torch.cat([whole[0], responses[1]]), tree)
    torch.testing.assert_close(states, torch.cat([wanted[:27], wanted[27 + 20 :]]), rtol=1e-4, atol=1e-5)


def test_dropout_of_a_family_is_left_out(place: Place, tmp_path: Path) -> None:
    write_family(tmp_path, "seed_oss")
    wanted = row_pass(opened(tmp_path, place))[0]
    rewrite(tmp_path, files_of(tmp_path), residual_dropout=0.5, attention_dropout=0.5)
    torch.testing.assert_close(row_pass(opened(tmp_path, place))[0], wanted, rtol=0, atol=0)


def test_the_token_of_padding_is_trained_like_any_other(place: Place, tmp_path: Path) -> None:
    model = opened(write_family(tmp_path, "llama"), place)
    padding = model.config.pad_token_id
    model(torch.full((5,), padding), row_of([5]), lambda hidden_TH: hidden_TH.sum()).backward()
    gradient_VH = model.transformer.get_input_embeddings().weight.grad.full_tensor()
    assert bool(gradient_VH[padding].any())


def test_missing_weights_are_refused(place: Place, tmp_path: Path) -> None:
    with refusal(ConfigRefused, field="model.path"):
        opened(without_a_matrix(tmp_path), place)


def test_the_refusal_of_the_rank_that_reads_is_raised_on_all(tmp_path: Path) -> None:
    model_dir = without_a_matrix(tmp_path / "model")
    ranks = run_ranks(fsdp_family_ranks.refused, (model_dir,), world=2, out=tmp_path, timeout_s=120)
    assert [rank["field"] for rank in ranks] == ["model.path"] * 2


@pytest.mark.parametrize(
    "settings",
    [{"model_type": "of_nobody"}, {"quantization_config": {"quant_method": "awq", "bits": 4}}],
    ids=["unknown type", "other encoding"],
)
def test_what_cannot_be_read_is_refused(settings: dict[str, Any], place: Place, tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    rewrite(tmp_path, files_of(tmp_path), **settings)
    with refusal(ConfigRefused, field="model.path"):
        opened(tmp_path, place)


RELEASED = {
    "qwen3_5_moe_text": True,
    "gpt_oss": True,
    "gemma4_text": True,
    "nemotron_h": True,
    "minimax": True,  # by its module in ``families``: its lightning attention has no convolution
    "deepseek_v32": False,
    "cohere2": True,
    "falcon_mamba": True,  # it has no attention
}
"""Model type -> whether its rows are packed, at the sizes of transformers' defaults, which are those of a release."""


@pytest.mark.parametrize("kind", RELEASED)
def test_large_models_are_tried_at_a_small_size(kind: str) -> None:
    assert self_test(AutoConfig.for_model(kind), torch.device("cpu")).packed == RELEASED[kind]


@torch.no_grad()
def test_a_model_with_a_few_tokens_is_tried_under_no_grad() -> None:
    config = AutoConfig.for_model("qwen3", vocab_size=12, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    assert self_test(config, torch.device("cpu")).packed


DETACHED = Family(mix=lambda forward, hidden_BLH, **arguments: forward(hidden_BLH.detach(), **arguments))
"""Rules with which the states have the right values, and their inputs no gradient."""


def test_a_family_with_other_gradients_in_packed_rows_is_padded(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = opened(write_family(tmp_path, "lfm2"), place, family=f"{__name__}:DETACHED")
    assert not model.findings.packed
    assert "model_family type=lfm2 rows=padded reason=packed rows: a sequence differs by" in caplog.text


def test_a_family_whose_logits_are_more_than_a_product_is_refused() -> None:
    with refusal(ConfigRefused, field="model.path"):
        self_test(AutoConfig.for_model("phi"), torch.device("cpu"))  # its output layer has a bias
