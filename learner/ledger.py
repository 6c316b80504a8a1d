"""The books: which sequences of a stream are settled, and how many samples met which disposition."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from bus.errors import WireError

MAX_NAMES = 64
"""Names from outside that are counted one by one; the others together, so that names cannot fill the memory."""
OTHERS = "(others)"


def count_of(counts: Counter[str], name: str) -> int:
    """Count one under a name that came from outside; the new count."""
    name = name if name in counts or len(counts) < MAX_NAMES else OTHERS
    counts[name] += 1
    return counts[name]


def field_of(error: WireError) -> str:
    """The field of a sample that is wrong: what invalid samples are counted by."""
    return error.field.split(".")[0].split("[")[0]


class SettledIds:
    """Which ids of a stream are settled: every id seen is either open or settled, ids nobody told of count as settled."""

    def __init__(self, floor: int = 0, settled: Iterable[int] = ()) -> None:
        self.seen_to = floor
        self._earlier = set(settled)
        self._open: set[int] = set()
        self._pass_earlier()

    def see(self, id: int) -> bool:
        """A message has been read (in order): it is open now. False when it had been settled before."""
        if id <= self.seen_to or id in self._earlier:
            return False
        self.seen_to = id
        self._open.add(id)
        self._pass_earlier()
        return True

    def _pass_earlier(self) -> None:
        while self.seen_to + 1 in self._earlier:
            self.seen_to += 1

    def settle(self, id: int) -> None:
        self._open.remove(id)

    def knows(self, id: int) -> bool:
        """It has been seen, now or before a restart."""
        return id <= self.seen_to or id in self._earlier

    @property
    def floor(self) -> int:
        """All ids up to here are settled."""
        return min(self._open) - 1 if self._open else self.seen_to

    @property
    def settled(self) -> tuple[int, ...]:
        """Ids above the floor that are settled."""
        floor = self.floor
        here = (id for id in range(floor + 1, self.seen_to + 1) if id not in self._open)
        return (*here, *sorted(id for id in self._earlier if id > self.seen_to))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAccounting:
    """What became of every training sample read from the stream (once each, whatever its chunks), and of every task."""

    published: int
    trained: int
    dropped: dict[str, int]
    """stale, filtered, empty, dead, lost, failed, aborted."""
    duplicate: int
    """Another sample was there first, or its task is settled."""
    invalid: dict[str, int]
    """By the field that is wrong."""
    invalid_of: dict[str, int]
    """The same samples by actor, as their subjects name it."""
    buffered: int
    issued: int
    """Training tasks."""
    open: int
    settled: dict[str, int]
    """trained, stale, filtered, empty, dead, lost."""
    tokens: dict[str, int]
    """trained, masked (by the gate), too_old (trained although older than max_lag)."""
    given_up: int
    """Prompts dropped for the last time: issued max_reissues times already."""
    eval: int
    """Evaluation samples: never part of the sums above."""

    @property
    def balanced(self) -> bool:
        fates = self.trained + sum(self.dropped.values()) + self.duplicate + sum(self.invalid.values()) + self.buffered
        return self.published == fates and self.issued == self.open + sum(self.settled.values())


@dataclass(slots=True)
class SampleCounter:
    """Running counts of what is settled; what is open is counted where it is."""

    published: int = 0
    issued: int = 0
    eval: int = 0
    trained: int = 0
    duplicate: int = 0
    given_up: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    invalid_of: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)

    def count(self, disposition: str) -> None:
        """One buffered sample is trained, or dropped for the reason ``disposition``."""
        if disposition == "trained":
            self.trained += 1
        else:
            self.dropped[disposition] += 1

    def refuse(self, reason: str, actor: str) -> None:
        """One sample is invalid."""
        count_of(self.invalid, reason)
        count_of(self.invalid_of, actor)

    def dump(self, *, buffered: int, open_tasks: int) -> dict[str, object]:
        """For a snapshot: what is open will be counted again when it is read again."""
        numbers = {name: getattr(self, name) for name in ("eval", "trained", "duplicate", "given_up")}
        maps = {name: dict(sorted(getattr(self, name).items())) for name in ("dropped", "invalid", "invalid_of", "settled", "tokens")}
        return {"published": self.published - buffered, "issued": self.issued - open_tasks, **numbers, **maps}

    @classmethod
    def load(cls, data: dict[str, object]) -> "SampleCounter":
        values = {name: Counter(value) if isinstance(value, dict) else value for name, value in data.items()}
        return cls(**values)  # type: ignore[arg-type]

    def accounting(self, *, buffered: int, open_tasks: int) -> SampleAccounting:
        return SampleAccounting(
            published=self.published,
            trained=self.trained,
            dropped=dict(self.dropped),
            duplicate=self.duplicate,
            invalid=dict(self.invalid),
            invalid_of=dict(self.invalid_of),
            buffered=buffered,
            issued=self.issued,
            open=open_tasks,
            settled=dict(self.settled),
            tokens=dict(self.tokens),
            given_up=self.given_up,
            eval=self.eval,
        )
