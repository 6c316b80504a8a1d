"""Run a command and stop its descendants at random, each for a moment: ``python tests/late/freezer.py COMMAND ...``;
``make test-frozen``.

A test that fails then has relied on the speed of a process, as it may on a machine that is busy. About four processes
stand still at any time. Processes that a test has stopped itself are left alone.
"""

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

STANDSTILL_S = (0.3, 2.5)
"""Shortest and longest time for which a process is stopped."""
EVERY_S = 0.35
"""Mean time between two stops."""
_LOOK_S = 0.05
STOP_WITH_CHILD = ("nsenter", "unshare")


def freeze(root: psutil.Process) -> None:
    """Stop descendants of ``root`` until it has ended."""
    stopped: dict[psutil.Process, float] = {}
    try:
        while root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
            now = time.monotonic()
            for process in [each for each, until_s in stopped.items() if until_s <= now]:
                _send(process, signal.SIGCONT)
                del stopped[process]
            with suppress(psutil.Error):
                free = [each for each in root.children(recursive=True) if each not in stopped]
                if free and random.random() < _LOOK_S / EVERY_S and _may_stop(chosen := random.choice(free)):
                    _send(chosen, signal.SIGSTOP)
                    stopped[chosen] = now + random.uniform(*STANDSTILL_S)
            time.sleep(_LOOK_S)
    finally:
        for process in stopped:
            _send(process, signal.SIGCONT)


def _may_stop(process: psutil.Process) -> bool:
    """Return False for one that stands still already, and for a child of a program that stops itself with its child,
    and stays so.
    """
    parent = process.parent()
    return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and (
        parent is None or parent.name() not in STOP_WITH_CHILD
    )


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)


def main() -> int:
    command = subprocess.Popen(sys.argv[1:])
    with suppress(KeyboardInterrupt):
        freeze(psutil.Process(command.pid))
    return command.wait()


if __name__ == "__main__":
    sys.exit(main())
