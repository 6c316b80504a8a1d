"""Accounting of samples and tasks: settled ids of a stream, and counts of samples by disposition."""

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Cursor, Plan
from tidemill.bus.wire.subjects import Position, Shards
from tidemill.learner.buffer.groups import SampleGroup
from tidemill.learner.errors import ReplayMismatch

MAX_NAMES = 64
"""Maximum number of names from outside with counters of their own; others share one, which bounds the memory."""
OTHERS = "(others)"
"""Name of the shared counter; no actor has parentheses in its name."""


def count_of(counts: Counter[str], name: str) -> int:
    """Increment the counter of a name that came from outside, and return the new count."""
    name = name if name in counts or len(counts) < MAX_NAMES else OTHERS
    counts[name] += 1
    return counts[name]


def field_of(error: WireError) -> str:
    """Return the invalid field of a sample, by which invalid samples are counted."""
    return error.field.split(".")[0].split("[")[0]


class SettledIds:
    """Settled ids of a stream. A seen id is open or settled; ids below it that were not seen are settled."""

    def __init__(self, floor: int = 0, settled: Iterable[int] = ()) -> None:
        self.seen_to = floor
        self._earlier = set(settled)
        self._open: set[int] = set()
        self._pass_earlier()

    def see(self, number: int) -> bool:
        """Open the id of a message; call it in order. Returns False if the id was seen or settled before."""
        if number <= self.seen_to or number in self._earlier:
            return False
        self.seen_to = number
        self._open.add(number)
        self._pass_earlier()
        return True

    def _pass_earlier(self) -> None:
        # Ids that an earlier start has settled count as seen once all before them are seen, or the floor would stay
        # below them.
        while self.seen_to + 1 in self._earlier:
            self.seen_to += 1

    def settle(self, number: int) -> None:
        """Settle an open id. Raises KeyError for another one."""
        self._open.remove(number)

    def knows(self, number: int) -> bool:
        """Return whether an id has been seen, now or before a restart."""
        return number <= self.seen_to or number in self._earlier

    @property
    def floor(self) -> int:
        """Largest id up to which all ids are settled."""
        return min(self._open) - 1 if self._open else self.seen_to

    @property
    def settled(self) -> tuple[int, ...]:
        """Settled ids above the floor."""
        seen = (number for number in range(self.floor + 1, self.seen_to + 1) if number not in self._open)
        return (*seen, *sorted(number for number in self._earlier if number > self.seen_to))


class SettledSamples:
    """Settled sequences of SAMPLES, of each shard by itself, because messages of a shard alone come in order."""

    def __init__(self, floors: Position, settled: Iterable[int] = ()) -> None:
        self._shards = Shards(len(floors))
        self.newly_settled: list[int] = []
        """Sequences settled since the caller has emptied it."""
        places = [self._shards.place(seq) for seq in settled]
        self._ids = [
            SettledIds(self._shards.place(floor)[1], [local for of, local in places if of == shard])
            for shard, floor in enumerate(floors)
        ]

    def see(self, seq: int) -> bool:
        """Open a message, as ``SettledIds.see``; call it in the order of its shard."""
        shard, local = self._shards.place(seq)
        return self._ids[shard].see(local)

    def settle(self, seq: int) -> None:
        """Settle an open message. Raises KeyError for another one."""
        shard, local = self._shards.place(seq)
        self._ids[shard].settle(local)
        self.newly_settled.append(seq)

    def knows(self, seq: int) -> bool:
        """Return whether a message has been seen, now or before a restart."""
        shard, local = self._shards.place(seq)
        return self._ids[shard].knows(local)

    def cursor(self, created: str) -> Cursor:
        """Return the position at which a restart continues reading. ``created`` identifies SAMPLES."""
        shards, numbered = self._shards, list(enumerate(self._ids))
        floors = tuple(shards.seq(shard, ids.floor) for shard, ids in numbered)
        settled = tuple(shards.seq(shard, local) for shard, ids in numbered for local in ids.settled)
        several = floors if shards.count > 1 else ()
        return Cursor(created=created, floor=min(floors), settled=settled, floors=several)


@dataclass(slots=True, kw_only=True)
class SampleAccounting:
    """Counts of training samples read from the stream by disposition (a chunked sample counts once), and of tasks."""

    published: int = 0
    issued: int = 0
    """Training tasks issued."""
    eval: int = 0
    """Evaluation samples, which are in none of the other counts."""
    trained: int = 0
    duplicate: int = 0
    """Samples of an index that had one already, or of a settled task."""
    given_up: int = 0
    """Prompts that were dropped after max_reissues further issues."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped samples by reason: stale, filtered, filtered:NAME, empty, dead, lost, failed, aborted."""
    invalid: Counter[str] = field(default_factory=Counter)
    """Invalid samples by field."""
    invalid_of: Counter[str] = field(default_factory=Counter)
    """Invalid samples by actor, from their subjects."""
    settled: Counter[str] = field(default_factory=Counter)
    """Tasks by reason: trained, stale, filtered, filtered:NAME, empty, dead, lost."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens by treatment: trained, masked (by the gate), filtered, too_old (trained, older than max_lag)."""
    buffered: int = 0
    """Samples of open tasks; 0 until ``DataSource.accounting`` completes the counts."""
    open: int = 0
    """Open tasks, as above."""

    @property
    def balanced(self) -> bool:
        """True if every sample has exactly one disposition and every issued task is open or settled."""
        accounted = self.trained + self.dropped.total() + self.duplicate + self.invalid.total() + self.buffered
        return self.published == accounted and self.issued == self.open + self.settled.total()

    def counts(self) -> dict[str, int]:
        """Return every count of samples and tasks by a flat name, for viewers."""
        maps = {"dropped": self.dropped, "settled": self.settled}
        by_reason = {f"{kind}/{reason}": count for kind, counts in maps.items() for reason, count in counts.items()}
        names = ("published", "trained", "duplicate", "buffered", "eval", "issued", "open")
        return {name: getattr(self, name) for name in names} | {"invalid": self.invalid.total()} | by_reason

    def settle(self, disposition: str) -> None:
        """Count a buffered sample as trained, or as dropped for the reason ``disposition``."""
        if disposition == "trained":
            self.trained += 1
        else:
            count_of(self.dropped, disposition)

    def refuse(self, reason: str, actor: str) -> None:
        """Count an invalid sample by its reason and its actor."""
        count_of(self.invalid, reason)
        count_of(self.invalid_of, actor)

    def count_tokens(self, plan: Plan, group: SampleGroup, *, max_lag: int) -> None:
        """Count the tokens of a group that a plan trains."""
        if group.masked:
            masked = [count for row in group.rows if row.seq in group.masked for _, count in row.by_version]
            self.tokens["filtered"] += sum(masked)
        for step, count in group.tokens_by_step(plan.version_steps).items():
            gated = plan.oldest_step is not None and step < plan.oldest_step
            self.tokens["masked" if gated else "trained"] += count
            self.tokens["too_old"] += count * (not gated and step < plan.step - 1 - max_lag)

    def completed(self, *, buffered: int, open_tasks: int) -> "SampleAccounting":
        """Return a copy with the buffered samples and open tasks."""
        return replace(deepcopy(self), buffered=buffered, open=open_tasks)

    def dump(self, *, buffered: int, open_tasks: int) -> dict[str, object]:
        """Return the counts for a snapshot, without open tasks and buffered samples: a restart counts them again."""
        numbers = {name: getattr(self, name) for name in ("eval", "trained", "duplicate", "given_up")}
        maps = {
            name: dict(sorted(getattr(self, name).items()))
            for name in ("dropped", "invalid", "invalid_of", "settled", "tokens")
        }
        return {"published": self.published - buffered, "issued": self.issued - open_tasks, **numbers, **maps}

    @classmethod
    def load(cls, data: dict[str, Any]) -> "SampleAccounting":
        """Return the counts of a snapshot."""
        values: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in data.items()
        }
        return cls(**values)


SCHEMA = 1
"""Version of the snapshot format."""
ROWS = "rows"
"""Key of the planned rows (``tidemill.learner.prompts.prompt_file``); snapshots of earlier releases lack them."""


def read_state(data: bytes) -> JsonObject:
    """Return the map of a snapshot. Raises ReplayMismatch for another schema."""
    state: JsonObject = msgpack.unpackb(data)
    if state.get("schema") != SCHEMA:
        raise ReplayMismatch("state of the data", f"schema {SCHEMA}", state.get("schema"))
    return state


def cursor_of(state: JsonObject) -> Cursor:
    """Return the cursor in SAMPLES of a snapshot's map."""
    fields = state["samples"]
    floors = tuple(fields.get("floors", ()))
    return Cursor(created=fields["created"], floor=fields["floor"], settled=tuple(fields["settled"]), floors=floors)


def dump_cursor(cursor: Cursor) -> JsonObject:
    """Return a cursor for a snapshot's map, as ``cursor_of`` reads it."""
    fields: JsonObject = {"created": cursor.created, "floor": cursor.floor, "settled": list(cursor.settled)}
    return fields | ({"floors": list(cursor.floors)} if cursor.floors else {})
