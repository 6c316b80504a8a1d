"""Models that the learner would compute differently, and settings about experts without effect, are refused before the
start.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.check_kit import write_run
from tests.forked import completed
from tests.refusals import refusal
from tests.tiny_models import DENSE, EXPERTS, tiny_config
from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.row_sizes import read_row_sizes
from tidemill.bus.wire.model_values import (
    EXPERTS_OF,
    MISTRAL_WINDOW,
    OTHER_EXPERTS_OF,
    routing_sizes,
    sparse_layers,
)
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load
from tidemill.learner.layout.sizes import FAMILIES, StepFlops, refusals
from tidemill.learner.settings.config import LearnerConfig

YARN = {
    "rope_type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refused(family: str, changes: dict[str, Any], **sizes: int) -> list[str]:
    """Return the refused keys of a tiny model with ``changes`` to its config.json."""
    values = {**tiny_config(family, vocab_size=300).to_dict(), **changes}
    return [
        error.field.removeprefix("m: ") for error in refusals(values, where="m", **({"tensor_parallel": 1} | sizes))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_usual_model_of_each_family_is_taken(family: str) -> None:
    assert sorted(DENSE | EXPERTS) == sorted(FAMILIES)
    assert refused(family, {}) == []
    assert refused(family, {}, tensor_parallel=2, sequence_parallel=True, pipeline_parallel=2, context_parallel=2) == []


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3", {"model_type": "gemma2"}, "model_type"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": True}, "layer_types"),
        ("mistral", {"sliding_window": 128}, "sliding_window"),
        ("mixtral", {"sliding_window": 255}, "sliding_window"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}}, "rope_parameters"),
        ("glm4", {"rope_scaling": YARN}, "rope_scaling"),
        ("deepseek_v3", {"rope_scaling": {name: YARN[name] for name in YARN if name != "mscale"}}, "rope_scaling"),
        ("deepseek_v3", {"rope_scaling": LLAMA3}, "rope_scaling"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("qwen2_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
    ],
)
def test_a_value_that_would_be_computed_differently_is_refused(
    family: str, changes: dict[str, Any], named: str
) -> None:
    assert refused(family, changes) == [named]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4", {"attention_bias": True}),
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"sliding_window": 16}),  # without use_sliding_window
        ("llama", {"rope_scaling": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}),
        ("deepseek_v3", {"rope_scaling": YARN}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen2_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
        ("glm4_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("glm4_moe", {"num_nextn_predict_layers": 1}),
    ],
)
def test_values_that_only_look_alike_are_taken(family: str, changes: dict[str, Any]) -> None:
    assert refused(family, changes) == []


def test_a_mistral_without_the_key_has_the_window_of_transformers() -> None:
    values = tiny_config("mistral", vocab_size=300).to_dict()
    assert values.pop("sliding_window", 0) is None and MistralConfig().sliding_window == MISTRAL_WINDOW
    for longest, named in ((MISTRAL_WINDOW, []), (MISTRAL_WINDOW + 1, ["m: sliding_window"])):
        found = refusals(values | {"max_position_embeddings": longest}, where="m", tensor_parallel=1)
        assert [error.field for error in found] == named


@pytest.mark.parametrize(
    ("family", "changes", "sizes", "named"),
    [
        ("qwen3", {}, {"expert_parallel": 2}, "model_type"),
        ("qwen3_moe", {}, {"expert_parallel": 3}, "num_experts"),
        ("mixtral", {}, {"expert_parallel": 8}, "num_local_experts"),
        ("qwen3_moe", {}, {"tensor_parallel": 2}, "learner.sequence_parallel"),
        (
            "glm4_moe",
            {"moe_intermediate_size": 33},
            {"tensor_parallel": 2, "sequence_parallel": True},
            "moe_intermediate_size",
        ),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 33},
            {"tensor_parallel": 2, "sequence_parallel": True},
            "shared_expert_intermediate_size",
        ),
        ("deepseek_v3", {"q_lora_rank": 25}, {"tensor_parallel": 2, "sequence_parallel": True}, "q_lora_rank"),
    ],
)
def test_ranks_that_do_not_divide_a_model_are_refused(
    family: str, changes: dict[str, Any], sizes: dict[str, int], named: str
) -> None:
    assert refused(family, changes, **sizes) == [named]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_parallel": 2}, {"place": "expert_parallel", "got": "2"}),
        (
            {"expert_parallel": 4, "pipeline_parallel": 2, "data_parallel": 2},
            {"place": "expert_parallel", "got": "4"},
        ),
        ({"expert_parallel": 0}, {"place": "expert_parallel", "got": "0"}),
        ({"bridge": "mine"}, {"place": "bridge", "got": "'mine'"}),
        ({"routing_replay": "all"}, {"place": "routing_replay", "got": "'all'"}),
        ({"moe_aux_loss_coef": -0.1}, {"place": "moe_aux_loss_coef", "got": "-0.1"}),
        ({"moe_bias_update_rate": -1.0}, {"place": "moe_bias_update_rate", "got": "-1.0"}),
    ],
)
def test_settings_of_experts_that_cannot_be(settings: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        LearnerConfig(**settings)


@pytest.mark.parametrize(
    ("family", "values", "layers"),
    [
        ("qwen3", {"num_experts": 4}, None),
        ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 2}, [1, 3]),
        ("glm_moe_dsa", {"n_routed_experts": 4, "first_k_dense_replace": 3}, [3]),
        ("glm_moe_dsa", {"n_routed_experts": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}, [1, 2, 3]),
        ("nemotron_h", {"n_routed_experts": 4, "hybrid_override_pattern": "ME*E"}, [1, 3]),
        ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2}, [1, 3]),
        # transformers refuses this one
        ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 0}, [0, 1, 2, 3]),
        ("lfm2_moe", {"num_experts": 4, "num_dense_layers": 2}, [2, 3]),
        ("kimi_linear", {"num_experts": 4, "first_k_dense_replace": 1, "num_experts_per_token": 2}, [1, 2, 3]),
        ("granitemoehybrid", {"num_local_experts": 0}, None),
        ("gpt_oss", {"num_local_experts": 4, "num_hidden_layers": None}, None),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": None}, None),
        ("solar_open", {"n_routed_experts": 4, "first_k_dense_replace": 1}, None),  # not known here
    ],
)
def test_layers_whose_experts_are_numbered_by_the_keys_of_released_files(
    family: str, values: dict[str, Any], layers: list[int] | None
) -> None:
    values = {"num_experts_per_tok": 2, "num_hidden_layers": 4, "model_type": family, **values}
    if "num_experts_per_token" in values:
        del values["num_experts_per_tok"]
    assert routing_sizes(values) == (None if layers is None else (4, 4, 2, layers))


KEYS_OF_LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"first_k_dense_replace": 2},
    {"num_dense_layers": 1},
    {"mlp_only_layers": [0]},
    {"decoder_sparse_step": 2},
    {"interleave_moe_layer_step": 2},
    {"moe_layers": [3]},
    {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    {"layers_block_type": ["mamba", "mamba", "mamba", "attention"]},
    {"layer_types": ["linear_attention", "moe", "full_attention", "moe"]},
    {"hybrid_override_pattern": "EM*E"},
)


@pytest.mark.parametrize("family", [*EXPERTS_OF, *OTHER_EXPERTS_OF])
def test_layers_with_experts_are_those_of_the_modules_of_transformers(family: str) -> None:
    """With each key that some family has, also where this one ignores it, and without any."""
    compared = 0
    for keys in KEYS_OF_LAYERS:
        key = (EXPERTS_OF | OTHER_EXPERTS_OF)[family]
        of_token = "num_experts_per_token" if family == "kimi_linear" else "num_experts_per_tok"
        kinds = {"layer_types": ["conv", *["full_attention"] * 3]} if family == "lfm2_moe" else {}  # has no default
        values = {"num_hidden_layers": 4, key: 8, of_token: 1, **kinds, **keys}
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**values))
        except (StrictDataclassError, ValueError, KeyError):  # kinds of layers that only another family has
            assert keys and not keys.keys().isdisjoint({"layer_types", "layers_block_type"})
            continue
        routers = [path for path, module in model.named_modules() if type(module).__name__.lower().endswith("router")]
        layers = [int(re.findall(r"layers\.(\d+)", path)[0]) for path in routers]
        assert routing_sizes({"model_type": family, **values}) == (4, 8, 1, layers), keys
        compared += 1
    assert compared >= 9


def test_layers_with_experts() -> None:
    values: dict[str, Any] = {"num_hidden_layers": 6, "num_experts": 4, "model_type": "qwen3_moe"}
    assert sparse_layers(values | {"model_type": "qwen3"}) == [False] * 6
    assert sparse_layers(values) == [True] * 6
    assert sparse_layers(values | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}) == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    late = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_hidden_layers": 4, "first_k_dense_replace": 3}
    assert sparse_layers(late) == [False, False, False, True]


def test_operations_of_a_token_with_experts() -> None:
    """Qwen3-30B-A3B and DeepSeek-V3 by hand: the router, eight experts of a token, the shared one, and the latents of
    attention.
    """
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    }
    qwen = sizes | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    layer = 2048 * (32 + 8) * 128 + 32 * 128 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768
    found = StepFlops.of(qwen | {"moe_intermediate_size": 768})
    assert (found.per_token, found.per_pair) == (6 * (48 * layer + 2048 * 151936), 6 * 48 * 2 * 32 * 128)
    deepseek = {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    }
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 7168 * 256 + 9 * 3 * 7168 * 2048
    found = StepFlops.of(deepseek)
    assert found.per_token == 6 * (61 * attention + 3 * 3 * 7168 * 18432 + 58 * experts + 7168 * 129280)
    assert found.per_pair == 6 * 61 * 128 * (192 + 128)


def model_errors(directory: Path, *settings: str, family: str = "glm4", **changes: str) -> list[str]:
    """Return the errors about a model with ``changes`` to its config.json."""
    file = write_run(directory)
    values = {**tiny_config(family, vocab_size=128).to_dict(), **changes}
    (directory / "model/config.json").write_text(json.dumps(values))
    return [error.text for error in check(load(file, settings), Purpose()).errors if error.topic == "model"]


def test_a_family_that_the_decoder_lacks_needs_transformers_or_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)
    [found] = model_errors(tmp_path / "a", "engine.runner=decoder", family="mixtral")
    assert "model_type" in found and "the decoder has" in found and "engine.kind: sglang" in found
    assert model_errors(tmp_path / "b", "engine.kind=sglang", family="mixtral") == []
    assert model_errors(tmp_path / "c", family="mixtral") == []


def test_a_bridge_of_ones_own_is_looked_for_and_takes_another_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.actors.serving.builtin.row_sizes.execute", completed)
    # Without Megatron's base, which takes ten seconds to load: the check looks for a class, the ranks at its bases.
    (tmp_path / "pond_bridge.py").write_text("class Pond: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    bridge, sglang = "learner.bridge=pond_bridge:", "engine.kind=sglang"
    assert model_errors(tmp_path / "a", sglang, bridge + "Pond", model_type="pond") == []
    [found] = model_errors(tmp_path / "b", sglang, model_type="pond")
    assert "model_type: want one of the " in found and "or learner.bridge, got pond" in found
    [found] = model_errors(tmp_path / "f", sglang, "learner.backend=megatron", model_type="pond")
    assert "model_type: want one of deepseek_v3" in found and "fsdp or learner.bridge, got pond" in found
    [found] = model_errors(tmp_path / "c", sglang, bridge + "Lake", model_type="pond")
    assert "learner.bridge: want a class of LocalLayers, got 'pond_bridge:Lake': " in found and "no 'Lake'" in found
    [found] = model_errors(tmp_path / "d", bridge + "Pond", model_type="pond")
    assert "transformers cannot read it" in found and "use engine.kind: sglang" in found
    [found] = model_errors(tmp_path / "e", sglang, bridge + "Pond", "learner.pipeline_parallel=5", model_type="pond")
    assert "num_hidden_layers: want a multiple of learner.pipeline_parallel = 5" in found


def test_row_sizes_are_read_beside_files_named_like_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user's own is found in the working directory, and may print; the others would raise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    for name in ("json", "types", "actors"):
        Path(f"{name}.py").write_text("raise RuntimeError(__name__)\n")
    Path("lake_family.py").write_text("print('hello')\n")
    with refusal(UnsupportedModel, where="learner.family", reason=re.compile("lake_family has no 'LAKE'")):
        read_row_sizes(tmp_path, "lake_family:LAKE")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learner.routing_replay=old", "has no experts"),
        ("learner.routing_replay=rollout", "has no experts"),
        ("learner.moe_aux_loss_coef=0.1", "has no experts"),
        ("learner.moe_bias_update_rate=0.1", "has no bias per expert"),
    ],
)
def test_settings_of_experts_for_a_dense_model_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    [found] = model_errors(tmp_path, "engine.kind=sglang", setting)
    assert setting.split("=")[0] in found and message in found and "remove the setting" in found


def test_experts_of_an_engine_want_a_family_whose_layers_are_known(tmp_path: Path) -> None:
    file, config = write_run(tmp_path), tmp_path / "model/config.json"
    dense = json.loads(config.read_text()) | {"model_type": "phi3"}
    of_experts = dense | {"model_type": "phimoe", "num_local_experts": 8, "num_experts_per_tok": 2}
    for values, setting, wanted in (
        (dense, "none", []),
        (dense, "rollout", ["none: the model has no experts"]),
        (of_experts, "none", []),
        (of_experts, "rollout", ["old or none: the layers with experts are not known"]),
    ):
        config.write_text(json.dumps(values))
        report = check(load(file, ["engine.kind=sglang", f"learner.routing_replay={setting}"]), Purpose())
        found = [error.text for error in report.errors]
        assert len(found) == len(wanted) and all(words in text for words, text in zip(wanted, found, strict=True))
