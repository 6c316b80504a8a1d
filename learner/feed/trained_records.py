"""Values of trained tokens on their way from the ranks into the stream TRAINED, for viewers of the run.

Consumes the ranks' messages; names the samples of a planned step; stores each message by one try. No step waits for it:
a message that finds the queue full, that the bus does not store, or that is malformed is dropped and counted.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import BusError, WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.messages import Plan
from tidemill.bus.wire.trained_values import decode_trained
from tidemill.learner.buffer.sample_index import SampleIndex

log = logging.getLogger(__name__)

MOST_WAITING, STEPS_WAITING = 16, 2
"""Messages that wait to be stored: as many, or the messages of so many steps; with more, the oldest is dropped."""
MOST_BYTES = 128 << 20
"""Bytes of the messages that wait: two steps of 128 ranks at the default ``learner.record.step_bytes``."""
_MOST_STEPS = 4
"""Steps whose samples are known: the ranks are at most two behind the plans."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The samples of a planned step, as ``TrainedStep.named`` takes them."""

    sequences_M: NDArray[np.int32]
    offsets_M: NDArray[np.int32]
    samples_N: NDArray[np.int64]

    @classmethod
    def of(cls, plan: Plan, samples: Sequence[SampleIndex]) -> Self:
        """Return the samples of a plan, in its order."""
        names = [(int(seq), sample.task, sample.index) for seq, sample in zip(plan.seqs, samples, strict=True)]
        sizes_M = np.array([size for sample in samples for size in sample.sizes], np.int64).reshape(-1, 2)
        rows_N = [len(sample.sizes) for sample in samples]
        sequences_M = np.repeat(np.arange(len(samples)), rows_N)
        tokens_M, responses_M = sizes_M.T
        before_M = np.cumsum(responses_M) - responses_M
        firsts_N = np.cumsum(rows_N) - rows_N
        before_M -= np.repeat(before_M[firsts_N], rows_N)  # responses of the sample's earlier sequences
        offsets_M = before_M - (tokens_M - responses_M)
        return cls(sequences_M.astype(np.int32), offsets_M.astype(np.int32), np.array(names, np.int64))


class TrainedRecords:
    """The queue of messages, and the samples of the newest planned steps."""

    def __init__(self, bus: Bus, *, epoch: int, data_parallel: int, on: bool) -> None:
        """``data_parallel``: number of ranks that send a message each step, all at once."""
        self._bus, self._epoch, self._on = bus, epoch, on
        self._most_waiting = max(MOST_WAITING, STEPS_WAITING * data_parallel)
        self._steps: dict[int, _Step] = {}
        self.waiting: deque[tuple[int, bytes]] = deque()
        """Messages to be stored, oldest first: rank and content."""
        self._bytes = 0
        self._waiter = Waiter()
        self._failures = FailureLog(log)
        self.dropped = 0
        """Messages that were not stored, since this start."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a step; none where nothing is recorded."""
        return {"data/trained_dropped": float(self.dropped)} if self._on else {}

    def planned(self, plan: Plan, samples: Sequence[SampleIndex]) -> None:
        """Register the samples of a step, before its batch is offered."""
        if self._on:
            self._steps[plan.step] = _Step.of(plan, samples)
            self._steps = {step: known for step, known in self._steps.items() if step > plan.step - _MOST_STEPS}

    def put(self, dp_rank: int, data: bytes) -> None:
        """Take a message of a data-parallel rank; it does not wait."""
        self.waiting.append((dp_rank, data))
        self._bytes += len(data)
        while len(self.waiting) > self._most_waiting or self._bytes > MOST_BYTES:
            self._take()
            self._drop(f"as many wait for the bus as {self._most_waiting} messages or {MOST_BYTES} bytes allow")
        self._waiter.wake()

    async def run(self) -> None:
        """Store messages until cancelled."""
        while True:
            while self.waiting:
                try:
                    await self._store(*self._take())
                except (BusError, TimeoutError) as error:
                    self._drop(str(error) or type(error).__name__)
            await self._waiter.wait()

    def _take(self) -> tuple[int, bytes]:
        message = self.waiting.popleft()
        self._bytes -= len(message[1])
        return message

    async def _store(self, dp_rank: int, data: bytes) -> None:
        values = decode_trained(data)
        step = self._steps.get(values.step)
        if step is None or values.rank != dp_rank:
            raise WireError("step, rank", f"one of {list(self._steps)}, {dp_rank}", (values.step, values.rank))
        named = values.named(step.sequences_M, step.offsets_M, step.samples_N)
        await self._bus.trained.store(replace(named, epoch=self._epoch))

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        self._failures("values of trained tokens not stored (no step waits for them)", reason)
