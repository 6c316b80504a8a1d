"""Megatron's models behind the port of backends (``learner/trainer/port.py``), and the outputs of their modules.

    rank: its layers, tokens, heads -> outputs of the stage (tensor-, context-parallel ranks) -> rank 0: all stages

Modules have names that other implementations of a model share: ``embedding``, ``layers.<i>`` (its output) with
``.attention.qkv``, ``.attention.core``, ``.attention``, ``.mlp.experts``, ``.mlp``, then ``norm`` and ``log_probs``.
Layers have the numbers of the whole model at every layout. ``.mlp.experts`` is 1 where a token is sent to an
expert, else 0. Shape letters: T = tokens of one prompt, with padding; C = tokens of this context-parallel rank; W =
width of an output.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from numpy.typing import NDArray
from torch import Tensor

from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.layout.parallel import Parallel, gather_parts, of_all_stages
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import Tuning
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.checkpoint_facts import adapters_in
from tidemill.learner.trainer.memory import open_memory
from tidemill.learner.trainer.module_outputs import Place, num_tokens, outputs_of
from tidemill.learner.trainer.port import named_dtype


def _dtype_of(checkpoint: Path) -> str:
    """Return the dtype of the weights in a checkpoint. Raises ConfigRefused for another than those of the learner."""
    tensors = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    other_prefixes = ("optimizer", "chained_", "proximal.", "reference.", "critic.")
    weights = {name: part.dtype for name, part in tensors.items() if not name.startswith(other_prefixes)}
    return named_dtype(next(iter(weights.values()), None), str(checkpoint))


def _sent(output: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for each token and expert to which a router has sent it, else 0."""
    return output[1].float()


def module_outputs(
    policy: MegatronPolicy, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    W].

    One prompt at a time under the current weights. Collective over all ranks; rank 0 gets the whole outputs of all
    stages, the others none. Latent attention has no attention.qkv.
    """
    ranks, values = policy.parallel, {}
    in_first_column = ranks.dp_rank == ranks.tp_rank == ranks.cp_rank == 0
    policy.memory.want("a forward pass")
    for number, tokens in enumerate(prompts):
        stage_outputs = outputs_of(policy, list(_places(policy)), tokens, names)
        if not in_first_column:
            continue
        outputs = dict(of_all_stages(iter(stage_outputs), ranks))
        if ranks.rank == 0:
            for name in sorted(outputs, key=_order):
                values[f"{number}.{name}"] = outputs[name][: num_tokens(name, tokens)].float().cpu().numpy()
    return values


def _order(name: str) -> float:
    """Return the place of a module among the modules of other stages; modules of one layer are in order already."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    return int(layer) if layer else -1 if name == "embedding" else np.inf


def _places(policy: MegatronPolicy) -> Iterator[Place]:
    ranks, config = policy.parallel, policy.config

    def tokens(value: Tensor) -> Tensor:
        """Return the tokens of all tensor-parallel ranks, which sequence parallelism divides."""
        return gather_parts(value, ranks.tp_group) if ranks.sequence_parallel else value

    def heads(value_CW: Tensor) -> Tensor:
        """Return the heads of all tensor-parallel ranks, in their order."""
        return gather_parts(value_CW.t(), ranks.tp_group).t() if ranks.tp_size > 1 else value_CW

    def query_key_value(value_CW: Tensor) -> Tensor:
        return torch.cat([heads(part) for part in _split(value_CW, config, ranks.tp_size)], dim=-1)

    for model in policy.chunks:
        if model.pre_process:
            yield Place("embedding", model.embedding, tokens)
        for layer in model.decoder.layers:
            attention, at = layer.self_attention, f"layers.{layer.layer_number - 1}"
            if not config.multi_latent_attention:  # which has no joint projection
                yield Place(f"{at}.attention.qkv", attention.linear_qkv, query_key_value)
            yield Place(f"{at}.attention.core", attention.core_attention, heads)
            yield Place(f"{at}.attention", attention, tokens)
            if (router := getattr(layer.mlp, "router", None)) is not None:
                yield Place(f"{at}.mlp.experts", router, tokens, _sent)
            yield Place(f"{at}.mlp", layer.mlp, tokens)
            yield Place(at, layer, tokens)
        if model.post_process:
            yield Place("norm", model.decoder.final_layernorm, tokens)


def _split(mixed_CW: Tensor, config: Any, tp_size: int) -> tuple[Tensor, ...]:
    """Return this rank's queries, keys and values; Megatron has them group by group."""
    groups, size = config.num_query_groups // tp_size, config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups
    parts = mixed_CW.unflatten(-1, (groups, queries + 2, size)).split((queries, 1, 1), dim=-2)
    return tuple(part.flatten(-3) for part in parts)


class MegatronBackend:
    """Tensor, pipeline, context and expert parallelism, and Megatron's optimizers, for the families with a bridge."""

    damaged = (CheckpointingException,)

    def join(self, learner: LearnerConfig, *, device: torch.device, timeout_s: float) -> Parallel:
        """Join the other ranks, in Megatron's groups."""
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it logs every parameter
        return groups.join(
            tensor_parallel_size=learner.tensor_parallel,
            device=device,
            seed=learner.seed,
            timeout_s=timeout_s,
            pipeline_parallel_size=learner.pipeline_parallel,
            virtual_pipeline_size=learner.virtual_pipeline,
            edge_layers=learner.edge_layers,
            context_parallel_size=learner.context_parallel,
            expert_parallel_size=learner.expert_parallel,
            sequence_parallel=learner.sequence_parallel,
        )

    def leave(self) -> None:
        """Destroy the process groups."""
        groups.leave()

    def open_policy(
        self,
        learner: LearnerConfig,
        model_dir: Path,
        parallel: Parallel,
        *,
        dtype: str,
        initial: Path | None = None,
    ) -> MegatronPolicy:
        """Build the chunks of this rank."""
        return build_policy(
            model_dir,
            dtype=dtype,
            parallel=parallel,
            kernels=Wanted.of(learner),
            replicas=groups.choose_replicas(learner, parallel),
            memory=open_memory(colocated=learner.colocated, device=parallel.device),
            tuning=Tuning.of(learner),
            mixture=Mixture.of(learner),
            bridge_class=learner.bridge,
            megatron_checkpoint=initial,
        )

    def open_value_model(self, learner: LearnerConfig, policy: MegatronPolicy, model_dir: Path) -> MegatronPolicy:
        """Build the critic. Its routers choose anew in every pass, without a balancing loss."""
        return build_policy(
            Path(learner.critic.path) if learner.critic.path else model_dir,
            dtype=policy.dtype,
            parallel=policy.parallel,
            kernels=Wanted.of(learner),
            replicas=policy.replicas,
            memory=policy.memory,
            value_head=True,
            bridge_class=learner.bridge,
            megatron_checkpoint=None if learner.critic.path else policy.megatron_checkpoint,
        )

    def open_optimizer(
        self, policy: MegatronPolicy, config: OptimizerConfig, *, steps: int, offload: bool
    ) -> MegatronOptimizer:
        """Return Megatron's optimizer, or the offloaded one."""
        return MegatronOptimizer(policy, config, steps=steps, offload=offload)

    def read_model(
        self, checkpoint: Path, model_dir: Path, parallel: Parallel, *, code_path: str = ""
    ) -> tuple[MegatronPolicy, int]:
        """Return a model in the dtype of the checkpoint's weights."""
        lora = adapters_in(load_common_state_dict(str(checkpoint)).get("facts", {}))
        policy = build_policy(
            model_dir,
            dtype=_dtype_of(checkpoint),
            parallel=parallel,
            tuning=Tuning(lora=lora, trains=False),
            bridge_class=code_path,
        )
        return policy, state.load_model(checkpoint, policy=policy, setting="--model")

    def write_checkpoint(
        self, directory: Path, model_dir: Path, parallel: Parallel, *, dtype: str, code_path: str = ""
    ) -> None:
        """Write weights in ``dtype``."""
        tuning = Tuning(trains=False)
        policy = build_policy(model_dir, dtype=dtype, parallel=parallel, tuning=tuning, bridge_class=code_path)
        state.save_model(directory, policy=policy)

    stage = staticmethod(state.stage)
    load = staticmethod(state.load)
    load_weights = staticmethod(state.load_weights)
    module_outputs = staticmethod(module_outputs)
