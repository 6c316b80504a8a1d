"""FSDP2 over models of transformers behind the port of backends (``learner/trainer/port.py``), and the outputs of
their modules under the names that Megatron's have. Modules that a family names otherwise are left out, and named in the
log.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tidemill.learner.backends.fsdp import state
from tidemill.learner.backends.fsdp.opening import base_of
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.fsdp.policy import FsdpPolicy, build_policy
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import choose_own_kernels, this_site
from tidemill.learner.layout.parallel import Parallel, join_world, of_replicas
from tidemill.learner.settings.config import ROLLOUT, LearnerConfig
from tidemill.learner.settings.lora import Tuning
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.checkpoint_facts import adapters_in, read_facts
from tidemill.learner.trainer.memory import open_memory
from tidemill.learner.trainer.module_outputs import Place, num_tokens, outputs_of
from tidemill.learner.trainer.port import DTYPES

log = logging.getLogger(__name__)

_OF_LAYER = {"attention": ("self_attn", "linear_attn", "attention"), "mlp": ("mlp", "feed_forward", "block_sparse_moe")}
"""Names of a layer's modules in the families, by ours."""
_MIXER = "mixer"
"""Name of the only module of a layer of nemotron_h, which has a kind (``block_type``)."""
_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")


def module_outputs(
    policy: FsdpPolicy, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    W].

    One prompt at a time under the current weights. Collective over all ranks, which compute the same; rank 0 gets the
    outputs, the others none.
    """
    policy.memory.want("a forward pass")
    places, values = list(_places(policy)), {}
    for number, tokens in enumerate(prompts):
        for name, output in outputs_of(policy, places, tokens, names):
            if policy.parallel.rank == 0:
                values[f"{number}.{name}"] = output[: num_tokens(name, tokens)].float().cpu().numpy()
    return values


def _shared_name(name: str, layer: torch.nn.Module) -> str:
    """Return our name of a module of a layer; empty = there is none."""
    if name == _MIXER:
        return "mlp" if getattr(layer, "block_type", "") in ("mlp", "moe") else "attention"
    return next((ours for ours, names in _OF_LAYER.items() if name in names), "")


def _places(policy: FsdpPolicy) -> Iterator[Place]:
    transformer = policy.root.transformer
    yield Place("embedding", transformer.get_input_embeddings())
    base, left_out = base_of(transformer), set[str]()
    for number, layer in enumerate(base.layers):
        for own_name, module in layer.named_children():
            if name := _shared_name(own_name, layer):
                yield Place(f"layers.{number}.{name}", module)
            else:
                left_out.add(own_name)
        yield Place(f"layers.{number}", layer)
    log.info("modules of layers without a shared name are left out of the dump: %s", ", ".join(sorted(left_out)))
    for module in (getattr(base, name, None) for name in _NORMS):
        if module is not None:
            yield Place("norm", module)


def _of_both(learner: LearnerConfig, dtype: str) -> dict[str, Any]:
    """Return the arguments of ``build_policy`` that are the same for the policy and the critic."""
    site = this_site(DTYPES[dtype], 0)
    return {
        "attention": learner.attention,
        "recompute": learner.recompute != "none",
        "fused": choose_own_kernels("learner.fused_log_probs", learner.fused_log_probs, site).kernel == "fused",
        "family": learner.family,
    }


class FsdpBackend:
    """Every family of transformers, with weights, gradients and the optimizer's state divided over all ranks."""

    damaged: tuple[type[Exception], ...] = ()

    def join(self, learner: LearnerConfig, *, device: torch.device, timeout_s: float) -> Parallel:
        """Join the other ranks: each is a replica with its own rows. ValueError for ranks that cannot be divided."""
        join_world(device, timeout_s=timeout_s)
        torch.manual_seed(learner.seed)
        return of_replicas(device, copies=learner.fsdp_copies)

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def open_policy(
        self,
        learner: LearnerConfig,
        model_dir: Path,
        parallel: Parallel,
        *,
        dtype: str,
        initial: Path | None = None,
    ) -> FsdpPolicy:
        """Build the model, divided over all ranks."""
        if initial is not None:
            raise ConfigRefused("model.megatron_checkpoint", "none with learner.backend: fsdp", str(initial))
        return build_policy(
            model_dir,
            dtype=dtype,
            parallel=parallel,
            memory=open_memory(colocated=learner.colocated, device=parallel.device),
            tuning=Tuning.of(learner),
            replays=learner.routing_replay != "none",
            given=learner.routing_replay == ROLLOUT,
            further=learner.mtp_loss_scaling_factor > 0,
            **_of_both(learner, dtype),
        )

    def open_value_model(self, learner: LearnerConfig, policy: FsdpPolicy, model_dir: Path) -> FsdpPolicy:
        """Build the critic. Its routers choose anew in every pass."""
        return build_policy(
            Path(learner.critic.path) if learner.critic.path else model_dir,
            dtype=policy.dtype,
            parallel=policy.parallel,
            memory=policy.memory,
            value_head=True,
            **_of_both(learner, policy.dtype),
        )

    def open_optimizer(
        self, policy: FsdpPolicy, config: OptimizerConfig, *, steps: int, offload: bool
    ) -> FsdpOptimizer:
        """Return an optimizer of torch over the parts of this rank."""
        return FsdpOptimizer(policy, config, steps=steps, offload=offload)

    def read_model(
        self, checkpoint: Path, model_dir: Path, parallel: Parallel, *, code_path: str = ""
    ) -> tuple[FsdpPolicy, int]:
        """Return a model for the dtype of the checkpoint's passes, in which its float32 weights are exported."""
        facts = read_facts(checkpoint)
        policy = build_policy(
            model_dir,
            dtype=facts["dtype"],
            parallel=parallel,
            tuning=Tuning(lora=adapters_in(facts)),
            further=bool(facts.get("further")),
            family=code_path,
        )
        return policy, state.load_model(checkpoint, policy=policy, setting="--model")

    def write_checkpoint(
        self, directory: Path, model_dir: Path, parallel: Parallel, *, dtype: str, code_path: str = ""
    ) -> None:
        """Write float32 weights."""
        policy = build_policy(model_dir, dtype=dtype, parallel=parallel, family=code_path)
        state.save_model(directory, policy=policy)

    stage = staticmethod(state.stage)
    load = staticmethod(state.load)
    load_weights = staticmethod(state.load_weights)
    module_outputs = staticmethod(module_outputs)
