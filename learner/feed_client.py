"""The rank's end of the feed: synchronous, and every wait has a bound. Knows ZMQ and the feed's messages; no torch, no bus.

The feeder answers a waiting rank every second with what it waits for, so a slow batch and a dead feeder look different:
silence, not duration, is the error.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import zmq

from bus.exit_codes import CRASHED
from learner.batch import StepBatch, decode
from learner.errors import FeederFailed, FeederLost, FeedError
from learner.feed_gate import admit_by
from learner.feed_keys import FeedKeys
from learner.feed_messages import End, Start, pack, unpack


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
        silence_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """``keys``: of this start. ``silence_s``: the feeder is lost when nothing comes from it for so long.

        ``on_wait`` is called every second of a wait with what it is for.
        """
        self._url, self._rank, self._dp_rank, self._dp_size = url, rank, dp_rank, dp_size
        self._silence_s, self._on_wait, self._last_words = silence_s, on_wait, ""
        self._greeted = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2_000)
        admit_by(self._socket, keys)
        self._socket.connect(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye, send what is still queued (up to 2 s) and let go of the socket. A second time does nothing."""
        if self._socket.closed:
            return
        if self._greeted:
            self._send("bye")
        self._socket.close()
        self._context.term()

    def hello(self) -> Start:
        """Announce this rank; the feeder answers when it has restored its state.

        Raises FeederLost (silent, or not there), FeederFailed (it refuses this rank or has failed), FeedError.
        """
        self._greeted = True
        self._send("hello", rank=self._rank, dp_rank=self._dp_rank, dp_size=self._dp_size)
        header, _ = self._receive("start", wanted=("start",))
        return Start(**{key: value for key, value in header.items() if key != "type"})

    def next(self, step: int) -> StepBatch | End:
        """The batch of ``step`` for this data-parallel rank, or the end of the run. Same errors as ``hello``."""
        self._send("next", step=step, dp_rank=self._dp_rank)
        header, frames = self._receive(f"batch {step}", wanted=("batch", "end"))
        if header["type"] == "end":
            return End()
        batch = decode(header, frames)
        if (batch.step, batch.dp_rank) != (step, self._dp_rank):
            raise FeedError(self._url, f"batch {step} for dp rank {self._dp_rank}", (batch.step, batch.dp_rank))
        return batch

    def done(self, step: int, metrics: dict[str, float], weights_digest: str | None = None) -> None:
        """Step ``step`` has been taken (rank 0 only). Numbers only; does not wait."""
        self._send("done", step=step, metrics={key: float(value) for key, value in metrics.items()}, weights_digest=weights_digest)

    def published(self, version: int, step: int) -> None:
        """``version``, the weights of ``step``, is the head (rank 0 only, after the registry says so); does not wait."""
        self._send("published", version=version, step=step)

    def checkpointed(self, step: int, directory: str) -> None:
        """The checkpoint of ``step`` is whole in ``directory`` (rank 0 only, after ``checkpoints.commit``); does not wait."""
        self._send("checkpointed", step=step, directory=str(directory))

    def failed(self, reason: str, exit_code: int = CRASHED) -> None:
        """This rank cannot go on: the feeder ends with ``reason`` and ``exit_code``; does not wait."""
        self._send("failed", rank=self._rank, reason=reason, exit_code=exit_code)
        self._greeted = False

    def _send(self, kind: str, **values: Any) -> None:
        self._socket.send(pack(kind, **values))

    def _receive(self, asked_for: str, *, wanted: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
        """The next message that is not a ``wait``."""
        while True:
            began = time.monotonic()
            if not self._socket.poll(int(self._silence_s * 1000)):
                self._give_up()
                raise FeederLost(self._url, time.monotonic() - began, asked_for, self._last_words)
            first, *rest = self._socket.recv_multipart(copy=False)
            header = unpack(first.buffer, where=self._url)
            if header["type"] == "wait":
                self._heard(str(header.get("waits_for", "")))
            elif header["type"] == "error":
                self._give_up()
                raise FeederFailed(self._url, str(header.get("reason", "")), int(header.get("exit_code", CRASHED)))
            elif header["type"] in wanted:
                return header, [frame.buffer for frame in rest]
            else:
                raise FeedError(self._url, f"one of {list(wanted)}", header["type"])

    def _give_up(self) -> None:
        """Nobody is there any more: no goodbye, and nothing to wait for at the end."""
        self._greeted = False
        self._socket.setsockopt(zmq.LINGER, 0)

    def _heard(self, waits_for: str) -> None:
        self._last_words = waits_for
        if self._on_wait is not None:
            self._on_wait(waits_for)
