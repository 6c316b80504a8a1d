"""Threads of plain functions, one for each call: unlike in a pool of threads, a call that hangs delays no other."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_HUNG = 32
"""Calls that may hang in a process by default: their threads' stacks are 256 MB, of a child's 4 GB."""


class ProcessUnusable(Exception):
    """This process can run no more episodes: its actor, which knows the class by its name, starts another one."""


class CallThreads:
    """The calls of plain functions of one process."""

    def __init__(self, most_hung: int = MAX_HUNG) -> None:
        self._most_hung = most_hung
        self.hung = 0
        """Calls that were given up and still run."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the function's result. When cancelled, the call goes on in its thread, and is hung until it ends."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(value: Any, error: BaseException | None) -> None:
            if done.done():
                self.hung -= 1
            elif error is None:
                done.set_result(value)
            else:
                done.set_exception(RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(function, *args, **kwargs)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed, and the process ends
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, daemon=True, name=f"call of {getattr(function, '__name__', function)}").start()
        try:
            return await done
        except asyncio.CancelledError:
            self.hung += done.cancelled()  # else the call ended in the instant of the cancellation
            raise

    def given_up(self, name: str, seconds: float) -> None:
        """Report a call that was given up after so many seconds. Raises ProcessUnusable when more hang than may."""
        report(f"tool {name!r}: no result within {seconds:g} s; calls that hang in this process: {self.hung}")
        if self.hung > self._most_hung:
            raise ProcessUnusable(
                f"want at most {self._most_hung} calls of tools that hang in a process "
                f"(options.max_hung_calls), got {self.hung}, "
                f"the last of tool {name!r}: no result within {seconds:g} s"
            )


def report(text: str) -> None:
    """Send a hung call to the actor, for its log and its status row, where this process is a child of one."""
    module = sys.modules.get("tidemill_rollout")
    if module is not None:
        module.report_hung(text)
