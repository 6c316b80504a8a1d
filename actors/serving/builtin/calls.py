"""Calls of the decoding thread: functions that other threads queue, and that it runs between two of its steps."""

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tidemill.actors.serving.port import Result
from tidemill.bus.system.functions import settle

Call = tuple[Callable[[], Any], "Future[Any]"]


class CallQueue(queue.SimpleQueue[Call]):
    """Queue from any thread to the one that runs the calls."""

    is_closed = False

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Queue a function. Returns the future of its result, which is cancelled if the queue is closed."""
        future: Future[Result] = Future()
        self.put((function, future))
        if self.is_closed:  # looked at after the put: a close in between may have missed this call
            self.close()
        return future

    def close(self) -> None:
        """Cancel the calls that are queued, and all later ones."""
        self.is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self.get_nowait()[1].cancel()


def run(call: Call) -> None:
    """Run a call, unless it was cancelled, and set its result."""
    function, future = call
    if future.set_running_or_notify_cancel():
        settle(future, function)
