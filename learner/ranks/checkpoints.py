"""Checkpoints of all ranks, written by a thread of each while training goes on.

    step k      begin    all ranks: plan the files, copy the state to host memory    (all that a step waits for)
    meanwhile   thread   each rank: write and digest its file
                         rank 0: gather, write index, data state and manifest; one rank of each other node: the same
                         each node: rename its directory into place
    later       collect  rank 0: report the checkpoint to the feeder, which makes it the latest

The threads have a process group of their own (gloo), so they and the steps never wait for each other. Until the feeder
has the report, the checkpoint before is the latest. The next checkpoint, the end of the run and a drain wait for the
writing (bounded by the timeout of the group).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, METADATA, STATE, CheckpointManifest, FileEntry
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.checkpoints.remote_files import CheckpointFiles, Peer, PeerClient
from tidemill.learner.checkpoints.staged_files import HostCopies, Staged, files_of, trim_heap
from tidemill.learner.errors import CheckpointUnwritten, NoCheckpoint
from tidemill.learner.feed.feed_messages import FeedStart
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.settings.config import SHARED, CheckpointConfig
from tidemill.learner.trainer.backups import NO_OTHER_MODELS, OtherModels
from tidemill.learner.trainer.optimizer import Optimizer
from tidemill.learner.trainer.port import AnyBackend, Policy

log = logging.getLogger(__name__)

_LEAVE_S = 1.0  # time that a writing has to end when this rank ends with an error: its peers may be gone
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part of a checkpoint, as rank 0 gets it."""

    node: int
    files: dict[str, FileEntry] = field(default_factory=dict)
    results: Sequence[WriteResult] = ()
    error: str = ""
    """Why the part could not be written; empty = it is on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """Rank 0's answer to all parts: the files that every node needs, or the reason why there is no checkpoint."""

    files: dict[str, bytes] = field(default_factory=dict)
    """Metadata and manifest, for nodes with a directory of their own; empty where all ranks share one."""
    error: str = ""


class Layout:
    """Nodes of the ranks, and the ranks that act for their node. Collective: made by all ranks at the same place."""

    def __init__(self, node: int, *, shared: bool) -> None:
        nodes: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(nodes, 0 if shared else node)
        self.nodes = [int(rank_node or 0) for rank_node in nodes]
        self.node = self.nodes[dist.get_rank()]
        self.is_first = self.nodes.index(self.node) == dist.get_rank()
        """This rank makes and renames the directory of its node."""
        self.all_nodes = tuple(sorted(set(self.nodes)))


class Checkpoints:
    """The checkpoints of one start. Every rank calls ``begin`` at the same place; ``collect`` is no collective."""

    def __init__(
        self,
        places: RankPlaces,
        report: Callable[[int, str], None],
        backend: AnyBackend,
        policy: Policy,
        optimizer: Optimizer,
        *,
        config: CheckpointConfig,
        timeout_s: float,
        others: OtherModels = NO_OTHER_MODELS,
    ) -> None:
        """``report`` is called on rank 0 with step and path of a checkpoint that is written."""
        self._root, self._report = places.checkpoints, report
        self._backend = backend
        self._policy, self._optimizer, self._others = policy, optimizer, others
        self._copies = HostCopies() if config.background else None
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._layout = Layout(places.node, shared=config.store == SHARED)
        self._store = ObjectStore(config.url, places.run) if config.url else None
        self._is_local = len(self._layout.all_nodes) > 1 or self._store is not None
        # On CUDA the default group is NCCL's: its collectives of objects would wait for the kernels of a step.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self._world > 1 else None
        self._writing: tuple[int, Future[Path]] | None = None
        self.copied_bytes = 0
        """Bytes of this rank's state that the last checkpoint has copied."""

    def load(self, start: FeedStart) -> dict[str, float]:
        """Load the start's checkpoint, with files from elsewhere where this node lacks them. Returns the algorithm's
        numbers.

        Raises CheckpointCorrupt for a file that is intact nowhere, NoCheckpoint without weights; as ``Backend.load``.
        """
        assert start.checkpoint is not None
        if (Path(start.checkpoint) / disk.NO_WEIGHTS).exists():
            raise NoCheckpoint(start.checkpoint, "want one with weights, got one of a run with debug.rollout_only")
        directory, files = Path(start.checkpoint), None
        client = PeerClient(
            [
                Peer(node=int(node), url=url, key=start.peer_key)
                for node, url in start.peers.items()
                if int(node) != self._layout.node
            ],
            self._store,
        )
        try:
            if self._is_local:
                directory = self._root / directory.name  # the start's path is on rank 0's node
                if self._layout.is_first and start.manifest:
                    remote_files.complete(directory, client, sha256=start.manifest)
                dist.barrier()
                files = CheckpointFiles(directory, manifests.read(directory).files, client)
            _, numbers = self._backend.load(
                directory,
                policy=self._policy,
                optimizer=self._optimizer,
                others=self._others,
                files=files,
            )
        finally:
            client.close()
        return numbers

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory with copies of this rank's state."""
        return 0 if self._copies is None else self._copies.bytes

    def begin(self, step: int, epoch: int, data_state: bytes, *, numbers: dict[str, float]) -> None:
        """Copy the state after ``step``, and write it, in the background if configured. CheckpointUnwritten."""
        self.collect(wait=True)  # there is one copy of the state in host memory
        began = time.monotonic()
        tmp = self._root / f"step-{step}-epoch-{epoch}.tmp"
        if self._layout.is_first:
            disk.staging(self._root, step=step, epoch=epoch)
        dist.barrier()
        if self._copies is not None:
            trim_heap()  # so that the copies take the place of the step's activations
        staged = self._backend.stage(
            tmp,
            step=step,
            policy=self._policy,
            optimizer=self._optimizer,
            others=self._others,
            numbers=numbers,
            copies=self._copies,
        )
        self.copied_bytes = self.held_bytes
        extra: dict[str, object] = {"step": step, "epoch": epoch, "world": self._world}
        writing = Future[Path]()
        self._writing = (step, writing)
        if self._copies is None:
            _run(writing, lambda: self._write(staged, data_state, extra, began))
            self.collect(wait=True)
            return
        log.info("checkpoint staged step=%d bytes=%d seconds=%.3f", step, self.copied_bytes, time.monotonic() - began)
        work = (writing, lambda: self._write(staged, data_state, extra, began))
        # A daemon: a rank that ends with an error must not wait for a peer that is gone.
        threading.Thread(target=_run, args=work, name="checkpoint", daemon=True).start()

    def collect(self, *, wait: bool = False) -> None:
        """Report a written checkpoint to the feeder; ``wait`` for it first. Raises CheckpointUnwritten."""
        if self._writing is None or not (wait or self._writing[1].done()):
            return
        step, writing = self._writing
        path = writing.result()
        self._writing = None
        if self._rank == 0:
            self._report(step, str(path))

    def leave(self) -> None:
        """Give a writing under way a moment to end, before the process groups are destroyed. Raises nothing."""
        if self._writing is not None:
            wait_for([self._writing[1]], timeout=_LEAVE_S)

    def _write(self, staged: Staged, data_state: bytes, extra: dict[str, object], began: float) -> Path:
        """Write this rank's part and, together, the checkpoint. Returns its path. CheckpointUnwritten everywhere."""
        tmp = staged.directory
        parts = self._gathered(self._part(staged))
        conclusion = self._broadcast(self._concluded(staged, parts, data_state, extra) if self._rank == 0 else None)
        if conclusion.error:
            raise CheckpointUnwritten(str(tmp), conclusion.error)
        if errors := [error for error in self._gathered(self._published(tmp, conclusion)) if error]:
            raise CheckpointUnwritten(str(tmp), "; ".join(errors))
        path = tmp.with_suffix("")
        if self._rank == 0:
            log.info("checkpoint step=%s path=%s seconds=%.2f", extra["step"], path, time.monotonic() - began)
        return path

    def _part(self, staged: Staged) -> Part:
        try:
            results = staged.write()
            return Part(node=self._layout.node, files=disk.digest(staged.directory, files_of(results)), results=results)
        except (OSError, RuntimeError) as error:  # torch raises the latter for a stream that takes no more
            return Part(node=self._layout.node, error=f"rank {self._rank}: {error}")
        finally:
            if self._copies is not None:
                self._copies.give_back()

    def _concluded(
        self, staged: Staged, parts: Sequence[Part], data_state: bytes, extra: dict[str, object]
    ) -> Conclusion:
        """Write index, data state and manifest; on rank 0."""
        if errors := [part.error for part in parts if part.error]:
            return Conclusion(error="; ".join(errors))
        tmp, nodes = staged.directory, self._layout.all_nodes
        try:
            staged.finish([part.results for part in parts])
            (tmp / STATE).write_bytes(data_state)
            files = {name: entry.written_by([part.node]) for part in parts for name, entry in part.files.items()}
            files |= {name: entry.written_by(nodes) for name, entry in disk.digest(tmp, sorted(METADATA)).items()}
            manifest = CheckpointManifest(files=files, extra=extra).encode()
            disk.write_manifest(tmp, manifest)
            if len(nodes) == 1:
                return Conclusion()
            return Conclusion(
                files={name: (tmp / name).read_bytes() for name in sorted(METADATA)} | {MANIFEST: manifest}
            )
        except OSError as error:
            return Conclusion(error=f"rank 0: {error}")

    def _published(self, tmp: Path, conclusion: Conclusion) -> str:
        """Complete the directory of this node, and rename it into place. Returns the reason why not, or ""."""
        if not self._layout.is_first:
            return ""
        try:
            if self._rank != 0:
                disk.write_files(tmp, conclusion.files)
            disk.publish(tmp)
        except OSError as error:
            return f"rank {self._rank}: {error}"
        return ""

    def _gathered(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        values: list[T] = [value] * self._world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _broadcast(self, value: Conclusion | None) -> Conclusion:
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, group=self._group)
        assert values[0] is not None
        return values[0]


def _run(writing: Future[Path], work: Callable[[], Path]) -> None:
    """Run ``work``; ``writing`` gets its result or error, which is raised where it is collected."""
    try:
        writing.set_result(work())
    except BaseException as error:
        writing.set_exception(error)
