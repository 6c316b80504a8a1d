"""The learner's memory between steps: all of it is released, restored with its contents, and not used meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.garbage import freeze_again
from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
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
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided
    ]
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_not_searched() -> None:
    """Hide the objects of this process from ``gc``: they are millions, and each region searches them twice."""
    freeze_again()


SHARES = groups.Replicas(distributed_optimizer=True)
"""With one replica the share is everything, but weights are in the wrapper's buffer."""


def learner(
    model_dir: Path, here: parallel.Parallel, memory: Memory, dtype: str, replicas: groups.Replicas | None = None
) -> tuple[MegatronPolicy, MegatronOptimizer, Trainer, WeightBackup]:
    policy = build_policy(model_dir, dtype=dtype, parallel=here, replicas=replicas, memory=memory)
    optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
    backup = WeightBackup(policy)
    return (
        policy,
        optimizer,
        Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2, others=OtherModels(proximal=backup)),
        backup,
    )


@pytest.mark.parametrize("replicas", [None, SHARES], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_releases_between_them_are_the_same_bits(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path, dtype: str, replicas: groups.Replicas | None
) -> None:
    batches = [make_batches(make_samples(vocab=VOCAB, seed=seed))[0] for seed in range(3)]
    digests = []
    for memory in (Memory(), LossyMemory()):
        policy, optimizer, trainer, _ = learner(model_dir, here, memory, dtype, replicas)
        made = []
        for batch in batches:
            memory.release()
            memory.resume()
            trainer.train(batch)
            made.append(policy.digest())
        memory.release()
        memory.resume()
        checkpoint = tmp_path / type(memory).__name__
        checkpoint.mkdir()
        state.save(checkpoint, step=3, policy=policy, optimizer=optimizer)
        again = build_policy(model_dir, dtype=dtype, parallel=here, replicas=replicas, memory=type(memory)())
        restored = MegatronOptimizer(again, OPTIMIZER, steps=10)
        state.load(checkpoint, policy=again, optimizer=restored)
        again.memory.release()
        again.memory.resume()
        made.append(again.digest())
        digests.append(made)
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3 and digests[0][-1] == digests[0][-2]
    inner = optimizer.inner
    state_tensors = [
        each
        for one in inner.optimizer.state.values()
        for each in one.values()
        if isinstance(each, torch.Tensor) and each.ndim
    ]
    main = [each for group in inner.optimizer.param_groups for each in group["params"]]
    everything = [
        *policy.module.parameters(),
        *main,
        *(buffer.grad_data for buffer in policy.ddp.buffers),
        *state_tensors,
    ]
    assert state_tensors
    outside = [each.shape for each in everything if each.untyped_storage().data_ptr() not in memory.places]
    kept = [
        each
        for each in (*policy.module.parameters(), *main, *state_tensors)
        if each.untyped_storage().data_ptr() in memory.scratch
    ]
    assert not kept, "these lose their content"
    assert not outside, "these stay in memory when it is released"


def test_what_is_released_cannot_be_used(here: parallel.Parallel, model_dir: Path, tmp_path: Path) -> None:
    memory = Memory()
    policy, optimizer, trainer, backup = learner(model_dir, here, memory, "float32")
    batch = make_batches(make_samples(vocab=VOCAB))[0]
    memory.release()
    for use in (
        lambda: trainer.train(batch),
        lambda: trainer.log_probs(batch),
        lambda: dict(policy.export()),
        policy.digest,
        backup.refresh,
        lambda: state.save(tmp_path, step=1, policy=policy, optimizer=optimizer),
        lambda: MegatronOptimizer(policy, OPTIMIZER, steps=10),
        memory.release,
    ):
        with pytest.raises(MemoryReleased, match="released"):
            use()
    memory.resume()
    with pytest.raises(AssertionError):
        memory.resume()
    trainer.train(batch)
