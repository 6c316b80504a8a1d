"""Random values of config.json: learner and built-in engine compute the log-probs of transformers, or refuse the model.

Three models of each family; ``make test-all`` takes forty.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine_decoding import decode_all, load
from tests.learner_steps import make_batches
from tests.tiny_models import DENSE, EXPERTS, as_transformers_4, write_tiny_model
from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.shape import FAMILIES
from tidemill.bus.wire.messages import Sample, Sampling, Span, Status
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

ROWS, LENGTH, PREFILLED = 2, 40, 20
LIMIT = 1e-4
"""Largest difference of a log-prob; those of a model with a wrong setting differ by 0.003 and more."""
Choices = dict[str, list[Any]]
COMMON: Choices = {
    "rms_norm_eps": [1e-3, 1e-6],
    "rope_theta": [500.0, 1e6],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}],
    "initializer_range": [0.2],
    "tied": [True],
    "num_hidden_layers": [1, 3],
    "intermediate_size": [40],
    "num_key_value_heads": [1, 4],
    "head_dim": [8, 24],
    "max_position_embeddings": [128],
}
CHOSEN: Choices = {"num_experts_per_tok": [1, 3], "moe_intermediate_size": [24], "norm_topk_prob": [True, False]}
OWN: dict[str, Choices] = {
    "glm4": {"partial_rotary_factor": [0.25, 1.0], "attention_bias": [False]},
    "glm4_moe": {
        **CHOSEN,
        "partial_rotary_factor": [0.25, 1.0],
        "attention_bias": [False],
        "use_qk_norm": [False],
        "routed_scaling_factor": [1.0, 3.0],
        "first_k_dense_replace": [0],
        "n_shared_experts": [2],
    },
    "deepseek_v3": {
        "rms_norm_eps": [1e-6],  # transformers ignores another one in the norms of the latents; SGLang does not
        "rope_theta": [500.0, 1e6],
        "num_hidden_layers": [1, 3],
        "intermediate_size": [40],
        "tied": [True],
        "q_lora_rank": [None, 16],
        "kv_lora_rank": [24],
        "qk_nope_head_dim": [8],
        "v_head_dim": [16],
        "routed_scaling_factor": [1.0],
        "first_k_dense_replace": [0, 2],
        "n_shared_experts": [2],
        "norm_topk_prob": [False],
        "moe_intermediate_size": [24],
    },
    "qwen3_moe": {**CHOSEN, "mlp_only_layers": [[0]], "decoder_sparse_step": [2], "num_experts": [4]},
    "qwen2_moe": {**CHOSEN, "shared_expert_intermediate_size": [32], "decoder_sparse_step": [2]},
    "mixtral": {"num_local_experts": [6], "num_experts_per_tok": [1, 3]},
}


def changes_of(family: str, chance: random.Random) -> dict[str, Any]:
    choices = OWN[family] if family == "deepseek_v3" else COMMON | OWN.get(family, {})
    if family == "qwen2_moe":  # it has no head size of its own in transformers
        choices = {name: values for name, values in choices.items() if name != "head_dim"}
    return {name: chance.choice(choices[name]) for name in chance.sample(sorted(choices), chance.randint(1, 4))}


def sample_of(tokens: Tensor, index: int) -> Sample:
    response = len(tokens) - 1
    return Sample(
        run="r",
        task=1,
        index=index,
        group_size=ROWS,
        attempt="a",
        prompt="p",
        tokens=tokens.numpy().astype(np.int32),
        response_length=response,
        response="x",
        rollout_log_probs=np.full(response, -1.0, np.float32),
        loss_mask=np.ones(response, np.uint8),
        spans=(Span(version=2, num_tokens=response),),
        reward=float(index),
        status=Status.COMPLETED,
        sampling=Sampling(temperature=1.0, max_new_tokens=response),
    )


def by_learner(directory: Path, tokens_BT: Tensor, here: Any) -> Tensor:
    policy = build_policy(directory, dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, OptimizerConfig(), steps=10), AlgorithmConfig(), max_lag=2)
    batch = make_batches(
        [sample_of(tokens_T, index) for index, tokens_T in enumerate(tokens_BT)], max_tokens=2 * ROWS * LENGTH
    )[0]
    found_BT = torch.full((ROWS, LENGTH - 1), torch.nan)
    for row, log_probs_T in zip(batch.micro_batches, trainer.log_probs(batch), strict=True):
        for sample in np.unique(row.sample_T[row.sample_T >= 0]):
            found_BT[sample] = log_probs_T[np.flatnonzero((row.sample_T == sample) & row.loss_mask_T)]
    return found_BT


@torch.inference_mode()
def by_engine(directory: Path, tokens_BT: Tensor) -> Tensor:
    """Return log-probs of a prefill and of decoding steps behind it."""
    return of_tokens(decode_all(load(directory), tokens_BT, PREFILLED), tokens_BT)


def of_tokens(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return logits_BTV.log_softmax(-1)[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
@pytest.mark.parametrize("family", [*DENSE, *EXPERTS])
def test_what_is_taken_is_right(family: str, seed: int, here: Any, tmp_path: Path) -> None:
    chance = random.Random(f"{family} {seed}")
    changes = changes_of(family, chance)
    directory = original = write_tiny_model(tmp_path / "5", family, seed=seed, **changes)
    if chance.random() < 0.5:
        directory = as_transformers_4(original, tmp_path / "4")
    reference = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    tokens_BT = torch.randint(
        3, reference.config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    with torch.no_grad():
        wanted_BT = of_tokens(reference(tokens_BT).logits, tokens_BT)
    may_refuse = {"learner": changes.get("num_experts_per_tok") == 1, "engine": family not in FAMILIES}
    for name, compute in (
        ("learner", lambda: by_learner(directory, tokens_BT, here)),
        ("engine", lambda: by_engine(directory, tokens_BT)),
    ):
        try:
            found_BT = compute()
        except (ConfigRefused, UnsupportedModel):
            assert may_refuse[name], f"{name} refuses {family} with {changes}"
            continue
        assert (found_BT - wanted_BT).abs().max() < LIMIT, f"{name}: {family} with {changes} in {directory.name}"
