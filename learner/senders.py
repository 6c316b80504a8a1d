"""Actors whose samples are invalid: which send nothing else, and what follows.

An actor that sends ``INVALID_IN_A_ROW`` invalid samples and no usable one between them is *refused*: it is named in the log and in the
feeder's live row, and its row ``refused.<actor>`` in the bucket ``run`` asks it to end. Whether a sample is trained depends on the sample
alone, so a refusal changes no plan, and one usable sample takes it back. While no usable sample comes, tasks are issued slowly.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

from bus.connection import Bus
from bus.errors import WireError
from bus.samples import Received
from bus.subjects import REFUSED_KEY, refused
from bus.waiter import Waiter
from learner.ledger import count_of

log = logging.getLogger(__name__)

INVALID_IN_A_ROW = 64
"""So many invalid samples without a usable one are no accident: no group is larger by much, and one bad prompt makes one bad group."""
MAX_ACTORS = 256
"""Actors that are watched at a time: the shortest run of invalid samples makes room."""
MAX_WORDS = 300
"""Characters of a reason: parts of it come from outside."""
SLOW_S = 1.0
"""Time between two tasks while no usable sample comes."""
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Row of a refused actor."""

    actor: str
    invalid: int
    """Samples, one after the other."""
    reason: str
    """Why the last one of them is."""


class Senders:
    """Counts of samples by actor, as far as they decide which actor is refused. Not part of the data's state: a restart begins anew."""

    def __init__(self, earlier: tuple[str, ...] = ()) -> None:
        """``earlier``: actors that an earlier start has refused."""
        self.refused = set(earlier)
        self._in_a_row: dict[str, int] = {}
        self._totals: Counter[str] = Counter()
        self._fruitless = 0
        self._news: dict[str, Refusal | None] = {}
        self._woken = Waiter()

    @property
    def pause_s(self) -> float:
        """To wait before the next task is issued."""
        return SLOW_S if self._fruitless >= INVALID_IN_A_ROW else 0.0

    def usable(self, actor: str) -> None:
        """A sample of it is buffered."""
        self._fruitless = 0
        if self._in_a_row:
            self._in_a_row.pop(actor, None)
        if actor in self.refused:
            self.refused.discard(actor)
            self._tell(actor, None)

    def invalid(self, actor: str, reason: str) -> None:
        """A sample of it is invalid."""
        self._fruitless += 1
        if actor not in self._in_a_row and len(self._in_a_row) >= MAX_ACTORS:
            del self._in_a_row[min(self._in_a_row, key=lambda name: self._in_a_row[name])]
        self._in_a_row[actor] = count = self._in_a_row.get(actor, 0) + 1
        total = count_of(self._totals, actor)
        if total & (total - 1) == 0:
            log.warning("sample invalid actor=%s so_far=%d error=%s", actor, total, reason)
        if count % INVALID_IN_A_ROW == 0 and (actor in self.refused or len(self.refused) < MAX_ACTORS):
            log.error("actor refused: it sends only invalid samples actor=%s in_a_row=%d last=%s", actor, count, reason)
            self.refused.add(actor)
            self._tell(actor, Refusal(actor=actor, invalid=count, reason=reason))

    def _tell(self, actor: str, refusal: Refusal | None) -> None:
        self._news[actor] = refusal
        self._woken.wake()

    async def publish(self, bus: Bus) -> None:
        """Keep the rows of refused actors, for ever. A row is written again for every ``INVALID_IN_A_ROW`` more."""
        rows = bus.rows("run")
        while True:
            while self._news:
                actor, refusal = self._news.popitem()
                key = refused(actor)
                write = partial(rows.delete, key) if refusal is None else partial(rows.put, key, asdict(refusal))
                await bus.retry(write)
            await self._woken.wait(_IDLE_S)

    def load(self, by_reason: Mapping[str, int], by_actor: Mapping[str, int]) -> dict[str, int]:
        """Counters of invalid samples for the live row: ``invalid/<reason>``, ``invalid_of/<actor>``, ``refused/<actor>``, where not 0."""
        reasons = {f"invalid/{reason}": count for reason, count in by_reason.items()}
        actors = {f"invalid_of/{actor}": count for actor, count in by_actor.items()}
        return {**reasons, **actors, **{f"refused/{actor}": 1 for actor in sorted(self.refused)}}


def invalid_words(received: Received, reason: str) -> str:
    """Why a sample is invalid, in a line."""
    sample = received.sample
    if isinstance(sample, WireError):
        why = str(sample)
    elif reason == "version":
        why = f"spans: want versions that existed when it was stored, got {sorted({span.version for span in sample.spans})}"
    else:
        why = f"{reason}: want what task {sample.task} has"
    return f"sequence {received.seq}: {why}"[:MAX_WORDS]


async def refused_before(bus: Bus) -> tuple[str, ...]:
    """Actors that an earlier start of the feeder has refused, and that have sent nothing usable since."""
    return tuple(str(row.get("actor", "")) for row, _ in (await bus.rows("run").all(REFUSED_KEY)).values())
