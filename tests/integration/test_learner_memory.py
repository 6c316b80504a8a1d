"""The learner's memory between steps: all of it is released, restored with its contents, and not used meanwhile, on
both backends.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.garbage import freeze_again
from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.fsdp import policy as fsdp_policy
from tidemill.learner.backends.fsdp import state as fsdp_state
from tidemill.learner.backends.fsdp.optimizer import FsdpOptimizer
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.errors import MemoryReleased
from tidemill.learner.layout import parallel
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.memory import Memory
from tidemill.learner.trainer.trainer import Trainer


class LossyMemory(Memory):
    """Memory that loses the contents of its regions at a release, as a device does: every byte becomes 255, which makes
    NaNs of floats.

    Contents that are to be kept come back at a resume.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, torch.UntypedStorage] = {}
        self.scratch: set[int] = set()
        self._kept: dict[int, torch.Tensor] = {}

    @contextmanager
    def region(self, *, scratch: bool = False) -> Iterator[None]:
        gc.collect()  # uncollected objects lie at addresses that may be used again
        before = set(storages())
        with super().region():
            yield
        new = {at: storage for at, storage in storages().items() if at not in before}
        self.places |= new
        self.scratch |= new.keys() if scratch else set()

    def release(self) -> None:
        super().release()
        for at, storage in self.places.items():
            content = torch.tensor([], dtype=torch.uint8).set_(storage)
            if at not in self.scratch:
                self._kept[at] = content.clone()
            content.fill_(255)

    def resume(self) -> None:
        super().resume()
        for at, content in self._kept.items():
            torch.tensor([], dtype=torch.uint8).set_(self.places[at]).copy_(content)


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors of this process."""
    found = [
        each.untyped_storage()
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor)
        and not issubclass(type(each), DTensor)  # which has no memory of its own
        and each.layout == torch.strided
        and each.device.type == "cpu"
    ]
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_not_searched() -> None:
    """Hide the objects of this process from ``gc``: they are millions, and each region searches them twice."""
    freeze_again()


class Made(NamedTuple):
    """A policy and its optimizer, in a memory."""

    policy: Any
    optimizer: Any
    state: Any
    """Module of its backend that saves and loads."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Everything that is to keep its content: weights, main weights, moments."""
        of_torch = getattr(self.optimizer.inner, "optimizer", self.optimizer.inner)
        moments = [tensor for of_part in of_torch.state.values() for tensor in of_part.values()]
        main = [tensor for group in of_torch.param_groups for tensor in group["params"]]
        weights = [weight for _, weight in self.policy.named_weights()]
        return [*weights, *main, *(each for each in moments if isinstance(each, torch.Tensor) and each.ndim)]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Memory of gradients between steps."""
        if isinstance(self.policy, MegatronPolicy):
            return [buffer.grad_data for buffer in self.policy.ddp.buffers]
        return [weight.grad.to_local() for weight in self.policy.root.parameters() if weight.grad is not None]


def of_megatron(
    model_dir: Path, here: parallel.Parallel, memory: Memory, dtype: str, replicas: groups.Replicas | None = None
) -> Made:
    policy = build_policy(model_dir, dtype=dtype, parallel=here, replicas=replicas, memory=memory)
    return Made(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), state)


def of_fsdp(model_dir: Path, here: parallel.Parallel, memory: Memory, dtype: str) -> Made:
    policy = fsdp_policy.build_policy(model_dir, dtype=dtype, parallel=here, memory=memory)
    return Made(policy, FsdpOptimizer(policy, OPTIMIZER, steps=10), fsdp_state)


# With one replica the share is everything, but weights are in the wrapper's buffer.
SHARES = partial(of_megatron, replicas=groups.Replicas(distributed_optimizer=True))
MAKERS = {"megatron": of_megatron, "megatron, distributed": SHARES, "fsdp": of_fsdp}


def save(made: Made, directory: Path, step: int) -> None:
    directory.mkdir()
    write_staged(
        made.state.stage(
            directory,
            step=step,
            policy=made.policy,
            optimizer=made.optimizer,
            others=OtherModels(),
            numbers={},
            copies=None,
        )
    )


def trainer_of(made: Made) -> tuple[Trainer, WeightBackup]:
    backup = WeightBackup(made.policy)
    others = OtherModels(proximal=backup)
    return Trainer(made.policy, made.optimizer, AlgorithmConfig(), max_lag=2, others=others), backup


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_releases_between_them_are_the_same_bits(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path, dtype: str, name: str
) -> None:
    batches = [make_batches(make_samples(vocab=VOCAB, seed=seed))[0] for seed in range(3)]
    digests = []
    for memory in (Memory(), LossyMemory()):
        made = MAKERS[name](model_dir, here, memory, dtype)
        trainer, _ = trainer_of(made)
        of_steps = []
        for batch in batches:
            memory.release()
            memory.resume()
            trainer.train(batch)
            of_steps.append(made.policy.digest())
        memory.release()
        memory.resume()
        checkpoint = tmp_path / type(memory).__name__
        save(made, checkpoint, step=3)
        again = MAKERS[name](model_dir, here, type(memory)(), dtype)
        again.state.load(checkpoint, policy=again.policy, optimizer=again.optimizer, others=OtherModels(), files=None)
        again.policy.memory.release()
        again.policy.memory.resume()
        digests.append([*of_steps, again.policy.digest()])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3 and digests[0][-1] == digests[0][-2]
    places = [each.untyped_storage().data_ptr() for each in made.tensors]
    assert not memory.scratch.intersection(places), "these lose their content"
    places += [each.untyped_storage().data_ptr() for each in made.gradients]
    assert memory.places.keys() >= set(places), "these stay in memory when it is released"


@pytest.mark.parametrize("name", ["megatron", "fsdp"])
def test_what_is_released_cannot_be_used(here: parallel.Parallel, model_dir: Path, tmp_path: Path, name: str) -> None:
    memory = Memory()
    made = MAKERS[name](model_dir, here, memory, "float32")
    trainer, backup = trainer_of(made)
    batch = make_batches(make_samples(vocab=VOCAB))[0]
    memory.release()
    for number, use in enumerate(
        (
            lambda: trainer.train(batch),
            lambda: trainer.log_probs(batch),
            lambda: dict(made.policy.export()),
            lambda: dict(made.policy.export_part(1)),
            made.policy.digest,
            backup.refresh,
            lambda: save(made, tmp_path / "checkpoint", step=1),
            lambda: type(made.optimizer)(made.policy, OPTIMIZER, steps=10),
            memory.release,
        )
    ):
        with pytest.raises(MemoryReleased, match="released"):
            use()
            pytest.fail(f"use {number}")
    memory.resume()
    with pytest.raises(AssertionError):
        memory.resume()
    trainer.train(batch)
