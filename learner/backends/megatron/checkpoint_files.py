"""Files of Megatron's distributed checkpoints (``torch_dist``), written and read by strategies of our own.

    StagedSave.save   all ranks together: plan the files, copy this rank's tensors to host memory, or refer to them
    PeerLoad.load     all ranks together: read ranges of files, from this node or another

Megatron's own writer starts helper processes even for a synchronous save: a spawned manager, which outlives a killed
rank, and forks of a process that has threads. The files are the same, and Megatron's loader reads them.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)

from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.checkpoints.staged_files import HostCopies, PeerFiles, Staged, corrupt_files, stage_files


class StagedSave(TorchDistSaveShardedStrategy):
    """Save strategy for ``dist_checkpointing.save`` that writes nothing: ``staged`` has the tensors. Collective."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        """``copies``: memory for copies, so that the tensors may change after ``save``; None = no copies."""
        super().__init__("torch_dist", 1)
        self._copies = copies
        self.staged: Staged | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plan the files with all ranks, and copy this rank's shards. Raises CheckpointUnwritten, on every rank."""
        # As Megatron's own strategy does, so that its loader finds the same keys.
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        state = mcore_to_pyt_state_dict(renamed, False)
        self.staged = stage_files(state, planner, Path(checkpoint_dir), self._copies)


class PeerReader(CachedMetadataFileSystemReader):
    """Torch storage reader: (file, offset, length) from the local file, or from another node."""

    def __init__(self, directory: Path, files: CheckpointFiles) -> None:
        super().__init__(directory)
        self.fs = PeerFiles(files, directory)


class PeerLoad(TorchDistLoadShardedStrategy):
    """Megatron's load strategy with ``PeerReader``, which it has no parameter for."""

    def __init__(self, files: CheckpointFiles) -> None:
        super().__init__()
        self._files = files

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Return the loaded content of the sharded state. Collective. Raises CheckpointCorrupt, on every rank."""
        tensors = [part for part in nested_values(sharded_state_dict) if isinstance(part, ShardedTensor)]
        renamed, flat, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        content = mcore_to_pyt_state_dict(renamed, True)
        planner = MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[part for part in tensors if not part.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={part.key: part for part in tensors if part.allow_shape_mismatch},
        )
        with warnings.catch_warnings():
            # Megatron uses this function, too: it loads in place, and ranks may have different keys.
            warnings.filterwarnings("ignore", message=".*load_state_dict.*", category=FutureWarning)
            with corrupt_files():
                torch_checkpoint.load_state_dict(
                    content, PeerReader(Path(checkpoint_dir), self._files), planner=planner
                )
        plain = {key: _unwrap_pyt_sharded_tensor(value) for key, value in content.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(plain, flat, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded
