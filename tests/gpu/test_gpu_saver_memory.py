"""The memory of a colocated learner: released between steps on the device, with the same bits as memory that is never
released.
"""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.tiny_models import write_tiny_model
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.errors import MemoryReleased
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.memory import Memory, open_memory
from tidemill.learner.trainer.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

FREED = 0.9
"""Share of the learner's state that other processes can use after a release."""
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "initializer_range": 0.02,
}
"""A model of about 100 million parameters, 1.9 GB with gradients and Adam: against it, cached blocks are small."""


SHARES = Replicas(distributed_optimizer=True)
"""The weights are in a buffer of Megatron's wrapper then, beside the gradients, and a release does not keep the content
of these.
"""


def learner(model_dir: Path, rank: Parallel, memory: Memory, replicas: Replicas | None = None) -> Trainer:
    policy = build_policy(model_dir, dtype="bfloat16", parallel=rank, replicas=replicas, memory=memory)
    return Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)


def steps(trainer: Trainer, memory: Memory) -> list[str]:
    """Train three steps with a release before each, and return the digests."""
    digests = []
    for seed in range(3):
        memory.release()
        memory.resume()
        trainer.train(make_batches(make_samples(vocab=VOCAB, seed=seed))[0])
        digests.append(trainer.policy.digest())
    return digests


@pytest.mark.parametrize("replicas", [None, SHARES], ids=["plain", "distributed"])
def test_steps_with_releases_are_the_same_bits(
    rank: Parallel, model_dir: Path, device: torch.device, replicas: Replicas | None
) -> None:
    """Memory opened twice, as by tests in one process: the second is as good as the first."""
    wanted = steps(learner(model_dir, rank, plain := Memory(), replicas), plain)
    assert len(set(wanted)) == 3
    for _ in range(2):
        memory = open_memory(colocated=True, device=device)
        assert (type(memory) is Memory) == (device.type == "cpu")
        assert steps(learner(model_dir, rank, memory, replicas), memory) == wanted


def test_released_memory_is_free_for_others_and_cannot_be_used(
    rank: Parallel, cuda: torch.device, tmp_path: Path
) -> None:
    model_dir = write_tiny_model(tmp_path, vocab_size=VOCAB, **WIDE)
    gc.collect()
    torch.cuda.empty_cache()
    memory = open_memory(colocated=True, device=cuda)
    trainer = learner(model_dir, rank, memory)
    batch = make_batches(make_samples(vocab=VOCAB))[0]
    trainer.train(batch)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    num_parameters = sum(parameter.numel() for parameter in trainer.policy.module.parameters())
    state_bytes = 18 * num_parameters  # bfloat16 weights; float32 gradients, main weights and two moments
    before, _ = torch.cuda.mem_get_info()
    memory.release()
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed >= FREED * state_bytes, f"{freed / 1e9:.2f} of {state_bytes / 1e9:.2f} GB"
    with pytest.raises(MemoryReleased):
        trainer.train(batch)
    with pytest.raises(MemoryReleased):
        memory.release()
    memory.resume()
    trainer.train(batch)


ENDS = """
import torch
from tidemill.learner.trainer.memory import open_memory
memory = open_memory(colocated=True, device=torch.device("cuda"))
with memory.region():
    kept = torch.ones(1 << 20, device="cuda")
with memory.region(scratch=True):
    scratch = torch.ones(1 << 20, device="cuda")
memory.release()
memory.resume()
if {freed}:
    del kept, scratch
"""


@pytest.mark.parametrize("freed", [True, False])
def test_a_process_with_such_memory_ends_well(cuda: torch.device, freed: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDS.format(freed=freed)], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
