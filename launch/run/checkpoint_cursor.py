"""The cursor in SAMPLES of a run's last checkpoint, as an audit compares it with the streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.wire.subjects import Position, is_behind


@dataclass(frozen=True, slots=True)
class CheckpointCursor:
    """The sequences that the last checkpoint's cursor has as settled."""

    floor: int
    settled: frozenset[int]
    step: int = 0  # Step of the checkpoint: samples of plans up to it must be settled
    # Invalid samples that the learner had counted by then; likewise `invalid_by_actor`.
    invalid_by_field: Mapping[str, int] = field(default_factory=dict)
    invalid_by_actor: Mapping[str, int] = field(default_factory=dict)
    created: str = ""  # Time of creation of the stream SAMPLES that the sequences are of
    floors: Position = ()  # Floor of each shard of SAMPLES, where there are several

    def __contains__(self, seq: int) -> bool:
        return is_behind(seq, self.floors or (self.floor,)) or seq in self.settled


def read_cursor(
    checkpoints: Path, *, stored: bool = False, newest: tuple[float, float] | None = None
) -> CheckpointCursor | None:
    """Return the cursor in the newest valid checkpoint; None without one. ``stored``: a store has the files.

    ``newest``: step and epoch; those after it are not of the run as its bus has it.
    """
    from tidemill.learner.buffer.ledger import cursor_of, read_state
    from tidemill.learner.checkpoints import disk

    paths = [kept.path for kept in disk.listed(checkpoints) if newest is None or (kept.step, kept.epoch) <= newest]
    path, _ = disk.latest_valid(paths, partly=True, stored=stored)
    if path is None:
        return None
    state = read_state(disk.read_state(path))
    counts, cursor = state["tally"], cursor_of(state)
    return CheckpointCursor(
        cursor.floor,
        frozenset(cursor.settled),
        int(state["step"]),
        counts["invalid"],
        counts.get("invalid_of", {}),  # missing in snapshots from before actors were counted
        cursor.created,
        cursor.floors,
    )
