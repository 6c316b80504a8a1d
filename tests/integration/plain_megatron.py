"""Checkpoints as Megatron's own training writes them: plain megatron-core models, Adam with its state shared out, in a
world of two ranks.

The models are built and filled without Tidemill's bridges, from the safetensors of a Hugging Face directory, by rules
of this file.
"""

import json
import os
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from tests.megatron_world import joined
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.layout.parallel import Parallel

PADDED = 384
"""Rows of the vocabulary in the checkpoints; the models have fewer."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "vpp2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "ep2": {"expert_parallel_size": 2},
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


def save(
    directory: Path, weights: dict[str, Tensor], config: dict[str, Any], here: Parallel, *, dtype: str, **metadata: bool
) -> None:
    """Write one iteration, number 10. ``config``: of the model's directory. ``metadata``: versions of the sharded
    state.

    The optimizer has taken a step with a learning rate of 0, so its moments are no zeros, and the weights are the given
    ones.
    """
    settings = _settings(config, here, getattr(torch, dtype))
    with megatron_device():
        modules = [_module(settings, config, here, stage) for stage in range(here.vp_size)]
        for module in modules:
            _fill(module, weights, settings)
        inner = [Float16Module(settings, one) if dtype == "bfloat16" else one for one in modules]
        replicas = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        ddps = [DistributedDataParallel(settings, replicas, one) for one in inner]
        adam = OptimizerConfig(
            optimizer="adam", lr=0.0, weight_decay=0.0, bf16=dtype == "bfloat16", use_distributed_optimizer=True
        )
        optimizer = get_megatron_optimizer(adam, ddps)
        for ddp in ddps:
            for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
                buffer.grad_data.normal_()
        optimizer.step()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        versions = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "chained_optim_avoid_prefix": True,
            **metadata,
            "dp_cp_group": group,
        }
        content = {
            ("model" if len(modules) == 1 else f"model{at}"): one.sharded_state_dict(metadata=versions)
            for at, one in enumerate(modules)
        }
        content["optimizer"] = optimizer.sharded_state_dict(content, metadata=versions)
        content |= {
            "args": Namespace(lr=0.0),
            "iteration": 10,
            "checkpoint_version": 3.0,
            "num_floating_point_operations_so_far": 0,
        }
        if here.rank == 0:
            directory.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(
            content, str(directory), content_metadata={"chained_optim_avoid_prefix": True, **metadata}
        )
    assert any(name.startswith("optimizer") or "exp_avg" in name for name in torch_dist.read_index(directory).shapes)


def _settings(config: dict[str, Any], here: Parallel, dtype: torch.dtype) -> TransformerConfig:
    experts: dict[str, Any] = {}
    if num_experts := config.get("num_experts", config.get("num_local_experts")):  # transformers 5 writes the second
        experts = {
            "num_moe_experts": num_experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": here.ep_size,
        }
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        qk_layernorm=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=here.tp_size,
        pipeline_model_parallel_size=here.pp_size,
        virtual_pipeline_model_parallel_size=here.vp_size if here.vp_size > 1 else None,
        batch_p2p_sync=False,
        **experts,
    )


def _module(settings: TransformerConfig, config: dict[str, Any], here: Parallel, number: int) -> GPTModel:
    stage = number if here.vp_size > 1 else None
    module = GPTModel(
        config=settings,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            settings, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        ),
        vocab_size=PADDED,
        max_sequence_length=config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        vp_stage=stage,
    )
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return module


@torch.no_grad()
def _fill(module: GPTModel, weights: dict[str, Tensor], settings: TransformerConfig) -> None:
    """Copy this rank's part of the weights into a module."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), settings.tensor_model_parallel_size
    for name, parameter in module.named_parameters():
        number = re.match(r"decoder\.layers\.(\d+)\.", name)
        if number is not None:
            layer = module.decoder.layers[int(number[1])].layer_number - 1
            whole = _in_layer(name.removeprefix(number[0]), weights, f"model.layers.{layer}.", settings)
        else:
            whole = [weights[_OUTSIDE[name]]]
        if "embedding" in name or "output_layer" in name:
            whole = [F.pad(whole[0], (0, 0, 0, PADDED - len(whole[0])))]
        split = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
        is_split = parameter.shape != torch.cat(whole).shape
        mine = torch.cat([one.chunk(size, dim=split)[rank] if is_split else one for one in whole])
        parameter.copy_(mine)


_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def _in_layer(name: str, weights: dict[str, Tensor], layer: str, settings: TransformerConfig) -> Sequence[Tensor]:
    """Return the whole of a layer's tensor; of a gated layer both halves, each of which is split over ranks."""
    if found := _EXPERT.fullmatch(name):
        first = (
            parallel_state.get_expert_model_parallel_rank()
            * (settings.num_moe_experts or 0)
            // settings.expert_model_parallel_size
        )
        of, name = f"{layer}mlp.experts.{first + int(found[1])}.", f"mlp.{found[2]}.weight"
    else:
        of = f"{layer}mlp."
    if name == "self_attention.linear_qkv.weight":
        # Of each group of heads the queries, the keys and the values.
        groups = settings.num_query_groups or 0
        parts = [weights[f"{layer}self_attn.{one}_proj.weight"].view(groups, -1, settings.hidden_size) for one in "qkv"]
        return [torch.cat(parts, 1).flatten(0, 1)]
    if name == "mlp.linear_fc1.weight":
        return [weights[f"{of}gate_proj.weight"], weights[f"{of}up_proj.weight"]]
    names = {
        "input_layernorm.weight": f"{layer}input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{layer}post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": f"{layer}self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": f"{layer}self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": f"{layer}self_attn.k_norm.weight",
        "mlp.router.weight": f"{layer}mlp.gate.weight",
        "mlp.linear_fc2.weight": f"{of}down_proj.weight",
    }
    return [weights[names[name]]]


def loaded(model_dir: Path, checkpoint: Path, here: Parallel, *, dtype: str = "float32") -> str:
    """Return the digest of the weights with which a policy of this layout begins."""
    policy = build_policy(model_dir, dtype=dtype, parallel=here, megatron_checkpoint=checkpoint)
    assert policy.begins_apart
    return policy.digest()


def given(model_dir: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and configuration of a model directory."""
    return load_file(model_dir / "model.safetensors"), json.loads((model_dir / "config.json").read_text())


def main(dense: Path, experts: Path, base: Path, base_experts: Path, out: Path) -> None:
    """Write checkpoints of ``dense`` and ``experts`` at several layouts, and load each into the other model at other
    layouts.

    ``base``, ``base_experts``: directories of the same models with other weights. The results are digests.
    """
    written, sparse = given(dense), given(experts)
    results: dict[str, str] = {}
    with joined(**LAYOUTS["tp2"]) as here:
        save(out / "tp2" / "release", *written, here, dtype="float32")
        _track(out / "tp2", "release", here)
    with joined(**LAYOUTS["vpp2"]) as here:
        save(out / "vpp2" / "iter_0000010", *written, here, dtype="float32")
        results["tp2 in vpp2"] = loaded(base, out / "tp2", here)
    with joined(**LAYOUTS["pp2"]) as here:
        save(out / "pp2" / "iter_0000010", *written, here, dtype="bfloat16", non_homogeneous_layers=True)
        _track(out / "pp2", "10\n", here)
        results["vpp2 in pp2"] = loaded(base, out / "vpp2" / "iter_0000010", here)
    with joined(**LAYOUTS["ep2"]) as here:
        save(out / "ep2" / "iter_0000010", *sparse, here, dtype="bfloat16")
        save(out / "ep2 apart" / "iter_0000010", *sparse, here, dtype="float32", singleton_local_shards=True)
        results["ep2 apart in ep2"] = loaded(base_experts, out / "ep2 apart" / "iter_0000010", here)
    with joined(**LAYOUTS["tp2"], sequence_parallel=True) as here:
        results["pp2 in tp2, bfloat16"] = loaded(base, out / "pp2", here, dtype="bfloat16")
        results["ep2 in tp2, bfloat16"] = loaded(base_experts, out / "ep2" / "iter_0000010", here, dtype="bfloat16")
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results | {"cpu_s": str(time.process_time())}))


def _track(directory: Path, text: str, here: Parallel) -> None:
    if here.rank == 0:
        (directory / torch_dist.TRACKER).write_text(text)
