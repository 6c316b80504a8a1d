"""The stream TRAINED: values of trained tokens (log-prob, advantage, weight), for viewers of a run.

Nothing reads it but viewers. It has one copy, loses its oldest messages beyond its bound, and is written by one try: a
message that is not stored is lost. A step that is executed again writes its subjects again; the newest message counts.
"""

import asyncio

from tidemill.bus.client.jetstream import JetStream, Message
from tidemill.bus.errors import NotFound, WireError
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.trained_values import TrainedStep, TrainedValues, decode_trained, encode_trained

STORE_S = 5.0
"""Longest wait for the answer to one message."""


class TrainedStream:
    """The stream TRAINED of a run."""

    def __init__(self, jet: JetStream) -> None:
        self._jet = jet
        self._stream = subjects.stream(jet.run, subjects.TRAINED)

    async def store(self, step: TrainedStep) -> None:
        """Store a message, by one try. Raises BusError (WireError where no message may be so large), TimeoutError."""
        data, limit = encode_trained(step), self._jet.connection.max_payload
        if not codec.fits(data, limit):
            want = f"at most {limit - codec.HEADER_RESERVE_BYTES} bytes, as the nats-server allows"
            raise WireError("learner.record.step_bytes", want, len(data))
        subject = subjects.trained(self._jet.run, step.step, step.rank)
        message_id = f"trained.{step.epoch}.{step.step}.{step.rank}"
        async with asyncio.timeout(STORE_S):
            await self._jet.outbox.attempt(subject, data, {subjects.MESSAGE_ID: message_id})

    async def of_step(self, step: int, rank: int | None = None) -> list[TrainedValues]:
        """Return the values of a step's recorded samples, of all ranks or of one; empty without them."""
        run = self._jet.run
        try:
            if rank is None:
                ranks = [*await self._jet.subjects(self._stream, subjects.trained(run, step))]
            else:
                ranks = [subjects.trained(run, step, rank)]
            messages = [await self._jet.last(self._stream, subject) for subject in sorted(ranks)]
        except NotFound:  # a run of an older release has no such stream
            return []
        steps = [self._read(message) for message in messages if message is not None]
        return [values for found in steps if found is not None for values in found.by_sample()]

    async def of_sample(self, step: int, seq: int, rank: int) -> TrainedValues | None:
        """Return the values of one sample, as the rank that trained it has stored them; None without them."""
        return next((values for values in await self.of_step(step, rank) if values.seq == seq), None)

    def _read(self, message: Message) -> TrainedStep | None:
        def decoded() -> TrainedStep:
            step = decode_trained(message.data)
            step.check_samples()
            return step

        return self._jet.refusals.read(subjects.TRAINED, message.seq, decoded)
