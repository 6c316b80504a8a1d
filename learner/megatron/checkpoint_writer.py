"""Writer of Megatron's distributed checkpoint format that runs in the rank's own process.

Megatron's own writer starts helper processes even for a synchronous save: a spawned manager, which outlives a killed rank, and forks of
a process that has threads. The files have the same format (torch.distributed.checkpoint), and Megatron's loader reads them.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException

from learner.errors import CheckpointUnwritten


class InProcessSave(TorchDistSaveShardedStrategy):
    """Save strategy for ``dist_checkpointing.save``. Collective; every file is fsynced."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards into one file, and the metadata on rank 0. Raises CheckpointUnwritten, on every rank."""
        # As Megatron's own strategy does, so that its loader finds the same keys.
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DTensor instead", category=FutureWarning)
            try:
                torch_checkpoint.save(
                    mcore_to_pyt_state_dict(renamed, False),
                    storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
                    planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
                )
            except CheckpointException as error:
                reasons = "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in error.failures.items())
                raise CheckpointUnwritten(str(checkpoint_dir), reasons) from None
