"""Which checkpoint is loaded when nodes are lost: every subset of them, against a rule that is written down another
way.
"""

from itertools import combinations

import pytest

from tidemill.learner.checkpoints.disk import CheckpointChoice, Held, choose, short_of_copies, targets
from tidemill.learner.checkpoints.manifest import METADATA, FileEntry

NEWEST, BEFORE = "step-4-epoch-1", "step-2-epoch-1"


def entry(*holders: int) -> FileEntry:
    return FileEntry(size=1, sha256="0" * 64, holders=holders)


def world(num_nodes: int, copies: int) -> tuple[dict[str, FileEntry], dict[int, set[str]]]:
    """Return a checkpoint with one file a node, and the files of each node when the copies are made."""
    files = {f"__{node}_0.distcp": entry(node) for node in range(num_nodes)} | {
        name: entry(*range(num_nodes)) for name in METADATA
    }
    there = {
        node: {name for name, one in files.items() if node in targets(one, num_nodes=num_nodes, copies=copies)}
        for node in range(num_nodes)
    }
    return files, there


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_subset_of_lost_nodes(num_nodes: int, copies: int) -> None:
    """The newest is whole unless ``copies`` neighbours are lost. Of the one before, every node has everything here."""
    files, there = world(num_nodes, copies)
    seen = {node: {NEWEST: there[node], BEFORE: set(files)} for node in range(num_nodes)}
    for number in range(num_nodes + 1):
        for lost in combinations(range(num_nodes), number):
            held = {node: names for node, names in seen.items() if node not in lost}
            choice = choose([NEWEST, BEFORE], {NEWEST: files, BEFORE: files}, held, seen)
            ring = [
                all((node + offset) % num_nodes in lost for offset in range(min(copies, num_nodes)))
                for node in range(num_nodes)
            ]
            if not any(ring):
                assert choice == CheckpointChoice(checkpoint=NEWEST)
                continue
            assert choice.checkpoint == (BEFORE if number < num_nodes else None)
            gone = {f"__{node}_0.distcp" for node in range(num_nodes) if ring[node]}
            lack = choice.lacks[0]
            assert lack.missing.keys() - METADATA == gone
            for name, nodes in lack.missing.items():
                assert nodes == tuple(sorted(node for node in there if name in there[node])), name
                assert set(nodes) <= set(lost)
            assert min(gone) in str(lack) and "last seen on node" in str(lack)


def test_a_checkpoint_without_a_manifest_is_passed_over() -> None:
    files, there = world(2, 2)
    held = {node: {BEFORE: there[node]} for node in there}
    choice = choose([NEWEST, BEFORE], {BEFORE: files}, held, held)
    assert choice.checkpoint == BEFORE and choice.lacks[0].missing.keys() == {"manifest.json"}


@pytest.mark.parametrize(("num_nodes", "copies", "wanted"), [(1, 2, 1), (2, 1, 1), (2, 2, 2), (4, 2, 2), (4, 9, 4)])
def test_copies_are_counted_by_living_holders(num_nodes: int, copies: int, wanted: int) -> None:
    files, there = world(num_nodes, copies)
    held = {node: {NEWEST: names} for node, names in there.items()}
    assert short_of_copies(files, NEWEST, held, num_nodes=num_nodes, copies=copies) == {}
    without: Held = {node: names if node else {NEWEST: set()} for node, names in held.items()}
    short = short_of_copies(files, NEWEST, without, num_nodes=num_nodes, copies=copies)
    assert short["__0_0.distcp"] == wanted - 1
    assert all(count < wanted for count in short.values())


def test_files_of_a_larger_layout_have_their_copies_too() -> None:
    """Fewer nodes than wrote the checkpoint: the files of node 3 are for nodes 0 and 1."""
    assert targets(entry(3), num_nodes=2, copies=2) == {0, 1}
    assert targets(entry(1), num_nodes=3, copies=2) == {1, 2}
    assert targets(entry(2), num_nodes=3, copies=2) == {2, 0}
    assert targets(entry(), num_nodes=3, copies=2) == frozenset(), "a manifest of an older release names no holders"
