"""FSDP2 over models of transformers behind the port of backends (``learner/trainer/backend.py``)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tidemill.learner.backends.fsdp import state
from tidemill.learner.backends.fsdp.activations import module_outputs
from tidemill.learner.backends.fsdp.lora import Tuning
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.fsdp.policy import FsdpPolicy, build_policy
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import choose_own_kernels, this_site
from tidemill.learner.layout.parallel import Parallel, join_world, of_replicas
from tidemill.learner.settings.config import ROLLOUT, LearnerConfig
from tidemill.learner.settings.schedule import OptimizerConfig
from tidemill.learner.trainer.backend import DTYPES
from tidemill.learner.trainer.memory import Memory, open_memory


class FsdpBackend:
    """Every family of transformers, with weights, gradients and the optimizer's state divided over all ranks."""

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
        return self._build(
            learner,
            model_dir,
            parallel,
            dtype=dtype,
            memory=open_memory(colocated=learner.colocated, device=parallel.device),
            tuning=Tuning.of(learner),
            replays=learner.routing_replay != "none",
            given=learner.routing_replay == ROLLOUT,
            further=learner.mtp_loss_scaling_factor > 0,
        )

    def open_value_model(self, learner: LearnerConfig, policy: FsdpPolicy, model_dir: Path) -> FsdpPolicy:
        """Build the critic. Its routers choose anew in every pass."""
        directory = Path(learner.critic.path) if learner.critic.path else model_dir
        return self._build(
            learner, directory, policy.parallel, dtype=policy.dtype, memory=policy.memory, value_head=True
        )

    def _build(
        self,
        learner: LearnerConfig,
        model_dir: Path,
        parallel: Parallel,
        *,
        dtype: str,
        memory: Memory,
        tuning: Tuning | None = None,
        replays: bool = False,
        given: bool = False,
        value_head: bool = False,
        further: bool = False,
    ) -> FsdpPolicy:
        site = this_site(DTYPES[dtype], 0)
        kernel = choose_own_kernels("learner.fused_log_probs", learner.fused_log_probs, site)
        return build_policy(
            model_dir,
            dtype=dtype,
            parallel=parallel,
            memory=memory,
            tuning=tuning or Tuning(),
            attention=learner.attention,
            recompute=learner.recompute != "none",
            replays=replays,
            given=given,
            fused=kernel.kernel == "fused",
            value_head=value_head,
            further=further,
            family=learner.family,
        )

    def open_optimizer(
        self, policy: FsdpPolicy, config: OptimizerConfig, *, steps: int, offload: bool
    ) -> FsdpOptimizer:
        """Return an optimizer of torch over the parts of this rank."""
        return FsdpOptimizer(policy, config, steps=steps, offload=offload)

    stage = staticmethod(state.stage)
    load = staticmethod(state.load)
    load_weights = staticmethod(state.load_weights)

    def module_outputs(
        self, policy: FsdpPolicy, prompts: Sequence[Sequence[int]], names: str
    ) -> dict[str, NDArray[np.float32]]:
        """Return the outputs of transformers' modules under names that other implementations share."""
        return module_outputs(policy, prompts, names)
