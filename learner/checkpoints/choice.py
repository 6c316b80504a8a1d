"""The checkpoint that a start loads when nodes, disks or files are missing. A pure function of manifests and of living nodes' files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.learner.checkpoints.manifest import FileEntry

Held = Mapping[int, Mapping[str, Collection[str]]]
"""node -> checkpoint -> names of the files that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """A checkpoint that cannot be loaded, with the nodes on which each missing file was last seen."""

    checkpoint: str
    missing: Mapping[str, tuple[int, ...]]
    places: str = "no living node"
    """The places that have none of them."""

    def __str__(self) -> str:
        named = [f"{name} (last seen on node {', '.join(map(str, nodes))})" for name, nodes in sorted(self.missing.items())]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        return f"{self.checkpoint}: {self.places} has {', '.join(named[:4])}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The newest whole checkpoint (None = there is none), and the newer ones that are not whole."""

    checkpoint: str | None
    lacks: Sequence[Lack] = field(default=())


def choose(
    order: Sequence[str], files: Mapping[str, Mapping[str, FileEntry]], held: Held, seen: Held, *, places: str = "no living node"
) -> Choice:
    """Return the first checkpoint of ``order`` of which every file is in some place of ``held``: a living node, or the store.

    ``files``: the manifest's files by checkpoint; one without a manifest is passed over. ``seen``: by all nodes, when
    they were last seen, for the message, which calls the places ``places``; the nodes that wrote a file are named where it was never seen.
    """
    lacks = []
    for name in order:
        if name not in files:
            lacks.append(Lack(checkpoint=name, missing={"manifest.json": _nodes(name, "manifest.json", seen)}, places=places))
            continue
        there = {file for by_checkpoint in held.values() for file in by_checkpoint.get(name, ())}
        missing = {file: _nodes(name, file, seen) or entry.holders for file, entry in files[name].items() if file not in there}
        if not missing:
            return Choice(checkpoint=name, lacks=tuple(lacks))
        lacks.append(Lack(checkpoint=name, missing=missing, places=places))
    return Choice(checkpoint=None, lacks=tuple(lacks))


def targets(entry: FileEntry, *, num_nodes: int, copies: int) -> frozenset[int]:
    """Return the nodes that should have a file: its writer and the ``copies - 1`` nodes behind it, in a ring.

    A file written by no node of this layout is for the first ones, and one without holders (of an older release) for none.
    """
    if not entry.holders:
        return frozenset()
    first = entry.holders[0] if entry.holders[0] < num_nodes else 0
    ring = {(first + offset) % num_nodes for offset in range(min(copies, num_nodes))}
    return frozenset(ring | {node for node in entry.holders if node < num_nodes})


def short_of_copies(files: Mapping[str, FileEntry], name: str, held: Held, *, num_nodes: int, copies: int) -> dict[str, int]:
    """Return the files with fewer holders than ``copies`` (at most one copy a node), and the number of their holders."""
    wanted = min(copies, num_nodes)
    counted = {file: sum(file in by_checkpoint.get(name, ()) for by_checkpoint in held.values()) for file in files}
    return {file: count for file, count in counted.items() if count < wanted}


def _nodes(checkpoint: str, file: str, seen: Held) -> tuple[int, ...]:
    return tuple(sorted(node for node, by_checkpoint in seen.items() if file in by_checkpoint.get(checkpoint, ())))
