"""Copies of weights on the host: pinned, exchanged bit for bit, and staged from the device."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backups import OtherWeights, WeightBackup
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.transport.handles import HostMemory
from tidemill.weightstore.transport.staging import StagingPool

pytestmark = pytest.mark.gpu


def test_a_backup_is_pinned_and_exchanged_bit_for_bit(
    rank: Parallel, on_gpu: bool, model_dir: Path, tmp_path: Path
) -> None:
    policy = build_policy(model_dir, dtype="bfloat16", parallel=rank)
    backup = WeightBackup(policy)
    other = build_policy(write_tiny_model(tmp_path, seed=7, vocab_size=300), dtype="bfloat16", parallel=rank)
    assert all(copy.device.type == "cpu" and copy.is_pinned() == on_gpu for copy in backup.tensors.values())
    kept = policy.digest()
    places = [parameter.data_ptr() for parameter in policy.module.parameters()]
    with torch.no_grad():
        for one, two in zip(policy.module.parameters(), other.module.parameters(), strict=True):
            one.copy_(two)
    own = policy.digest()
    assert own == other.digest() != kept
    with OtherWeights(policy) as others:
        others.take(backup)
        assert policy.digest() == kept
        if on_gpu:
            assert places == [parameter.data_ptr() for parameter in policy.module.parameters()], (
                "memory that is released knows the address"
            )
    assert policy.digest() == own


@pytest.mark.parametrize("shared", [False, True])
def test_staging_is_filled_from_the_device(shared: bool, rank: Parallel, on_gpu: bool, model_dir: Path) -> None:
    policy = build_policy(model_dir, dtype="bfloat16", parallel=rank)
    memory = HostMemory(pin=on_gpu) if shared else None
    staging = StagingPool(Manifest.of(policy.export()), 20_000, memory=memory).take(1)
    for _ in range(2):  # again, into memory that is in use already
        staging.fill(policy.export())
        assert len(staging.buckets) > 2 and all(flat.is_pinned() == on_gpu for _, flat in staging.buckets)
        copies = dict(staging.tensors())
        for name, tensor in policy.export():
            assert torch.equal(copies[name], tensor.cpu()), name
    if memory is not None:
        memory.close()
