"""Megatron's models behind the port of backends (``learner/trainer/backend.py``)."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.activations import module_outputs
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.layers.kernels import Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.tuning import Tuning
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.schedule import OptimizerConfig
from tidemill.learner.trainer.memory import open_memory


class MegatronBackend:
    """Tensor, pipeline, context and expert parallelism, and Megatron's optimizers, for the families with a bridge."""

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

    stage = staticmethod(state.stage)
    load = staticmethod(state.load)
    load_weights = staticmethod(state.load_weights)

    def module_outputs(
        self, policy: MegatronPolicy, prompts: Sequence[Sequence[int]], names: str
    ) -> dict[str, NDArray[np.float32]]:
        """Return the outputs of Megatron's modules under names that other implementations share."""
        return module_outputs(policy, prompts, names)
