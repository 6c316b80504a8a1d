"""Files of torch's distributed checkpoints, planned by all ranks at once and written in any thread.

stage_files       all ranks together: plan the files, copy this rank's tensors to host memory, or refer to them
Staged.write      any thread, no collective: write this rank's file
Staged.finish     rank 0, with the results of all ranks: write the index (.metadata)
PeerFiles         the files as torch's reader opens them: from this node or another
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
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
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
        kept.copy_(source, non_blocking=True)  # ``stage_files`` waits for all copies at once
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


def stage_files(state: dict[str, Any], planner: SavePlanner, directory: Path, copies: HostCopies | None) -> Staged:
    """Plan the files of ``state`` with all ranks, and copy this rank's tensors, or refer to them. Collective.

    ``copies``: memory for copies, so that the tensors may change afterwards; None = no copies. Raises
    CheckpointUnwritten, on every rank.
    """
    writer = torch_checkpoint.FileSystemWriter(directory, thread_count=1, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DTensor instead", category=FutureWarning)
        try:
            plan, metadata = _plan(state, planner, writer)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in error.failures.items())
            raise CheckpointUnwritten(str(directory), reasons) from None
    content: dict[MetadataIndex, Tensor | io.BytesIO] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, Tensor) and copies is not None:
            data = copies.copy(item.index, data.detach())
        content[item.index] = data
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Staged(directory, plan, metadata, _Content(content), writer)


def _plan(
    state: dict[str, Any], planner: SavePlanner, writer: torch_checkpoint.FileSystemWriter
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


def write_staged(staged: Staged) -> None:
    """Write the files of all ranks into a directory that they share, without a manifest. Raises OSError."""
    results: list[list[WriteResult] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(results, staged.write())
    if dist.get_rank() == 0:
        staged.finish([result for result in results if result is not None])
    dist.barrier()


class PeerFiles(FileSystem):
    """The files of a checkpoint as ``FileSystemReader`` opens them."""

    def __init__(self, files: CheckpointFiles, directory: Path) -> None:
        super().__init__()
        self._files, self._directory = files, directory

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "rb", mode
        with self._files.open(str(Path(path).relative_to(self._directory))) as stream:
            yield stream


@contextmanager
def corrupt_files() -> Iterator[None]:
    """Raise the first rank's CheckpointCorrupt, if that is the reason; torch has it with the rank's traceback."""
    try:
        yield
    except CheckpointException as error:
        for _, (reason, _) in sorted(error.failures.items()):
            if isinstance(reason, CheckpointCorrupt):
                raise reason from None
        raise
