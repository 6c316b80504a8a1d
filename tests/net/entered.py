"""Our programs in the namespaces of a lab's machine, forked from the test's template (``tests.template``): a start
imports nothing.

    template --forks--> entering process: enters --forks--> program of the machine --forks--> its own template

The program is the one child of the process that has entered, as under nsenter, and that process ends as it does.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.examples import THOROUGH
from tests.forked import CHILDLESS, Forked, run_module
from tests.template import inherit_template, show_as

_NAMESPACES = ("net", "uts", "mnt", "pid")
_LIBC = ctypes.CDLL(None, use_errno=True)
_OURS = (sys.executable, "-m", "tidemill")


class Entered(Forked):
    """The process that has entered, with the verbs of ``subprocess.Popen`` that ``tests.net.lab`` needs."""

    def __init__(self, init: int, words: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> None:
        """``init``: a process in the namespaces. ``words``: those behind ``python -m tidemill``."""
        super().__init__(_enter, (init, str(cwd), tuple(words)), environment, log)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            return super().wait(timeout_s)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired("a program of a machine", timeout_s or 0.0) from error


def forked_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words behind ``python -m tidemill`` if the command is to be forked, else none of them. `make
    test-net-all` executes all commands.
    """
    return tuple(command[3:]) if tuple(command[:3]) == _OURS and not THOROUGH else ()


def _enter(init: int, directory: str, words: tuple[str, ...]) -> int:
    """Run the program in the namespaces of a process. Returns its exit code, and ends by the signal that ended it."""
    for namespace in [os.open(f"/proc/{init}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]:
        if _LIBC.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"setns: {_NAMESPACES} of process {init}")
        os.close(namespace)
    os.chdir(directory)  # the mounts of the machine have a root of their own
    program = os.fork()  # the ids of a process are those of the namespace in which it is made
    if not program:
        if words[0] not in CHILDLESS:
            inherit_template()
        show_as((*_OURS, *words))
        run_module("tidemill", words)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
