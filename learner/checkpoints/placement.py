"""Places of checkpoint files: where they are, where they should be, and which checkpoint is whole. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import Checkpoint
from tidemill.learner.checkpoints.manifest import MANIFEST, FileEntry

CHECKPOINT_KEY = "checkpoint"
"""Row of the bucket ``run`` with the latest checkpoint: directory, step, epoch, chain, manifest, kept, manifests."""
Held = Mapping[int, Mapping[str, Collection[str]]]  # node -> checkpoint -> names of the files that it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A checkpoint that cannot be loaded, with the nodes on which each missing file was last seen."""

    checkpoint: str
    missing: Mapping[str, tuple[int, ...]]
    places: str = "no living node"
    """The places that have none of them."""

    def __str__(self) -> str:
        files = [
            f"{name} (last seen on node {', '.join(map(str, nodes))})" for name, nodes in sorted(self.missing.items())
        ]
        remainder = f" and {len(files) - 4} more" if len(files) > 4 else ""
        return f"{self.checkpoint}: {self.places} has {', '.join(files[:4])}{remainder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """The newest whole checkpoint (None = there is none), and the newer ones that are not whole."""

    checkpoint: str | None
    lacks: Sequence[Lack] = field(default=())


def choose(
    order: Sequence[str],
    files: Mapping[str, Mapping[str, FileEntry]],
    held: Held,
    seen: Held,
    *,
    places: str = "no living node",
) -> CheckpointChoice:
    """Return the first checkpoint of ``order`` of which every file is in a place of ``held`` (a node, the store).

    ``files``: the manifest's files by checkpoint; one without a manifest is passed over. ``seen``: files of all nodes
    when they were last seen, for the message; its writers are named for a file that was never seen.
    """
    lacks: list[Lack] = []
    for name in order:
        present = {file for by_checkpoint in held.values() for file in by_checkpoint.get(name, ())}
        if name in files:
            missing = {
                file: _last_seen(name, file, seen) or entry.holders
                for file, entry in files[name].items()
                if file not in present
            }
        else:
            missing = {MANIFEST: _last_seen(name, MANIFEST, seen)}
        if not missing:
            return CheckpointChoice(checkpoint=name, lacks=tuple(lacks))
        lacks.append(Lack(checkpoint=name, missing=missing, places=places))
    return CheckpointChoice(checkpoint=None, lacks=tuple(lacks))


def _last_seen(checkpoint: str, file: str, seen: Held) -> tuple[int, ...]:
    return tuple(sorted(node for node, by_checkpoint in seen.items() if file in by_checkpoint.get(checkpoint, ())))


def targets(entry: FileEntry, *, num_nodes: int, copies: int) -> frozenset[int]:
    """Return the nodes that should have a file: its writer and the ``copies - 1`` nodes behind it, in a ring.

    A file of no node of this layout is for the first ones, one without holders (of an older release) for none.
    """
    if not entry.holders:
        return frozenset()
    first = entry.holders[0] if entry.holders[0] < num_nodes else 0
    ring = {(first + offset) % num_nodes for offset in range(min(copies, num_nodes))}
    return frozenset(ring | {node for node in entry.holders if node < num_nodes})


def short_of_copies(
    files: Mapping[str, FileEntry], name: str, held: Held, *, num_nodes: int, copies: int
) -> dict[str, int]:
    """Return the files with fewer holders than ``copies`` (at most one a node), and the number of their holders."""
    counts = {file: sum(file in by_checkpoint.get(name, ()) for by_checkpoint in held.values()) for file in files}
    return {file: count for file, count in counts.items() if count < min(copies, num_nodes)}


def digests_in(row: JsonMapping) -> dict[str, str]:
    """Return the digests of the manifests in the row of the latest checkpoint: of the latest, and of the kept ones."""
    digests: dict[str, str] = {**row.get("manifests", {})}
    if row.get("manifest"):
        digests[Path(row["directory"]).name] = row["manifest"]
    return digests


def latest_in(root: Path, row: JsonMapping | None) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the latest checkpoint of the run's row, below ``root``, and the names of earlier ones that it keeps."""
    if row is None:
        return None, ()
    return disk.parse_name(root / Path(row["directory"]).name), tuple(row.get("kept", ()))
