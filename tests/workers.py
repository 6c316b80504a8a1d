"""Workers of pytest-xdist, forked from one process that has imported torch, Megatron and our programs: these imports
happen once.

    pytest --starts--> nursery (imports)                       worker (child of the nursery)
                                                                  --forks first--> its template (tests.template)
    pytest --execnet--> interpreter --asks, with its streams--> nursery --forks--> worker

execnet starts a worker as ``INTERPRETER -u -c CODE`` and talks with it over its standard streams; ``python=`` of its
specification names the interpreter. Ours is this module as a script, which finds no module of ours: it hands its
streams, environment and directory to the nursery, and ends with the worker. A worker differs from an executed one in
modules that its tests may not need, and in that all workers of a run have one seed of hashes and begin with the same
state of numpy's generator.
"""

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = [
    "langdetect",
    "math_verify",
    "openai.types.responses",
    "pyarrow.parquet",
    "renderers.client",
    "tensorboardX",
]
"""Modules that the tests import when they are collected, beside those of a template."""
_MAX_BYTES = 1 << 17
_STREAMS = 3


def fork_workers(specs: Sequence[Any]) -> Callable[[], None]:
    """Put our interpreter into execnet's specifications of workers, and start the nursery. Returns the function that
    ends it.
    """
    from tests.template import ROOM, ROOT

    directory = tempfile.TemporaryDirectory(prefix="tidemill-workers-")
    path = f"{directory.name}/asked"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.bind(path)
        asked.listen()
        command = [sys.executable, "-m", "tests.workers", "nursery", str(asked.fileno()), ROOM]
        nursery = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[asked.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    for spec in specs:
        if spec.popen and not spec.python:  # another machine, or another interpreter, runs none of ours
            spec.python = shlex.join([sys.executable, "-I", "-S", __file__, path])

    def end() -> None:
        assert nursery.stdin is not None
        nursery.stdin.close()
        nursery.wait()
        directory.cleanup()

    return end


def ask(path: str) -> None:
    """Be the interpreter: have a worker forked, and wait for its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        nursery.connect(path)
        request = json.dumps([dict(os.environ), str(Path.cwd())]).encode("utf-8", "surrogateescape")
        if len(request) > _MAX_BYTES:
            sys.exit(f"tests.workers: want an environment of at most {_MAX_BYTES} bytes, got {len(request)}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with the worker, which gets these, too
        socket.send_fds(nursery, [request], range(_STREAMS))
        for stream in range(_STREAMS):  # the other end of a stream ends with the worker
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        with suppress(ConnectionError):
            nursery.recv(1)


def _serve(asked: socket.socket) -> None:
    """Fork workers until standard input ends."""
    from tests import template

    template.preload([module for module in IMPORTED if find_spec(module.partition(".")[0])])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with pytest
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    while asked in select.select([asked, sys.stdin], [], [])[0]:
        try:
            _answer(asked)
        except OSError:  # no memory, or no process left: this one worker is missing
            traceback.print_exc()


def _answer(asked: socket.socket) -> None:
    """Fork the worker that is asked for next."""
    from tests import template

    nursery, streams = os.getpid(), list[int]()
    asking, _ = asked.accept()
    try:
        packet, streams, _, _ = socket.recv_fds(asking, _MAX_BYTES, _STREAMS)
        if not os.fork():
            asked.close()
            asking.detach()  # open until the worker has ended
            template.end(lambda: _work(nursery, streams, *json.loads(packet)))
    finally:
        asking.close()
        for stream in streams:
            os.close(stream)


def _work(nursery: int, streams: Sequence[int], environment: dict[str, str], directory: str) -> None:
    """Be a worker."""
    from tests import template

    template.end_with(nursery)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number, inheritable=True)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    template.fork_own()
    template.show_as((sys.executable, "-m", "tests.workers", "worker"))
    sys.argv[:] = ["-c"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec("import sys; exec(eval(sys.stdin.readline()))", main.__dict__)  # execnet's own line


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        _serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1])
