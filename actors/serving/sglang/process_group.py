"""Runs a command in a process group of its own and kills the whole group when the starter has ended, in whatever way.

``python -m tidemill.actors.serving.sglang.process_group COMMAND...`` with a pipe as standard input that the starter
holds open. SGLang's scheduler and detokenizer outlive a killed server and would keep the GPU's memory, because no
signal reaches them when the starter dies. The server in turn outlives them for a minute and more without answering, so
the end of one process is the end of all. Standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

PART = b"sglang::"
"""Prefix of the names of SGLang's essential processes; others start and end at any time."""
SCAN_MS = 500
"""Milliseconds between two looks for new parts of the server."""
SIGTERM_S = 1.0
"""Seconds to wait for this process's own SIGTERM when a part is gone: when all are stopped, a part may end first."""


def main(command: list[str]) -> int:
    """Run the command. Returns its exit code (128 + signal, as a shell does)."""
    ending = threading.Event()
    # Outlived: the server ends by it, and this process after the server.
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )
    threading.Thread(target=_kill_at_eof, daemon=True).start()
    threading.Thread(target=_kill_without_part, args=(server, ending), daemon=True).start()
    code = server.wait()
    _note(f"the server ended with code {code}")
    _kill_others()
    return 128 - code if code < 0 else code


def _note(text: str) -> None:
    """Write a line to standard error, a log whose disk may be full."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


def _kill_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _kill_without_part(server: "subprocess.Popen[bytes]", ending: threading.Event) -> None:
    """Wait until a part of the server is gone, and end the server unless it is ending anyway.

    A process with the name of its parent is no part: it is a command that a part runs, before it has a name of its own
    (the scheduler runs lscpu).
    """
    parts: dict[int, str] = {}
    ends = select.poll()
    part_pids: set[int] = set()
    while True:
        for pid in _session():
            with contextlib.suppress(OSError):
                if pid not in part_pids and (name := _name(pid)).startswith(PART) and name != _name(_parent(pid)):
                    part_pids.add(pid)
                    end = os.pidfd_open(pid)
                    parts[end] = f"{name.decode(errors='replace')} ({pid})"
                    ends.register(end, select.POLLIN)
        gone = ends.poll(SCAN_MS)
        if ending.is_set() or (gone and ending.wait(SIGTERM_S)):
            return
        if gone:
            _note(f"{parts[gone[0][0]]} has ended, so the server is ended")
            server.kill()
            return


def _kill_others() -> None:
    """Kill all processes of this session but this one, which has an exit code to pass on."""
    for pid in _session():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _session() -> list[int]:
    """Return the ids of the other processes of this process group."""
    children = []
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == os.getpgrp():
                children.append(pid)
    return children


def _name(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
