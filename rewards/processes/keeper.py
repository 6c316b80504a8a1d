"""The parent of a reward's workers: imports the reward once, forks a worker when the actor asks for one, and ends whole
process trees.

::

    actor --control--> keeper --fork--> worker, worker, ...        requests and results: actor <-> worker directly
                          <-- status of each worker that ended

Workers are forked while this process has one thread; if the import of the reward has started threads, each worker is a
new interpreter. A worker and its descendants are found by the parent of each process: worker and keeper are subreapers,
so a process that has left its session or lost its parent is still below one of them.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys

from tidemill.bus.system import limits
from tidemill.bus.system.output import lossy_standard_files
from tidemill.bus.system.processes import die_with_parent
from tidemill.bus.wire.json_object import JsonObject
from tidemill.rewards.errors import BadRewardOption, UnknownReward
from tidemill.rewards.port import contract_at
from tidemill.rewards.processes import worker
from tidemill.rewards.registry import Bound, bind

# Program of a new interpreter: it finds modules where its parent does, without PYTHONPATH, which is inherited further.
#
# Its arguments are the descriptor of its socket, that path, and the module with its ``main``. Settings are on stdin:
# all users of a machine can read a command line.
BOOT = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[3]).main()"
MAX_REASON = 10_000  # Characters of a refusal, which must fit into one packet


def command(module: str, descriptor: int) -> list[str]:
    """Return the command of a new interpreter that runs ``main`` of a module."""
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-P", "-c", BOOT, str(descriptor), json.dumps(path), module]


def settings_file(settings: object) -> int:
    """Return a descriptor from which a new interpreter reads its settings."""
    descriptor = os.memfd_create("settings", os.MFD_CLOEXEC)
    os.write(descriptor, json.dumps(settings).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def main() -> None:
    """Run the keeper until the actor closes the control socket; its settings are on stdin."""
    die_with_parent(os.getppid())()
    control, start = socket.socket(fileno=int(sys.argv[1])), json.load(sys.stdin)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    lossy_standard_files()  # a function that prints must not fail because the log's disk is full
    limits.become_subreaper()
    try:
        function = bind(start["name"], start["options"], contract_at(start["contract"]))
    except (UnknownReward, BadRewardOption) as error:
        refused = "BadRewardOption" if isinstance(error, BadRewardOption) else "UnknownReward"
        _send(control, {"refused": refused, "arguments": [str(value)[:MAX_REASON] for value in error.args]})
        return
    except BaseException as error:  # the module is the user's, and may raise anything while it is imported
        arguments = [start["name"], f"while imported: {error!r}"[:MAX_REASON], start["word"]]
        _send(control, {"refused": "UnknownReward", "arguments": arguments})
        return
    forks = len(os.listdir("/proc/self/task")) == 1
    keeper = _ForkServer(control, function, start, forks=forks)
    limits.outlive_parent()  # from here on the end of the control socket ends it, after its workers
    _send(control, {"ready": True, "async": function.is_async, "forks": forks})
    keeper.run()


def _send(control: socket.socket, message: JsonObject) -> None:
    with contextlib.suppress(OSError):  # the actor has gone
        control.send(json.dumps(message).encode())


class _ForkServer:
    def __init__(self, control: socket.socket, function: Bound, start: JsonObject, *, forks: bool) -> None:
        self._control, self._function, self._start, self._forks = control, function, start, forks
        self._limits = limits.ProcessLimits(**start["limits"])
        self._workers: dict[int, int] = {}  # Number of each worker, by process id
        # Servers that the module has started at its import belong to the reward.
        self._servers = limits.children_of({os.getpid()})
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # the actor drains first, and needs its rewards for that
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()

    def run(self) -> None:
        """Serve the actor until the control socket ends; then end everything below this process."""
        # Not select.select: the control socket has the number that it has in the actor, which may be above 1023.
        poll = select.poll()
        for end in (self._control, self._woken):
            poll.register(end, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                    self._reap()
                if self._control.fileno() in ready and not self._receive():
                    return
        finally:
            for pid in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            limits.end_strays(set)

    def _receive(self) -> bool:
        """Execute one command; False at the end of the socket."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        if not packet:
            return False
        message = json.loads(packet)
        if "fork" in message:
            self._add_worker(message["fork"], descriptors[0])
        else:
            for pid in [pid for pid, number in self._workers.items() if number == message["kill"]]:
                os.kill(pid, signal.SIGKILL)
                self._report_end(pid, os.waitpid(pid, 0)[1])
        return True

    def _add_worker(self, number: int, descriptor: int) -> None:
        try:
            pid = self._fork(descriptor) if self._forks else self._start_interpreter(descriptor)
        except OSError as error:
            _send(self._control, {"ended": number, "reason": f"no process could be started: {error}"})
            return
        finally:
            os.close(descriptor)
        self._workers[pid] = number

    def _fork(self, descriptor: int) -> int:
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for end in (self._control, self._waker, self._woken):
                end.close()
            worker.serve(socket.socket(fileno=descriptor), self._function, self._limits, keeper)
            code = 0
        finally:
            os._exit(code)  # nothing of the keeper's may run in its copy, exit handlers of the user's module neither

    def _start_interpreter(self, descriptor: int) -> int:
        settings = settings_file(self._start)
        try:
            return subprocess.Popen(
                command(worker.__name__, descriptor), stdin=settings, pass_fds=(descriptor,), start_new_session=True
            ).pid
        finally:
            os.close(settings)

    def _reap(self) -> None:
        for pid in list(self._workers):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                self._report_end(pid, status)

    def _report_end(self, pid: int, status: int) -> None:
        number = self._workers.pop(pid)
        num_strays = limits.end_strays(lambda: self._servers | self._workers.keys())
        code = os.waitstatus_to_exitcode(status)
        end = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        _send(self._control, {"ended": number, "reason": f"its process {end}", "left": num_strays})
