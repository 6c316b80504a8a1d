"""Reader of Megatron's distributed checkpoints with files on several nodes: each range from the node that has it, verified.

A rank needs more than its own file, also with an unchanged layout: replicated tensors are stored once, by the rank with their main replica.
Source: Megatron-core 0.16, ``is_main_replica``; torch 2.13, ``FileSystemReader``.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from tidemill.learner.checkpoints.peers import CheckpointFiles
from tidemill.learner.errors import CheckpointCorrupt


class _PeerFiles(FileSystem):
    """The files of a checkpoint as ``FileSystemReader`` opens them."""

    def __init__(self, files: CheckpointFiles, directory: Path) -> None:
        super().__init__()
        self._files, self._directory = files, directory

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file for reading."""
        assert mode == "rb", mode
        with self._files.open(str(Path(path).relative_to(self._directory))) as stream:
            yield stream


class PeerReader(CachedMetadataFileSystemReader):
    """Torch storage reader: (file, offset, length) from the local file, or from another node."""

    def __init__(self, directory: Path, files: CheckpointFiles) -> None:
        super().__init__(directory)
        self.fs = _PeerFiles(files, directory)


class PeerLoad(TorchDistLoadShardedStrategy):
    """Load strategy for ``dist_checkpointing.load``: Megatron's own with ``PeerReader``, which it has no parameter for."""

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
            try:
                torch_checkpoint.load_state_dict(content, PeerReader(Path(checkpoint_dir), self._files), planner=planner)
            except CheckpointException as error:
                _raise_corrupt(error)
                raise
        plain = {key: _unwrap_pyt_sharded_tensor(value) for key, value in content.items()}
        loaded = _replace_sharded_keys_with_state_dict_keys(plain, flat, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def _raise_corrupt(error: CheckpointException) -> None:
    """Raise the first rank's CheckpointCorrupt, if that is the reason; torch has it with the rank's traceback."""
    for _, (reason, _) in sorted(error.failures.items()):
        if isinstance(reason, CheckpointCorrupt):
            raise reason from None
