"""Requests of commands to the bus process on the same machine: a file in its directory, and a file with the answer.

command: <verb>-request --> bus process: looks every 0.2 s, removes it, works, writes <verb>-answer --> command
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from tidemill.bus.errors import ServerFailed
from tidemill.bus.system.files import write_whole

_LOOK_S = 0.1


class RequestRefused(ValueError):
    """The bus process cannot do what is asked for, or has not answered."""


class BusRequest:
    """One kind of request to the bus in a directory."""

    def __init__(self, directory: Path, verb: str) -> None:
        self.verb = verb
        self._request, self._answer = directory / f"{verb}-request", directory / f"{verb}-answer"

    def ask(self, text: str, *, wait_s: float) -> None:
        """Return when the bus has done it. Blocks. Raises RequestRefused with the reason when it has not."""
        self._answer.unlink(missing_ok=True)
        write_whole(self._request, text)
        deadline = time.monotonic() + wait_s
        try:
            while not self._answer.exists():
                if time.monotonic() > deadline:
                    state = "not done"
                    if self._request.exists():
                        state = f"not begun: want a bus that runs with the directory {self._request.parent}"
                    text = f"{self.verb}: after {wait_s:g} s (--wait) it is {state}; see the log of the bus"
                    raise RequestRefused(text)
                time.sleep(_LOOK_S)
            if error := json.loads(self._answer.read_text())["error"]:
                raise RequestRefused(error)
        finally:
            self._request.unlink(missing_ok=True)

    @property
    def pending(self) -> bool:
        return self._request.exists()

    def answer(self, work: Callable[[str], None]) -> str:
        """Do ``work`` with the text of the request. Returns the reason for which it failed, else nothing. Blocks."""
        error = ""
        try:
            text = self._request.read_text()
            self._request.unlink()
            work(text)
        except (OSError, ValueError, ServerFailed) as failure:
            error = str(failure)
        with contextlib.suppress(OSError):  # on a full disk the command waits until its own limit
            write_whole(self._answer, json.dumps({"error": error}))
        return error
