"""Exit codes of processes, and the last line of one that an error ended, which its parent repeats.

The line goes to stderr, and into a file in memory (``ReasonFile``): on a full disk a log has no room for it. An error
class names its code in an attribute ``exit_code``; without one it is CRASHED.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable

DONE, CRASHED, WRONG_USE, NOT_IN_TIME = 0, 1, 2, 75
TAKEN_OVER = 76  # Another learner has taken over the run: two supervisors would fence each other's learners for ever
CONFIG = 78  # Settings or data that no restart can cure (EX_CONFIG of sysexits.h)
FINAL = frozenset({WRONG_USE, TAKEN_OVER, CONFIG})
LINE = "error: "  # Prefix of the last line of a process that ends by an error; the message follows


def of(error: BaseException) -> int:
    return int(getattr(error, "exit_code", CRASHED))


def message(error: BaseException) -> str:
    """Return the first line of the error's message, with its type unless the error names an exit code."""
    text = (str(error).splitlines() or [""])[0]
    name = type(error).__name__
    return text if hasattr(error, "exit_code") and text else f"{name}: {text}" if text else name


def report(error: BaseException, log: logging.Logger) -> int:
    """Write the last line of a process that ends by ``error`` to stderr; return its exit code.

    The traceback goes to ``log`` before, except for errors that the user has to correct.
    """
    code = of(error)
    if code not in FINAL:
        log.error("crashed", exc_info=error)
    write_reason(message(error))
    return code


def write_reason(text: str) -> None:
    """Write the last line of a process that ends to stderr and into its parent's ReasonFile, if there is one."""
    line = f"{LINE}{text}\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _file_name(os.getppid()) in os.readlink(f"/proc/self/fd/{descriptor}"):
                    os.write(int(descriptor), line.encode(errors="replace"))


class ReasonFile:
    """A file in memory that a child inherits and writes its last line into. Outside of Linux it stays empty."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(_file_name(os.getpid())) if hasattr(os, "memfd_create") else -1

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that the child inherits: one, or none without such files."""
        return (self.descriptor,) if self.descriptor >= 0 else ()

    def read(self) -> str:
        """Return the message of the last line; empty when there is none."""
        if self.descriptor < 0:
            return ""
        size = os.fstat(self.descriptor).st_size
        return reason(os.pread(self.descriptor, size, 0).decode(errors="replace").splitlines())

    def close(self) -> None:
        """Free the file, once the child has ended."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def _file_name(parent: int) -> str:
    """Return the name of ``parent``'s files: a process writes into none that it made for its own children."""
    return f"tidemill-reason-for-{parent}-"


def run(work: Callable[[], None], log: logging.Logger) -> int:
    """Run the work of a process. Returns its exit code; the error that ends it is reported."""
    try:
        work()
    except Exception as error:
        return report(error, log)
    return DONE


def reason(lines: Iterable[str]) -> str:
    """Return the message of the last line written by ``report``; empty when there is none."""
    text = ""
    for line in lines:
        if line.startswith(LINE):
            text = line.removeprefix(LINE).rstrip()
    return text


def how(code: int) -> str:
    """Return a description of the end of a process with this exit code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
