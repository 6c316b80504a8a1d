"""Pipe with a byte for every step of a rank: its parent knows that the rank makes progress, without the bus."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def note_step(descriptor: int) -> None:
    """Write a byte into the pipe, if there is one (>= 0); never block on it."""
    if descriptor >= 0:
        with suppress(BlockingIOError, BrokenPipeError):  # full: the parent has not read for thousands of steps; broken: it has ended
            os.write(descriptor, b".")


@contextmanager
def steps_noted(on_step: Callable[[], None] | None) -> Iterator[int]:
    """Yield the writing end of a pipe for children; bytes in it call ``on_step``; -1 without it. It is open while entered."""
    if on_step is None:
        yield -1
        return
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()

    def read() -> None:
        """Take the bytes out of the pipe."""
        if os.read(reading, 4096):
            on_step()

    try:
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        loop.add_reader(reading, read)
        yield writing
    finally:
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)
