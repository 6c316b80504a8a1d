"""Exit codes of processes, and the last line a process writes about the error that ended it: its parent repeats that line.

An error class names its code in an attribute ``exit_code``; without one it is CRASHED. Knows no process and no error class.
"""

import logging
import signal
import sys
from collections.abc import Callable, Iterable

DONE, CRASHED, WRONG_USE, NOT_IN_TIME = 0, 1, 2, 75
TAKEN_OVER = 76
"""Another learner has taken over the run: two supervisors would fence each other's learners for ever."""
CONFIG = 78
"""Settings or data that no restart can cure (EX_CONFIG of sysexits.h)."""
FINAL = frozenset({WRONG_USE, TAKEN_OVER, CONFIG})
"""A process that ends with one of these is not started again."""
LINE = "error: "
"""Prefix of the last line of a process that ends by an error; the message follows."""


def of(error: BaseException) -> int:
    """Return the exit code of a process that ends by ``error``."""
    return int(getattr(error, "exit_code", CRASHED))


def message(error: BaseException) -> str:
    """Return the first line of the error's message, with its type unless the error names an exit code (then it is one of ours)."""
    text = (str(error).splitlines() or [""])[0]
    name = type(error).__name__
    return text if hasattr(error, "exit_code") and text else f"{name}: {text}" if text else name


def report(error: BaseException, log: logging.Logger) -> int:
    """Write the last line of a process that ends by ``error`` to stderr; return its exit code.

    The traceback goes to ``log`` before, except for errors that the user has to correct: their message is sufficient.
    """
    code = of(error)
    if code not in FINAL:
        log.error("crashed", exc_info=error)
    sys.stderr.write(f"{LINE}{message(error)}\n")
    return code


def run(work: Callable[[], None], log: logging.Logger) -> int:
    """Run the work of a process. Returns its exit code; the error that ends it is reported."""
    try:
        work()
    except Exception as error:
        return report(error, log)
    return DONE


def reason(lines: Iterable[str]) -> str:
    """Return the message of the last line written by ``report``; empty when there is none."""
    found = ""
    for line in lines:
        if line.startswith(LINE):
            found = line.removeprefix(LINE).rstrip()
    return found


def how(code: int) -> str:
    """Return a description of the end of a process with this exit code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"
