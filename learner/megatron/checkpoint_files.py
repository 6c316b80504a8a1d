"""Files of Megatron's distributed checkpoints (``torch_dist``), written and read by strategies of our own.

    StagedSave.save   all ranks together: plan the files, copy this rank's tensors to host memory, or refer to them
    Staged.write      any thread, no collective: write this rank's file
    Staged.finish     rank 0, with the results of all ranks: write the index (.metadata)
    PeerLoad.load     all ranks together: read ranges of files, from this node or another

Megatron's own writer starts helper processes even for a synchronous save: a spawned manager, which outlives a killed
rank, and forks of a process that has threads. The files are the same, and Megatron's loader reads them.
"""

import ctypes
import io
import mmap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from tidemill.learner.checkpoints.remote_files import CheckpointFiles
from tidemill.learner.errors import CheckpointCorrupt, CheckpointUnwritten


class HostCopies:
    """Host memory of a rank for its part of a checkpoint: on CUDA page-locked, and kept for the next checkpoint."""

    def __init__(self) -> None:
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def copy(self, index: MetadataIndex, source: Tensor) -> Tensor:
        """Return a copy of ``source`` in host memory. It replaces the earlier copy of the same index."""
        kept = self._tensors.get(index)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            # The bus copies from page-locked memory at full speed, but to allocate it is slow.
            kept = _pinned_like(source) if source.is_cuda else _mapped_like(source)
            self._tensors[index] = kept
        kept.copy_(source, non_blocking=True)  # ``StagedSave.save`` waits for all copies at once
        return kept

    def give_back(self) -> None:
        """Free the copies, unless they are page-locked. Call it when they are written."""
        self._tensors = {index: tensor for index, tensor in self._tensors.items() if tensor.is_pinned()}

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


def trim_heap() -> None:
    """Return memory that malloc has kept to the operating system: after a step on the CPU its activations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _pinned_like(source: Tensor) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)


def _mapped_like(source: Tensor) -> Tensor:
    # A mapping of its own: malloc would keep most of the memory for the process.
    if not source.nbytes:
        return torch.empty(source.shape, dtype=source.dtype)
    mapping = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8).view(source.dtype).view(source.shape)


@dataclass(slots=True)
class _Content:
    """Planner of ``FileSystemWriter.write_data``, which asks it for nothing but the content of each item."""

    data: dict[MetadataIndex, Tensor | io.BytesIO]

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        return self.data[item.index]


@dataclass(slots=True)
class Staged:
    """This rank's part of a checkpoint, and the plan of its file."""

    directory: Path
    plan: SavePlan
    metadata: Metadata | None
    """The index of all ranks' files, without their offsets; on rank 0 only."""
    content: _Content
    writer: torch_checkpoint.FileSystemWriter = field(repr=False)

    def write(self) -> list[WriteResult]:
        """Write this rank's file, synced to the disk. Returns the place of every item in it. Raises OSError."""
        try:
            done = self.writer.write_data(self.plan, self.content)  # type: ignore[arg-type]
            done.wait()
        finally:
            self.content.data.clear()
        results: list[WriteResult] = done.value()
        return results

    def finish(self, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write the index of all files from the results of every rank; on rank 0. Raises OSError."""
        assert self.metadata is not None, "rank 0 has the index"
        self.writer.finish(self.metadata, [list(result) for result in results])


def files_of(results: Sequence[WriteResult]) -> list[str]:
    """Return the names of the files that a rank has written, sorted."""
    return sorted({str(result.storage_data.relative_path) for result in results})


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
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DTensor instead", category=FutureWarning)
            try:
                plan, metadata = _plan(mcore_to_pyt_state_dict(renamed, False), planner, writer)
            except CheckpointException as error:
                reasons = "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in error.failures.items())
                raise CheckpointUnwritten(str(checkpoint_dir), reasons) from None
        content: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, Tensor) and self._copies is not None:
                data = self._copies.copy(item.index, data.detach())
            content[item.index] = data
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.staged = Staged(Path(checkpoint_dir), plan, metadata, _Content(content), writer)


def _plan(
    state: dict[str, Any], planner: MCoreSavePlanner, writer: torch_checkpoint.FileSystemWriter
) -> tuple[SavePlan, Metadata | None]:
    """Return this rank's part of the plan and, on rank 0, the index. Collective; as torch's ``save``."""
    ranks = _DistWrapper(None, True, 0)
    metadata: Metadata | None = None

    def local_plan() -> SavePlan:
        planner.set_up_planner(
            state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator
        )
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans without repeated items; on rank 0."""
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    plan: SavePlan = ranks.reduce_scatter("plan", local_plan, global_plan)
    return planner.finish_plan(plan), metadata


class _PeerFiles(FileSystem):
    """The files of a checkpoint as ``FileSystemReader`` opens them."""

    def __init__(self, files: CheckpointFiles, directory: Path) -> None:
        super().__init__()
        self._files, self._directory = files, directory

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "rb", mode
        with self._files.open(str(Path(path).relative_to(self._directory))) as stream:
            yield stream


class PeerReader(CachedMetadataFileSystemReader):
    """Torch storage reader: (file, offset, length) from the local file, or from another node."""

    def __init__(self, directory: Path, files: CheckpointFiles) -> None:
        super().__init__(directory)
        self.fs = _PeerFiles(files, directory)


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
            try:
                torch_checkpoint.load_state_dict(
                    content, PeerReader(Path(checkpoint_dir), self._files), planner=planner
                )
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
