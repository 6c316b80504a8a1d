"""Pipe from ranks to their parent: a byte for every step, and one for a SIGTERM. The parent needs no bus to know of
either.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
