"""Liveness of a rank and the feeder of several nodes, over a connection and a thread of their own: also while the rank
is in a collective.

gloo and NCCL cannot distinguish a slow peer from one that is gone, and a cut network gives no error for many minutes.
So the rank sends a heartbeat every second, which the feeder answers. Either ends when it has not received one for
``silence_s``; then all end.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq

from tidemill.bus import exit_codes
from tidemill.learner.feed.feed_gate import admit_by
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feed_messages import pack

log = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 50.0
"""Seconds without a heartbeat, by default: so that all end within a minute of the last one."""


def end_this_process(reason: str) -> None:
    """End this process although its main thread may never return from a collective; ``reason`` is its last line, for
    its parent.
    """
    exit_codes.write_reason(reason)
    os.kill(os.getpid(), signal.SIGKILL)


class Heartbeats:
    """Context manager: while entered, a thread sends this rank's heartbeats, and calls ``on_silence`` once when no
    answers come.
    """

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
        self._heard_s = time.monotonic()
        """Time of the last answer, or of the start."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats to the feeder", daemon=True)

    def __enter__(self) -> Self:
        self._heard_s = time.monotonic()
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
                    self._heard_s = time.monotonic()
                if time.monotonic() - self._heard_s > self._silence_s:
                    self._on_silence(f"feeder at {self._url}: no heartbeat for {self._silence_s:.0f} s")
                    return
