"""Runs a command in a session of its own and kills all of it when the one who started this is gone, however it went.

``python -m actors.sglang.keeper COMMAND...`` with standard input a pipe that the starter holds open. SGLang's scheduler and detokenizer
outlive a killed server and would keep the GPU's memory; no signal at the starter's death reaches them. Standard library only.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command; its exit code (128 + signal, as a shell says it)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ours to outlive: the server is asked to end, this one follows
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    threading.Thread(target=_kill_at_eof, daemon=True).start()
    code = server.wait()
    print(f"the server ended with code {code}", file=sys.stderr, flush=True)
    _kill_others()
    return 128 - code if code < 0 else code


def _kill_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _kill_others() -> None:
    """All of this session but the keeper, which has an exit code to pass on."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
        try:
            if os.getpgid(pid) == os.getpgrp():
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
