"""Partials of a task that an actor returns: read from the bus, and stored there for the next actor."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tidemill.actors.engines.activity import RolloutCounters
from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.tasks import Lease
from tidemill.bus.wire.messages import Partial

logger = logging.getLogger(__name__)


class PartialStore:
    """Unfinished responses and the places of finished samples, while this actor has the lease."""

    def __init__(self, bus: Bus, actor_id: str, counters: RolloutCounters, *, enabled: bool) -> None:
        """``enabled``: False = nothing is read or stored."""
        self._bus, self._actor_id, self._counters, self._enabled = bus, actor_id, counters, enabled

    async def read(self, lease: Lease) -> dict[int, Partial]:
        """Return the partials that earlier actors stored for the task, by sample index."""
        # At the first delivery no other actor has had the task, so there are none to read.
        if lease.deliveries == 1 or not self._enabled:
            return {}
        try:
            return await self._bus.partials.of(lease.task.id)
        except BusError as error:  # then all samples are generated again
            logger.warning("partials not read task=%d error=%s", lease.task.id, error)
            return {}

    async def store(self, lease: Lease, begun: Sequence[Partial], seqs: Mapping[int, int]) -> None:
        """Store unfinished responses, and the sequences of finished samples by index."""
        if self._enabled:
            # Subjects of samples do not name their tasks, so SAMPLES cannot be searched for them (decision 009).
            partials = [*begun, *(_place_of(lease, index, seq) for index, seq in seqs.items())]
            await asyncio.gather(*(self._store(replace(partial, actor=self._actor_id)) for partial in partials))

    async def _store(self, partial: Partial) -> None:
        try:
            stored = await self._bus.partials.store(partial)
            self._counters.partials_stored += stored and not partial.sample_seq
        except WireError:
            logger.exception("invalid partial task=%d index=%d", partial.task, partial.index)


def _place_of(lease: Lease, index: int, seq: int) -> Partial:
    """Return a partial without a response that has the stream sequence of a finished sample."""
    return Partial(
        run=lease.task.run,
        task=lease.task.id,
        index=index,
        attempt=lease.attempt,
        tokens=np.zeros(0, np.int32),
        rollout_log_probs=np.zeros(0, np.float32),
        spans=(),
        sample_seq=seq,
    )
