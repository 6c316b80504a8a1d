"""The shards of SAMPLES: a task's id chooses the stream, and one number names a message of any of them.

With K shards, message q of shard s has the sequence q * K + s: the remainder of a sample's sequence is its task's. With
one shard, it is JetStream's own sequence. A *position* has one sequence for each shard.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.bus.wire import subjects

Position = tuple[int, ...]
"""A sequence for each shard, in the order of the shards; one is enough for sequences below all messages."""
_NAME = re.compile(r"_SAMPLES(?:-0of(\d{1,2}))?$")


def is_behind(seq: int, position: Position) -> bool:
    """Return whether a message is at or before a position."""
    return seq <= position[seq % len(position)]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a run: their number, names and sequences."""

    count: int = 1

    @classmethod
    def named(cls, streams: Iterable[str]) -> "Shards | None":
        """Return the shards among the names of a run's streams; None = there are none yet."""
        counts = [int(match[1] or 1) for name in streams if (match := _NAME.search(name))]
        return cls(counts[0]) if counts else None

    def suffix(self, shard: int) -> str:
        """Return the end of a shard's name, which stands in its subjects too; empty where there is one shard."""
        return "" if self.count == 1 else f"-{shard}of{self.count}"

    def stream(self, run: str, shard: int) -> str:
        """Return the name of a shard's stream."""
        return subjects.stream(run, subjects.SAMPLES + self.suffix(shard))

    def of_task(self, task: int) -> int:
        """Return the shard of the samples of a task."""
        return task % self.count

    def seq(self, shard: int, local: int) -> int:
        """Return the sequence of a message, from its sequence in its shard's stream."""
        return local * self.count + shard

    def place(self, seq: int) -> tuple[int, int]:
        """Return the shard of a message, and its sequence there."""
        return seq % self.count, seq // self.count

    def first(self, shard: int, seq: int) -> int:
        """Return the first sequence in a shard's stream of messages from ``seq`` on."""
        return -((shard - seq) // self.count)
