"""Settings of the weight pushes."""

from dataclasses import dataclass
from typing import Literal

from tidemill.bus.section import NotNegative, Positive, PositiveFloat, section

# Sizes of buckets where none is set: large ones spare requests, but one takes 20 s of a phase's 30 at 100 Mbit/s. GPU
# memory that engines read costs no memory by the bucket: an H100 copies 4 GB in 3 ms.
SMALL_BUCKET, LARGE_BUCKET, SHARED_BUCKET = 64_000_000, 256_000_000, 4_000_000_000


@section
@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """When and how versions reach the engines."""

    push_every: Positive = 1
    """Steps between two versions."""
    transport: Literal["broadcast", "handles"] = "broadcast"
    """Transport of the tensors: broadcast (process group) | handles (engines on this host read the staged copies;
    others: broadcast).
    """
    staging: Literal["host", "cuda"] = "host"
    """Memory of the staged copies: host | cuda (two more copies on the learner's GPU; with handles only)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend: auto | gloo | nccl. auto = nccl to engines on other GPUs than the learner's with an equal
    NCCL version (major and minor number), gloo to all others; nccl = engines that cannot have it get no weights.
    """
    senders_per_stage: NotNegative = 0
    """Ranks of each pipeline stage that send weights, each its share of the stage's layers: 0 = all that have a part of
    the stage (its tensor- and expert-parallel ranks; with ``learner.backend: fsdp`` the first eight), 1 = one, which
    gathers the stage.
    """
    adapters: Literal["auto", "merged"] = "auto"
    """Pushes of a run with ``learner.lora``: auto = the adapters alone to engines that add them to the weights that
    they hold, merged weights to all others; merged = merged weights to all.
    """
    group: str = "pairs"
    """Engines of one process group: pairs (each has its own with the learner) | a number (groups of at most that many)
    | all.
    """
    bucket_bytes: NotNegative = 0
    """Tensors are sent in buckets of about this size. 0 = by the transport: 4,000,000,000 for CUDA handles, 256,000,000
    where a learner on a GPU sends over NCCL, else 64,000,000.
    """
    phase_deadline_s: PositiveFloat = 30.0
    """An engine that does not finish a phase (join, begin, bucket, verify, end) in this time is evicted. Phases with
    work on all weights have more: at first a second for each 20 MB, then four times the longest time measured, up to
    ``load_deadline_s``.
    """
    load_deadline_s: PositiveFloat = 600.0
    """An engine that does not load its weights from a directory of its machine in this time is evicted: version 0 of a
    colocated run. No phase of a push has more, unless ``phase_deadline_s`` is more.
    """
    min_engines: NotNegative = 0
    """A push with fewer receivers fails (0 = a version may be published without any engine)."""
    overlap: bool = True
    """Push from a staging copy while the next step runs (never at max_lag 0)."""
    snapshot_every: NotNegative = 0
    """Write a snapshot of every n-th version (0 = on demand and with checkpoints only)."""
    host: str = "auto"
    """Address on which the learner serves process-group rendezvous and snapshots; auto = the address of its route to
    the bus (a bus on this machine: 127.0.0.1)."""
    advertise: str = ""
    """Host at which engines reach it, if that is not ``host`` (containers, NAT)."""
    keep_snapshots: Positive = 2
    """Snapshots of versions kept on disk."""
    verify: Literal["first", "always", "never"] = "first"
    """When an engine's checksums are compared with the sent weights, before it serves them: first (its first push) |
    always | never.
    """

    def __post_init__(self) -> None:
        if self.staging == "cuda" and self.transport != "handles":
            raise ValueError(f"staging: want host with transport {self.transport}, got 'cuda'")
        if self.group not in ("pairs", "all") and not (self.group.isdecimal() and int(self.group) > 0):
            raise ValueError(f"group: want pairs, all or a number > 0, got {self.group!r}")

    @property
    def engines_together(self) -> int:
        """Maximum number of engines of one process group."""
        return {"pairs": 1, "all": 1 << 30}.get(self.group) or int(self.group)

    def bucket_size(self, *, on_gpu: bool) -> int:
        """Return the bytes of a bucket for a learner with or without a GPU.

        Handles of host memory have small ones: SGLang reads them from a copy in /dev/shm, which may be small.
        """
        if self.bucket_bytes:
            return self.bucket_bytes
        if not on_gpu:
            return SMALL_BUCKET
        if self.transport == "handles":
            return SHARED_BUCKET if self.staging == "cuda" else SMALL_BUCKET
        return SMALL_BUCKET if self.backend == "gloo" else LARGE_BUCKET
