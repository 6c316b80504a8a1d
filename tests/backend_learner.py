"""A learner on either backend, as its processes build it, for tests of one or several ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.learner_steps import make_batches
from tidemill.bus.wire.messages import Sample
from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.backups import OtherModels, Reference, WeightBackup, open_reference
from tidemill.learner.trainer.critic import Critic, open_critic
from tidemill.learner.trainer.port import AnyBackend
from tidemill.learner.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class BackendLearner:
    """One rank of a learner."""

    backend: AnyBackend
    model_dir: Path
    policy: Any
    optimizer: Any
    critic: Critic | None
    reference: Reference
    proximal: WeightBackup | None
    trainer: Trainer

    @property
    def saved_models(self) -> OtherModels:
        """Models beside the policy that belong in a checkpoint."""
        return OtherModels(proximal=self.proximal, reference=self.reference.saved, critic=self.critic)

    def train(self, step: int, samples: list[Sample], *, max_tokens: int = 60, **batch: Any) -> dict[str, float]:
        """Train a step of these samples, of which each rank gets its own. Returns its metrics."""
        here = self.policy.parallel
        batches = make_batches(samples, step=step, data_parallel=here.dp_size, max_tokens=max_tokens, **batch)
        metrics = self.trainer.train(batches[here.dp_rank])
        self.reference.follow(step)
        return metrics

    def save(self, directory: Path, step: int) -> None:
        """Write a checkpoint into an existing directory that all ranks share."""
        staged = self.backend.stage(
            directory,
            step=step,
            policy=self.policy,
            optimizer=self.optimizer,
            others=self.saved_models,
            numbers=self.trainer.numbers,
            copies=None,
        )
        write_staged(staged)

    def load(self, directory: Path, files: CheckpointFiles | None = None) -> int:
        """Continue from a checkpoint, some of whose ``files`` may be elsewhere. Returns its step."""
        step, numbers = self.backend.load(
            directory, policy=self.policy, optimizer=self.optimizer, others=self.saved_models, files=files
        )
        self.trainer.restore(numbers)
        return step


def open_learner(
    backend: AnyBackend,
    model_dir: Path,
    here: Parallel,
    learner: LearnerConfig,
    *,
    proximal: bool = False,
    dtype: str = "float32",
) -> BackendLearner:
    """Return a learner with these settings. ``proximal``: keep the weights of the last published version."""
    policy = backend.open_policy(learner, model_dir, here, dtype=dtype)
    optimizer = backend.open_optimizer(
        policy, learner.optimizer, steps=learner.steps, offload=learner.offload_optimizer
    )
    reference = open_reference(policy, learner.algorithm)
    critic = open_critic(backend, learner, policy, model_dir)
    copy = WeightBackup(policy) if proximal else None
    others = OtherModels(proximal=copy, reference=reference.weights, critic=critic)
    mtp = {"mtp_factor": learner.mtp_loss_scaling_factor}
    trainer = Trainer(policy, optimizer, learner.algorithm, max_lag=2, others=others, **mtp)
    return BackendLearner(
        backend=backend,
        model_dir=model_dir,
        policy=policy,
        optimizer=optimizer,
        critic=critic,
        reference=reference,
        proximal=copy,
        trainer=trainer,
    )
