"""The directory of a run or a host: one process works in it; readers of a run that is over make way for it; and
commands on the same machine ask its bus process for work, by a file with the request and a file with the answer.

command: <verb>-request --> bus process: looks every 0.2 s, removes it, works, writes <verb>-answer --> command
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tidemill.bus.errors import ServerFailed
from tidemill.bus.server.nats_server import end_reader
from tidemill.bus.system.files import write_whole
from tidemill.launch.settings.run_config import CONFIG_FILE

LOCK_FILE = ".lock"  # File in the run's directory: locked by the one `up` that works in it, and holding its process id
_LOOK_S = 0.1


class CannotBegin(ValueError):
    """The run's directory, or the state of its bus, does not fit the command."""


class HostExists(ValueError):
    """Another host of this name is alive: two would run twice the desired numbers."""


@contextlib.contextmanager
def directory_of_one(root: Path, *, resume: bool, fresh: bool) -> Iterator[None]:
    """Lock the run's directory while entered. Raises CannotBegin with the cure; a running run is never changed."""
    has_run = (root / CONFIG_FILE).exists()
    ours = has_run or (root / LOCK_FILE).exists()
    if resume and not has_run:
        raise CannotBegin(f"--resume: want a run in {root}, there is none")
    if fresh and not ours and root.exists() and any(root.iterdir()):
        why = f"is not empty and was not made by tidemill (no {CONFIG_FILE})"
        raise CannotBegin(f"--fresh: {root} {why}; remove it yourself")
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK_FILE).open("a+") as lock:
        cure = "end it first, or set another directory"
        _lock(lock, lambda holder: CannotBegin(f"{root}: `tidemill up` (process {holder}) is running in it; {cure}"))
        if has_run and not resume and not fresh:
            cure = "resume it (--resume), delete it (--fresh), or set another directory"
            raise CannotBegin(f"{root}: contains a run already; {cure}")
        _end_look(root)
        if fresh:
            _clear(root)
        yield


def _lock(lock: IO[str], refusal: Callable[[str], ValueError]) -> None:
    """Take the lock, or raise ``refusal`` of the process that has it.

    The kernel releases it when this process ends, however it ends; children do not inherit it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise refusal(lock.read().strip() or "unknown") from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _end_look(root: Path) -> None:
    """End a command that has the store of the run open while it is over. Raises CannotBegin."""
    try:
        for directory in (root / "bus", *(root / "bus").glob("n[0-9]")):
            end_reader(directory)
    except ServerFailed as error:
        raise CannotBegin(str(error)) from None


def _clear(root: Path) -> None:
    """Remove everything but the lock; the configuration goes last, because it marks the directory as a run's."""
    paths = sorted(root.iterdir(), key=lambda path: path.name == CONFIG_FILE)
    for path in paths:
        if path.name == LOCK_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def only_one(directory: Path, name: str) -> Iterator[None]:
    """Lock the directory of a host against other hosts on this machine while entered. Raises HostExists."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("a+") as lock:
        _lock(lock, lambda holder: HostExists(f"--name: host {name} is running in {directory} (process {holder})"))
        yield


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
