"""The learner's end of a process group in a process of its own, which can be killed at any time: the end in the
learner.

    sender's thread                           process (``sender_child``)
    host, meet     --- msgpack over a pipe -> BroadcastGroup
    send (handles) -------------------------> maps the staging memory, broadcasts
                   <------ done, or lost ----
    late, or closed: SIGKILL

NCCL may end its process when a peer dies in a broadcast (its watchdog), or wait without end where nothing can interrupt
it. Here that costs the group: the push opens another one, with a new process, for the engines that are left. Each
process has a CUDA context of its own, about 0.5 GB, and two buckets.
"""

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self

import msgpack
from torch import Tensor

from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.transport.handles import StagingMemory

_log = logging.getLogger(__name__)

CHILD = f"{__package__}.sender_child"
START_S = 60.0
"""The process imports torch and makes a CUDA context before its first answer."""
GRACE_S = 1.0
"""A call has its own deadline in the process. Past it and this, the process is killed."""


class SenderProcess:
    """``GroupEnd`` in a child process, which ends with the thread that made it. Calls come from one thread."""

    def __init__(
        self, pipe: Connection, process: "subprocess.Popen[bytes]", memory: StagingMemory, timeout_s: float
    ) -> None:
        self._pipe, self._process, self._memory = pipe, process, memory
        self.timeout_s = timeout_s
        self.name, self.port, self.world_size, self.backend = "", 0, 0, ""
        self._ending = threading.Lock()
        self._closed = False

    @classmethod
    def host(
        cls,
        address: str,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        *,
        memory: StagingMemory,
        gpu: str = "",
    ) -> Self:
        """Start the process and let it listen, as ``BroadcastGroup.host``. Raises PeerLost.

        ``memory``: of all tensors to be sent. ``gpu``: UUID of the GPU that it uses.
        """
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", CHILD, str(theirs.fileno()), str(os.getpid())]
        # No ``preexec_fn``, for which all page tables of this process would be copied: the child itself asks for its
        # end with the parent.
        process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        sender = cls(ours, process, memory, timeout_s)
        sender.name, sender.world_size, sender.backend = name, world_size, backend
        request = {
            "address": address,
            "name": name,
            "world_size": world_size,
            "backend": backend,
            "timeout_s": timeout_s,
            "gpu": gpu,
        }
        try:
            port = sender._ask("host", "opening its store", START_S + timeout_s, request).get("port")
            if not isinstance(port, int):
                raise PeerLost(name, "opening its store", f"want a port, got {port!r}")
        except BaseException:
            sender.close()
            raise
        sender.port = port
        _log.info("push group: process pid=%d backend=%s members=%d port=%d", process.pid, backend, world_size, port)
        return sender

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def meet(self) -> None:
        """Wait until every rank is connected."""
        self._ask("meet", f"meeting {self.world_size - 1} peers", self.timeout_s, {})

    def send(self, flat: Tensor, timeout_s: float | None = None, following: Tensor | None = None) -> None:
        """Broadcast a part of the staging memory to all; returns when it may be written again."""
        within_s = self.timeout_s if timeout_s is None else timeout_s
        handles = [None if tensor is None else self._memory.handle(tensor, 1) for tensor in (flat, following)]
        request: dict[str, object] = {"handle": handles[0], "following": handles[1], "timeout_s": within_s}
        self._ask("send", f"sending {flat.numel()} bytes", within_s, request)

    def close(self) -> None:
        """Kill the process; its connections close with it. A call in another thread fails at once."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
        with suppress(ProcessLookupError):
            self._process.kill()
        # A process with a CUDA context takes a while to end.
        threading.Thread(target=self._process.wait, name=f"end of {self._process.pid}", daemon=True).start()

    def _ask(self, verb: str, doing: str, within_s: float, request: dict[str, object]) -> dict[str, object]:
        """Return the process's answer. Raises PeerLost for its error, its end, and the deadline, which kills it."""
        try:
            if self._closed:
                raise PeerLost(self.name, doing, "the group is closed")
            self._pipe.send_bytes(msgpack.packb({"verb": verb, **request}))
            if not self._pipe.poll(within_s + GRACE_S):
                raise PeerLost(
                    self.name, doing, f"the process of the group has no answer after {within_s:g} s, and is killed"
                )
            answer = msgpack.unpackb(self._pipe.recv_bytes())
        except PeerLost:
            self.close()
            raise
        except (EOFError, OSError, ValueError, msgpack.UnpackException) as error:
            closed = self._closed
            self.close()
            reason = (
                "the group is closed" if closed else f"the process of the group has ended: {self._status()}: {error!r}"
            )
            raise PeerLost(self.name, doing, reason) from None
        if not isinstance(answer, dict) or "lost" in answer:
            raise PeerLost(self.name, doing, str(answer["lost"] if isinstance(answer, dict) else answer))
        return answer

    def _status(self) -> str:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "status not known"
        return f"signal {-code}" if code < 0 else f"status {code}"
