"""The Ray actor that owns one process of a run, in the worker process of that actor. Knows nothing of Ray.

The process ends with its owner (the kernel kills it), and Ray starts an owner again whose worker or node has ended,
which starts the process again: it has the run's name on the bus, so it continues its work there.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.bus.system.files import write_whole
from tidemill.bus.system.processes import LAST_LINES, dying_with_parent, tail, without_proxy

LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process to start on a node."""

    name: str
    command: Sequence[str]
    log_file: Path
    environment: Mapping[str, str]
    config_file: Path
    """File of the run's configuration on the node, written before each start."""
    config_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a process."""

    code: int
    last_lines: str

    @property
    def reason(self) -> str:
        return exit_codes.reason(self.last_lines.splitlines())


class Owner:
    """Starts its process at once, also when Ray starts it again. Its methods are called one after the other.

    A process that could not be started counts as crashed: an error of ``__init__`` would end the Ray actor for ever.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._error = ""
        self._log_began = 0
        self.start()

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process, self._error = None, ""
        try:
            self._process = self._spawn()
        except OSError as error:
            self._error = f"{exit_codes.LINE}{self._program.name} could not be started: {error}"

    def _spawn(self) -> "subprocess.Popen[bytes]":
        program = self._program
        program.config_file.parent.mkdir(parents=True, exist_ok=True)
        program.log_file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(program.config_file, program.config_text)
        # The death signal comes from the thread that forks: Ray calls the methods of an actor in its main thread.
        command, preexec = dying_with_parent(program.command)
        with program.log_file.open("ab") as log:
            self._log_began = log.tell()
            return subprocess.Popen(
                command,
                env=without_proxy({**os.environ, **program.environment}),  # with the devices that Ray has chosen
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=preexec,
            )

    def pid(self) -> int:
        """Return the id of the process; 0 when it could not be started."""
        return self._process.pid if self._process is not None else 0

    def wait(self, within_s: float) -> Ended | None:
        """Wait for the end of the process; None when it runs longer."""
        if self._process is None:
            return Ended(code=exit_codes.CRASHED, last_lines=self._error)
        deadline = time.monotonic() + within_s
        while (code := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        if code is None:
            return None
        return Ended(code=code, last_lines="\n".join(tail(self._program.log_file, self._log_began)[-LAST_LINES:]))

    def stop(self, within_s: float) -> Ended | None:
        """Drain the process by SIGTERM, and kill it after ``within_s``. Returns its end; None if it never ran."""
        if self._process is None:
            return None
        self._process.terminate()
        if (ended := self.wait(within_s)) is None:
            self._process.kill()
            self._process.wait()
            ended = self.wait(0)
        return ended


def command_of(arguments: Sequence[str], program: str) -> list[str]:
    """Return the command of a process. ``program``: the ``tidemill`` of the nodes; empty = of this Python."""
    return [program, *arguments] if program else [sys.executable, "-P", "-m", "tidemill", *arguments]
