"""Processes of tests, forked from a *template*, which has imported torch, Megatron and our programs: a start takes no
seconds.

    pytest worker --asks--> template --forks twice--> program (child of the worker)
                                                         --asks--> its own template --> its children

A forked program is what an executed one would be: a child of the process that asked for it, leader of a session, with
the environment, directory, command line, standard streams and inherited descriptors that were asked for, and no others.
The kernel kills it when its parent ends. A program that may start others is forked with a template of its own, before
its first thread.

Requests and answers go over a socket pair, one at a time: a pickled ``Request`` with descriptors, then the process id.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    "tests.forked",
    "tests.receiver_app",
    "tests.integration.megatron_rank_process",
    "tests.integration.megatron_ranks",
    "tidemill.launch.cli.status",
    "tidemill.launch.cli.dead",
    "tidemill.launch.cli.servers",
    "tidemill.launch.cli.learner",
    "tidemill.launch.cli.up",
    "tidemill.launch.cli.worker",
    "tidemill.launch.cli.find_run",
    "tidemill.launch.cli.main",
    "tidemill.launch.checks.resume",
    "tidemill.launch.checks.run",
    "tidemill.launch.run.host",
    "tidemill.launch.run.learner_process",
    "tidemill.launch.run.up",
    "tidemill.launch.cli.archive",
    "tidemill.learner.feed.feeder",
    "tidemill.learner.feed.shard_reader",
    "tidemill.learner.ranks.rank",
    "tidemill.actors.actor.process",
    "tidemill.actors.serving.builtin.engine",
    "tidemill.actors.serving.engine_process",
    "tidemill.learner.backends.fsdp.backend",
    "tidemill.learner.backends.megatron.backend",
    "encodings.idna",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "numpy.ma",
    "torch.utils.serialization",
    "transformers.models.qwen3.modeling_qwen3",
    "uvloop",
]
"""Modules that the template imports when it starts: our programs, and the modules that they import on use."""
INHERITED = "FORKED_WITH_TEMPLATE"
"""Environment variable of a forked program: descriptor of the socket of its own template."""
_MAX_BYTES = 1 << 17
"""Size of the largest request, in bytes: one packet."""
_MAX_DESCRIPTORS = 16
_OUT_OF_THE_WAY = 512
"""Lowest number of a received descriptor, until it has the number that was asked for."""
COLLECT_AFTER = (10_000, 10, 10)
"""Thresholds of the garbage collector in workers and programs of tests: with Python's own (700), collections take a
tenth of the processor time of tests.
"""
ROOM = " " * 8192
"""Last argument of a template: room for the command lines of the programs."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program to be forked."""

    main: Callable[..., Any]
    """Its return value is the exit code, as with ``sys.exit``."""
    arguments: tuple[Any, ...]
    environment: Mapping[str, str]
    directory: str
    words: tuple[str, ...]
    """The command line that ``ps`` shows."""
    parents: bool
    """True if it may fork programs itself."""


class Template:
    """The asking end. Methods may be called from any thread."""

    def __init__(self, asking: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._asking, self._process, self._lock = asking, process, threading.Lock()

    def close(self) -> None:
        """End the template, if this process has started it."""
        self._asking.close()
        if self._process is not None:
            self._process.wait()

    def fork(
        self,
        main: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        directory: str,
        words: tuple[str, ...],
        parents: bool,
        session: bool,
    ) -> int:
        """Start ``main(*arguments)`` and return its process id; the caller waits for it. ``descriptors``: number there
        -> here.

        ``session``: it leads a session of its own; otherwise it is in that of the template.
        """
        request = Request(
            main=main, arguments=arguments, environment=environment, directory=directory, words=words, parents=parents
        )
        packet = pickle.dumps((session, tuple(descriptors), pickle.dumps(request)))
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the parent of the program ends at once; its next one is this process
            try:
                socket.send_fds(self._asking, [packet], list(descriptors.values()))
                answer = self._asking.recv(8)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the template has ended"
        return int.from_bytes(answer, "little")


_STARTING = threading.Lock()


def template() -> Template:
    """Return this process' template; the first call of a process that was not forked itself starts it, and waits for
    its imports.
    """
    with _STARTING:  # tests fork programs from several threads
        return _template()


def has_template() -> bool:
    """Return whether this process has a template already."""
    return bool(_template.cache_info().currsize)


@functools.cache
def _template() -> Template:
    if INHERITED in os.environ:
        return Template(socket.socket(fileno=int(os.environ[INHERITED])))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.template", str(theirs.fileno()), str(os.getpid()), ROOM]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    assert ours.recv(1), "the template did not start"
    return Template(ours, process)


def _serve(asked: socket.socket, owner: int) -> Request | None:
    """Fork the requested programs until the owner has ended. Returns the request in each program, and None in the
    template.
    """
    while True:
        packet, received, _, _ = socket.recv_fds(asked, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not packet:
            return None
        between = os.fork()
        if between:
            for descriptor in received:
                os.close(descriptor)
            os.waitpid(between, 0)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        end_with(owner)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        session, numbers, request = pickle.loads(packet)
        if session:
            os.setsid()
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for descriptor in received]
        asked.send(os.getpid().to_bytes(8, "little"))
        asked.detach()
        os.closerange(3, _OUT_OF_THE_WAY)
        for number, descriptor in zip(numbers, moved, strict=True):
            os.dup2(descriptor, number, inheritable=True)
            os.close(descriptor)
        found: Request = pickle.loads(request)
        return found


def _run(request: Request) -> Any:
    """Be the program: in its environment and directory, under its command line."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ.pop(INHERITED, None)
    if request.parents:
        inherit_template()
    _template.cache_clear()
    show_as(request.words)
    os.chdir(request.directory)
    path = [word for word in request.environment.get("PYTHONPATH", "").split(os.pathsep) if word]
    sys.path[:] = [request.directory, *path, *(entry for entry in sys.path[1:] if entry not in path)]
    if request.environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    return request.main(*request.arguments)


def fork_own() -> None:
    """Fork a template of this process, a child of it, while it has no threads; the environment does not name it."""
    inherit_template()
    template()
    del os.environ[INHERITED]


def inherit_template() -> None:
    """Fork this program's own template, a child of it, while it has no threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    if os.fork():
        theirs.close()
        os.environ[INHERITED] = str(ours.detach())
        return
    ours.close()
    show_as(("template",))
    for stream in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    _be_template(theirs, owner)


def _be_template(asked: socket.socket, owner: int) -> None:
    """Serve until the owner has closed its end of the socket, as it does when it is killed, and end the process.

    In each program that is forked, run it and end the process. The template does not end with its parent: for the
    kernel that is the thread that started it, and the thread of an executor ends with its event loop.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner
    request = _serve(asked, owner)
    if request is None:
        os._exit(0)
    end(lambda: _run(request))


def end(main: Callable[[], Any]) -> NoReturn:
    """Run ``main`` and end the process as the interpreter does, but for freeing every object: that would copy all pages
    of the template.
    """
    code: Any = 1
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def show_as(words: tuple[str, ...]) -> None:
    """Write the command line that ``ps`` and psutil show. Source: Linux, Documentation/filesystems/proc.rst (arg_start,
    arg_end).
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49, counted from 1 with two before the bracket
    text = b"\0".join(word.encode() for word in words)[: end - start - 1]
    with suppress(ValueError):
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


_LIBC = ctypes.CDLL(None)


def _be_in_huge_pages() -> None:
    """Put this process' own memory into huge pages, where the kernel can: a fork copies 512 times fewer entries of its
    page table.

    Source: Linux, madvise(2), MADV_COLLAPSE (since 6.1; where it fails, pages stay as they are).
    """
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *name = mapping.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in place.split("-"))
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def preload(more: Sequence[str] = ()) -> None:
    """Import the modules of programs, and ``more``, into memory that is cheap to fork."""
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not there
        for module in (*PRELOADED, *more):
            importlib.import_module(module)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        # torch's take back its operators, at the end of each program: 9,000 of the template's pages were
        # copied
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()
    _be_in_huge_pages()


def _main(descriptor: str, owner: str) -> None:
    preload()
    asked = socket.socket(fileno=int(descriptor))
    asked.send(b"1")
    _be_template(asked, int(owner))


if __name__ == "__main__":
    from tests.template import _main as main  # pickled requests name this module by its own name

    main(*sys.argv[1:3])
