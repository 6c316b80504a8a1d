"""Client of the feed, for ranks: synchronous, with a deadline for every wait. Knows no torch, no bus.

The feeder sends a heartbeat to a waiting rank every second, with the reason of the wait. So a slow batch and a dead
feeder differ: the deadline is for the silence of the feeder, not for the duration of the wait.

With several nodes, ``Heartbeats`` sends heartbeats of the rank over a connection and a thread of its own, also while
the rank is in a collective: gloo and NCCL cannot distinguish a slow peer from one that is gone, and a cut network gives
no error for many minutes. The feeder answers. Either ends when it receives none for ``silence_s``; then all end.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Self

import zmq

from tidemill.bus import exit_codes
from tidemill.bus.exit_codes import CRASHED
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.trained_values import TrainedStep, encode_trained
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.batch.batching import Share, align, pack_share
from tidemill.learner.errors import FeederFailed, FeederLost, FeedError
from tidemill.learner.feed.feed_keys import FeedKeys, admit_by
from tidemill.learner.feed.feed_messages import FeedEnd, FeedStart, Frame, Last, decode_batch, pack, share_in, unpack
from tidemill.learner.feed.sample_transfer import SampleClient

log = logging.getLogger(__name__)

_STEP, _SIGTERM = b".", bytes([signal.SIGTERM])


def note_step(descriptor: int) -> None:
    """Write a byte into the pipe, if there is one (>= 0); never block on it."""
    if descriptor >= 0:
        with suppress(
            BlockingIOError, BrokenPipeError
        ):  # full: the parent has not read for thousands of steps; broken: it has ended
            os.write(descriptor, _STEP)


@contextmanager
def sigterm_noted(descriptor: int) -> Iterator[None]:
    """While entered, a SIGTERM to this process is in the pipe, if there is one (>= 0), whatever is being computed."""
    # A handler in Python waits for the end of the main thread's current call, which may be a collective of many
    # seconds. The interpreter's own handler writes the signal's number into this descriptor at once.
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


@contextmanager
def progress_noted(on_step: Callable[[], None], on_sigterm: Callable[[], None]) -> Iterator[int]:
    """Yield the writing end of a pipe for children; their steps call ``on_step``, a SIGTERM ``on_sigterm``."""
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()

    def read() -> None:
        """Take the bytes out of the pipe."""
        data = os.read(reading, 4096)
        if _STEP in data:
            on_step()
        if _SIGTERM in data:
            on_sigterm()

    try:
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        loop.add_reader(reading, read)
        yield writing
    finally:
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)


BEAT_S = 1.0
SILENCE_S = 50.0
"""Seconds without a heartbeat, by default: so that all end within a minute of the last one."""


class FeedClient:
    """One rank's connection to the feeder. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        url: str,
        *,
        keys: FeedKeys,
        rank: int,
        dp_rank: int,
        dp_size: int,
        metadata: bool = False,
        silence_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """``silence_s``: seconds without a message after which the feeder counts as lost. ``metadata``: ask for the
        metadata of samples, too. ``on_wait`` is called every second of a wait, with its reason.
        """
        self._url, self._rank, self._dp_rank, self._dp_size = url, rank, dp_rank, dp_size
        self._silence_s, self._on_wait, self._last_reason = silence_s, on_wait, ""
        self._metadata, self._registered = metadata, False
        self.draining, self._passed_on = False, False
        """True once this process has received SIGTERM (``drained_by_sigterm``), or the answer that another rank has."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2_000)
        # Before the connection: ZMQ takes the keys that the socket has when it connects.
        admit_by(self._socket, keys)
        self._socket.setsockopt(zmq.IPV6, int("[" in url))
        self._socket.connect(url)
        self._samples = SampleClient(self._context, url, keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The feeder knows its own errors, and has refused this rank where it sent one.
        if isinstance(error, Exception) and not isinstance(error, FeederFailed | FeederLost):
            self.failed(exit_codes.message(error), exit_codes.of(error))
        self.close()

    def close(self) -> None:
        """Sign off, send queued messages (for up to 2 s) and close the socket. Further calls do nothing."""
        if self._socket.closed:
            return
        if self._registered:
            self._send("bye")
        self._samples.close()
        self._socket.close()
        self._context.term()

    @contextmanager
    def drained_by_sigterm(self, progress: int = -1) -> Iterator[None]:
        """Have SIGTERM end the run behind the ranks' newest step: all get ``Last`` at their next request.

        Nothing is interrupted: the feeder gets the message before the next request, or within a second of a wait. The
        parent is notified at once, through ``progress`` (``tidemill.learner.feed.feed_client``).
        """

        def note(number: int, frame: FrameType | None) -> None:
            self.draining = True

        previous = signal.signal(signal.SIGTERM, note)
        try:
            with sigterm_noted(progress):
                yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _pass_on_sigterm(self) -> None:
        if self.draining and not self._passed_on:
            self._passed_on = True
            self._send("drain")

    def hello(self) -> FeedStart:
        """Register this rank, and return the start of the run, once the feeder has restored its state.

        Raises FeederLost (silent or unreachable), FeederFailed (it refuses this rank or has failed), FeedError.
        """
        self._registered = True
        self._send("hello", rank=self._rank, dp_rank=self._dp_rank, dp_size=self._dp_size, metadata=self._metadata)
        header, _ = self._receive("start", kinds=("start",))
        return FeedStart(**{key: value for key, value in header.items() if key != "type"})

    def next(self, step: int) -> StepBatch | Last | FeedEnd:
        """Return the batch of ``step`` for this data-parallel rank, or that there is none. Raises as ``hello``."""
        self._pass_on_sigterm()
        self._send("next", step=step, dp_rank=self._dp_rank)
        header, frames = self._receive(f"batch {step}", kinds=("batch", "last", "end"))
        if header["type"] == "end":
            return FeedEnd()
        if header["type"] == "last":
            if header["step"] != step - 1:
                raise FeedError(self._url, f"step {step - 1} as the last", header["step"])
            self.draining = self.draining or header["drained"]
            return Last(step=header["step"], state=header["state"], drained=header["drained"])
        share = share_in(header, frames)
        batch = decode_batch(header, frames, with_metadata=self._metadata)
        if share is not None:
            batch = replace(batch, micro_batches=self._packed(share, header["ports"]))
        if (batch.step, batch.dp_rank) != (step, self._dp_rank):
            raise FeedError(self._url, f"batch {step} for dp rank {self._dp_rank}", (batch.step, batch.dp_rank))
        return batch

    def _packed(self, share: Share, ports: Sequence[int]) -> tuple[MicroBatch, ...]:
        """Return the rows of this rank, of samples that the readers have. Raises as ``hello``."""
        samples = self._samples.fetch(
            [place.seq for place in share.places],
            ports,
            silence_s=self._silence_s,
            feeder=self._socket,
            on_feeder=self._refuse_message,
        )
        aligned: dict[int, MicroBatch] = {}
        for place in share.places:
            aligned |= align(share, place, samples[place.seq])
        return pack_share(share, aligned)

    def _refuse_message(self) -> None:
        """Raise the error that the feeder sends while this rank waits for nothing of it."""
        self._receive("samples of the step", kinds=())

    def done(self, step: int, metrics: dict[str, float], weights_digest: str | None = None) -> None:
        """Report that step ``step`` is done, with its metrics (rank 0 only); does not wait."""
        numbers = {key: float(value) for key, value in metrics.items()}
        self._send("done", step=step, metrics=numbers, weights_digest=weights_digest)

    def trained(self, values: TrainedStep) -> None:
        """Send the values of this rank's trained tokens, for viewers; dropped where the feeder is that far behind."""
        with suppress(zmq.Again):
            self._socket.send(pack("trained", values=encode_trained(values)), zmq.DONTWAIT)

    def published(self, version: int, step: int) -> None:
        """Report that ``version``, of the weights of ``step``, is the registry's head (rank 0 only). Does not wait"""
        self._send("published", version=version, step=step)

    def checkpointed(self, step: int, directory: str) -> None:
        """Report that the checkpoint of ``step`` is committed to ``directory`` (rank 0 only); does not wait."""
        self._send("checkpointed", step=step, directory=str(directory))

    def failed(self, reason: str, exit_code: int = CRASHED) -> None:
        """Report that this rank has failed, which ends the feeder with ``reason`` and ``exit_code``; does not wait."""
        self._send("failed", rank=self._rank, reason=reason, exit_code=exit_code)
        self._registered = False

    def _send(self, kind: str, **values: object) -> None:
        self._socket.send(pack(kind, **values))

    def _receive(self, request: str, *, kinds: Sequence[str]) -> tuple[JsonObject, list[Frame]]:
        """Return header and frames of the next message that is not a ``wait``. Raises as ``hello``."""
        while True:
            began = time.monotonic()
            if not self._socket.poll(int(self._silence_s * 1000)):
                self._give_up()
                raise FeederLost(self._url, time.monotonic() - began, request, self._last_reason)
            first, *frames = self._socket.recv_multipart(copy=False)
            header = unpack(first.buffer, where=self._url)
            if header["type"] == "wait":
                self._note_wait(str(header.get("waits_for", "")))
            elif header["type"] == "error":
                self._give_up()
                raise FeederFailed(self._url, str(header.get("reason", "")), int(header.get("exit_code", CRASHED)))
            elif header["type"] in kinds:
                return header, [frame.buffer for frame in frames]
            else:
                raise FeedError(self._url, f"one of {list(kinds)}", header["type"])

    def _give_up(self) -> None:
        """Skip the sign-off and the wait for queued messages at ``close``, because the feeder is gone."""
        self._registered = False
        self._socket.setsockopt(zmq.LINGER, 0)

    def _note_wait(self, waits_for: str) -> None:
        self._last_reason = waits_for
        self._pass_on_sigterm()
        if self._on_wait is not None:
            self._on_wait(waits_for)


def end_this_process(reason: str) -> None:
    """End this process, whose main thread may never return from a collective. Its last line is ``reason``."""
    exit_codes.write_reason(reason)
    os.kill(os.getpid(), signal.SIGKILL)


class Heartbeats:
    """While entered, a thread sends this rank's heartbeats, and calls ``on_silence`` once when no answers come."""

    def __init__(
        self,
        url: str,
        *,
        keys: FeedKeys,
        rank: int,
        silence_s: float = SILENCE_S,
        on_silence: Callable[[str], None] = end_this_process,
    ) -> None:
        self._url, self._keys, self._rank, self._silence_s, self._on_silence = url, keys, rank, silence_s, on_silence
        self.answered_s = time.monotonic()
        """Time of the last answer, or of the start."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats to the feeder", daemon=True)

    def __enter__(self) -> Self:
        self.answered_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 8)  # of a feeder that is away for long, the newest heartbeats are enough
            socket.setsockopt(zmq.IPV6, int("[" in self._url))
            admit_by(socket, self._keys)
            socket.connect(self._url)
            while not self._ended.wait(BEAT_S):
                try:
                    socket.send(pack("alive", rank=self._rank), zmq.DONTWAIT)
                except zmq.Again:
                    log.debug("heartbeat unsent rank=%d", self._rank)
                while socket.poll(0):
                    socket.recv_multipart()
                    self.answered_s = time.monotonic()
                if time.monotonic() - self.answered_s > self._silence_s:
                    self._on_silence(f"feeder at {self._url}: no heartbeat for {self._silence_s:.0f} s")
                    return
