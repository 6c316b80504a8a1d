"""Every family of models in the Megatron learner: log-probs of packed rows are those of transformers, and weights
survive the way back.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from safetensors.torch import load_file

from tests.cuda_kernels import RaisingOnCuda
from tests.examples import some
from tests.learner_steps import make_batches, make_samples
from tests.refusals import refusal
from tests.same_model import assert_converts, assert_log_probs, assert_weights, of_transformers, scored_rows, vocabulary
from tests.tiny_models import DENSE, EXPERTS, as_pond, as_transformers_4, write_tiny_model, write_tiny_pond
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.layers.experts import GroupedExperts
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.backups import OtherWeights, reference_weights
from tidemill.learner.trainer.trainer import Trainer

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in DENSE | EXPERTS},
    "qwen3-tied": ("qwen3", {"tied": True}),
    "llama-tied": ("llama", {"tied": True}),
    "mistral, window of the whole context": ("mistral", {"sliding_window": 256}),
    "llama, scaled as Llama 3's": ("llama", {"rope_scaling": LLAMA3}),
    "llama, linear scaling": ("llama", {"rope_scaling": LINEAR}),
    "qwen3, linear scaling": ("qwen3", {"rope_scaling": LINEAR}),
    "glm4, linear scaling": ("glm4", {"rope_scaling": LINEAR}),
    "qwen3_moe-tied": ("qwen3_moe", {"tied": True}),
    "qwen3_moe, scores of all experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, dense layers between": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2_moe, normalised scores": ("qwen2_moe", {"norm_topk_prob": True}),
    "glm4_moe, two shared experts": ("glm4_moe", {"n_shared_experts": 2, "n_group": 2, "attention_bias": False}),
    "glm4_moe, scores as they are": ("glm4_moe", {"norm_topk_prob": False}),
    "glm4_moe, one expert": ("glm4_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "deepseek_v3, scores as they are": ("deepseek_v3", {"norm_topk_prob": False}),
    "deepseek_v3, whole queries": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_scaling": YARN}),
}
TRIED = [*DENSE, *EXPERTS, *some([name for name in CASES if name not in DENSE and name not in EXPERTS], 2)]
"""Cases that are tried: every family as it is, and every other one of its variants."""

OF_TRANSFORMERS_4: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, another base": ("llama", {"rope_theta": 500.0}),
    "llama, scaled as Llama 3's": ("llama", {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "qwen3, linear scaling": ("qwen3", {"rope_theta": 500.0, "rope_scaling": LINEAR}),
    "glm4, a quarter of each head": ("glm4", {"partial_rotary_factor": 0.25}),
    "qwen3_moe": ("qwen3_moe", {"rope_theta": 500.0}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_theta": 500.0, "rope_scaling": YARN}),
}


@pytest.mark.parametrize(("family", "changes"), [CASES[name] for name in TRIED], ids=TRIED)
def test_log_probs_and_weights_are_those_of_transformers(
    here: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Packed rows of many lengths give the log-probs of each sequence alone; export has every tensor of the files, bit
    for bit.
    """
    assert_same_model(write_tiny_model(tmp_path, family, **changes), tmp_path, here)


@pytest.mark.parametrize(("family", "changes"), OF_TRANSFORMERS_4.values(), ids=OF_TRANSFORMERS_4)
def test_a_model_that_transformers_4_has_written_has_its_own_positions(
    here: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    directory = write_tiny_model(tmp_path / "5", family, **changes)
    assert_same_model(as_transformers_4(directory, tmp_path / "4"), directory, here)


def assert_same_model(directory: Path, of_reference: Path, here: Any) -> None:
    policy = build_policy(directory, dtype="float32", parallel=here)
    samples = make_samples(vocab=vocabulary(directory), temperature=0.7)
    assert len(make_batches(samples, max_tokens=100)[0].micro_batches) > 1
    assert_log_probs(scored_rows(policy, samples, max_tokens=100), samples, of_transformers(of_reference))
    assert_weights(dict(policy.export()), directory)


@pytest.mark.parametrize("family", EXPERTS)
def test_grouped_experts_train_as_those_one_after_the_other(here: Any, tmp_path: Path, family: str) -> None:
    directory = write_tiny_model(tmp_path, family)
    batch, found = make_batches(make_samples(vocab=299))[0], {}
    for wanted in ("always", "never"):
        policy = build_policy(directory, dtype="float32", parallel=here, kernels=Wanted(grouped_experts=wanted))
        kinds = {type(module) for module in policy.chunks[0].modules() if isinstance(module, SequentialMLP)}
        assert kinds == {GroupedExperts if wanted == "always" else SequentialMLP}
        trainer = Trainer(
            policy,
            MegatronOptimizer(policy, OptimizerConfig(lr=1e-2, eps=1e-5), steps=10),
            AlgorithmConfig(),
            max_lag=2,
        )
        found[wanted] = trainer.train(batch), dict(policy.export())
    (grouped, weights), (sequential, theirs) = found["always"], found["never"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert grouped[name] == pytest.approx(sequential[name], rel=1e-5), name
    before = load_file(directory / "model.safetensors")
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items() if "experts." in name)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("counts", [(3, 0, 5, 0, 1, 1, 0, 0), (0, 8, 0, 0, 0, 0, 0, 0), (0,) * 8])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_grouped_product_passes_over_experts_without_tokens(
    here: Any, tmp_path: Path, counts: tuple[int, ...], frozen: bool
) -> None:
    """Outputs and gradients are those of the experts one after the other; all weights get one, or none where they are
    frozen.
    """
    directory, found = write_tiny_model(tmp_path, "qwen3_moe"), {}
    generator = torch.Generator().manual_seed(0)
    for wanted in ("always", "never"):
        policy = build_policy(directory, dtype="float32", parallel=here, kernels=Wanted(grouped_experts=wanted))
        experts = next(module for module in policy.chunks[0].modules() if isinstance(module, SequentialMLP))
        assert experts.num_local_experts == len(counts)
        weights = {name: weight.requires_grad_(not frozen) for name, weight in experts.named_parameters()}
        inputs = torch.randn(
            sum(counts), experts.config.hidden_size, generator=generator.manual_seed(1)
        ).requires_grad_()
        probs = torch.rand(sum(counts), generator=generator).requires_grad_()
        asked: list[Any] = []  # an overlapped gathering of weights waits in a hook of the module that has them
        linears = [module for expert in experts.local_experts for module in (expert.linear_fc1, expert.linear_fc2)]
        for module in linears:
            module.register_forward_pre_hook(lambda module, *_, asked=asked: asked.append(module))
        out, bias = experts(inputs, torch.tensor(counts), probs)
        assert bias is None and sorted(map(id, asked)) == sorted(map(id, linears))
        wanted_of = [inputs, probs, *([] if frozen else weights.values())]
        gradients = torch.autograd.grad(out.square().sum() + out.sum(), wanted_of, allow_unused=True)
        found[wanted] = [out.detach(), *gradients]
    for grouped, sequential in zip(found["always"], found["never"], strict=True):
        torch.testing.assert_close(grouped, sequential, atol=1e-6, rtol=1e-5)


POND = "docs.examples.extending.my_bridge:Pond"


def test_a_bridge_of_ones_own_serves_a_family_that_is_not_known(here: Any, tmp_path: Path) -> None:
    """It loads, trains and exports what the family with the same layers does, bit for bit."""
    qwen2, pond = write_tiny_model(tmp_path / "qwen2", "qwen2"), write_tiny_pond(tmp_path / "pond")
    batch = make_batches(make_samples(vocab=299), max_tokens=100)[0]
    exported = []
    for directory, bridge in ((qwen2, ""), (pond, POND)):
        policy = build_policy(directory, dtype="float32", parallel=here, bridge_class=bridge)
        there, first = (
            load_file(directory / "model.safetensors"),
            {name: tensor.clone() for name, tensor in policy.export()},
        )
        assert first.keys() == there.keys() and all(torch.equal(first[name], there[name]) for name in there)
        trainer = Trainer(
            policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=10), AlgorithmConfig(), max_lag=2
        )
        assert trainer.train(batch)["train/skipped_minibatches"] == 0
        exported.append({name: tensor.clone() for name, tensor in policy.export()})
        assert any(not torch.equal(tensor, first[name]) for name, tensor in exported[-1].items())
    wanted, found = as_pond(exported[0]), exported[1]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert_converts(pond, tmp_path, here, bridge_class=POND)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Pond", "want module:Class.*no_such_module"),
        ("docs.examples.extending.my_bridge:Lake", "has no 'Lake'"),
        ("docs.examples.extending.my_bridge:PondConfig", "want a class with the bases LocalLayers .*PondConfig"),
        ("mbridge.models.qwen2:Qwen2Bridge", "want a class with the bases LocalLayers"),
    ],
)
def test_what_is_no_bridge_is_refused(here: Any, tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"learner.bridge: .*{message}"):
        build_policy(write_tiny_model(tmp_path, "qwen2"), dtype="float32", parallel=here, bridge_class=path)


def test_a_family_without_a_bridge_is_refused_with_the_setting(here: Any, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "qwen2")
    for name, message in (
        ("gpt2", "for another family learner.backend: fsdp or learner.bridge, got 'gpt2'"),
        ("nowhere", "AutoConfig.register"),
    ):
        (directory / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(ConfigRefused, match=message):
            build_policy(directory, dtype="float32", parallel=here)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_another_models_weights_come_with_the_biases_of_its_routers(here: Any, tmp_path: Path, family: str) -> None:
    """A reference model scores as transformers does, and afterwards the policy has its own biases again."""
    directory, other = write_tiny_model(tmp_path / "a", family), write_tiny_model(tmp_path / "b", family, seed=1)
    policy = build_policy(directory, dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, OptimizerConfig(), steps=10), AlgorithmConfig(), max_lag=2)
    backup = reference_weights(policy, other)
    batch = make_batches(make_samples(vocab=299))[0]
    wanted = Trainer(
        (twin := build_policy(other, dtype="float32", parallel=here)),
        MegatronOptimizer(twin, OptimizerConfig(), steps=10),
        AlgorithmConfig(),
        max_lag=2,
    ).log_probs(batch)
    own = trainer.log_probs(batch)
    with OtherWeights(policy) as others:
        others.take(backup)
        there = trainer.log_probs(batch)
    for here_T, there_T, wanted_T, again_T in zip(own, there, wanted, trainer.log_probs(batch), strict=True):
        assert torch.equal(there_T, wanted_T) and torch.equal(here_T, again_T) and not torch.equal(here_T, there_T)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_bfloat16_keeps_the_biases_of_routers_in_float32(here: Any, tmp_path: Path, family: str) -> None:
    """A step runs; export has the weights rounded, and the biases bit for bit."""
    directory = write_tiny_model(tmp_path, family)
    policy = build_policy(directory, dtype="bfloat16", parallel=here)
    there = load_file(directory / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in policy.export()}
    assert exported.keys() == there.keys()
    for name, tensor in exported.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, there[name] if kept else there[name].bfloat16()), name
    trainer = Trainer(
        policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=10), AlgorithmConfig(), max_lag=2
    )
    assert trainer.train(make_batches(make_samples(vocab=299))[0])["train/skipped_minibatches"] == 0
    after = dict(policy.export())
    assert any(not torch.equal(after[name], exported[name]) for name in after)
    assert all(torch.equal(after[name], exported[name]) for name in after if name.endswith("e_score_correction_bias"))


@pytest.mark.parametrize(
    ("family", "wanted", "message"),
    [
        (
            "qwen3_moe",
            Wanted(fused_activation="always"),
            "learner.fused_activation: want auto or never for a model with experts",
        ),
        (
            "deepseek_v3",
            Wanted(attention="varlen"),
            "learner.attention: want sdpa or auto, got 'varlen: keys and values",
        ),
        ("deepseek_v3", Wanted(attention="cudnn"), "learner.attention: want sdpa or auto, got 'cudnn: keys and values"),
    ],
)
def test_a_kernel_that_a_family_cannot_use_is_refused(
    here: Any, tmp_path: Path, family: str, wanted: Wanted, message: str
) -> None:
    directory = write_tiny_model(tmp_path, family)
    with pytest.raises(ConfigRefused, match=message):
        build_policy(directory, dtype="float32", parallel=here, kernels=wanted)
    assert not build_policy(directory, dtype="float32", parallel=here).config.bias_activation_fusion


def test_weights_of_another_shape_are_refused(here: Any, tmp_path: Path) -> None:
    directory, other = (
        write_tiny_model(tmp_path / "a", "mixtral"),
        write_tiny_model(tmp_path / "b", "mixtral", intermediate_size=48),
    )
    policy = build_policy(directory, dtype="float32", parallel=here)
    with refusal(ConfigRefused, field=re.compile("weight$")):
        policy.bridge.load(policy.chunks, other)


@pytest.mark.parametrize("family", ["glm4", *EXPERTS])
def test_a_step_uses_only_what_has_a_deterministic_kernel_on_cuda(here: Any, tmp_path: Path, family: str) -> None:
    policy = build_policy(write_tiny_model(tmp_path, family), dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, OptimizerConfig(), steps=10), AlgorithmConfig(), max_lag=2)
    seen = RaisingOnCuda()
    with seen:
        trainer.train(make_batches(make_samples(vocab=299), max_tokens=100)[0])
    assert seen.found == []
