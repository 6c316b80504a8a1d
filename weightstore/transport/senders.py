"""The learner's end of a process group: blocking calls in a thread, for some backends in a process of its own."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import msgpack
from torch import Tensor

from tidemill.bus.client.addresses import Reach, bare
from tidemill.bus.system.processes import die_with_parent
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import PINNING, Mapped, Offered, StagingMemory

_log = logging.getLogger(__name__)

START_S = 60.0  # The process imports torch and makes a CUDA context before its first answer
GRACE_S = 1.0  # A call has its own deadline in the process. Past it and this, the process is killed.


class SenderProcess:
    """``GroupEnd`` in a child process, which ends with the thread that made it. Calls come from one thread.

        sender's thread                           process (``main``)
        host, meet     --- msgpack over a pipe -> BroadcastGroup
        send (handles) -------------------------> maps the staging memory, broadcasts
                       <------ done, or lost ----
        late, or closed: SIGKILL

    NCCL may end its process when a peer dies in a broadcast (its watchdog), or wait without end where nothing can
    interrupt it. Here that costs the group: the push opens another one, with a new process, for the engines that are
    left. Each process has a CUDA context of its own, about 0.5 GB, and two buckets.
    """

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
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
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
        return self._process.pid

    def meet(self) -> None:
        self._ask("meet", f"meeting {self.world_size - 1} peers", self.timeout_s, {})

    def send(self, flat: Tensor, timeout_s: float | None = None, following: Tensor | None = None) -> None:
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


# Backends with the learner's end in a process of its own. NCCL may end its process, or wait in it without end, when a
# peer dies. Gloo does neither, so its groups spare the process.
APART = ("nccl",)
T = TypeVar("T")


# Rank 0 of a group. All calls block, and raise PeerLost; ``close`` may be called from any thread, at any time.
GroupEnd = BroadcastGroup | SenderProcess


def host(
    address: str,
    name: str,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    memory: StagingMemory | None = None,
    gpu: str = "",
    apart: tuple[str, ...] = APART,
) -> GroupEnd:
    """Listen on ``address`` at a free port, as rank 0, without a connection. Raises PeerLost.

    ``memory``: of all tensors to be sent, for a process of its own; ``gpu``: UUID of the GPU that it uses.
    """
    if backend not in apart:
        return BroadcastGroup.host(address, name, world_size, backend, timeout_s)
    assert memory is not None, "a process of its own reads shared memory only"
    return SenderProcess.host(address, name, world_size, backend, timeout_s, memory=memory, gpu=gpu)


class Sender:
    """The process group of a rank that sends, with a thread of its own, so that a call that hangs delays no other
    group.

    A blocking call cannot be interrupted: after an error it ends by its deadline, and its result is ignored.
    """

    def __init__(self, end: GroupEnd, thread: ThreadPoolExecutor, address: str) -> None:
        """``address``: host at which the members reach the group's port."""
        self._end, self._thread, self.host = end, thread, address
        self.name, self.port, self.world_size, self.backend = end.name, end.port, end.world_size, end.backend

    @classmethod
    async def open(
        cls,
        name: str,
        world_size: int,
        backend: str,
        timeout_s: float,
        *,
        at: Reach,
        memory: StagingMemory | None,
        gpu: str,
        apart: tuple[str, ...] = APART,
    ) -> "Sender":
        """Listen, as ``host`` does. Raises PeerLost."""
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"push {name}")
        try:
            hosting = _run(
                thread, lambda: host(at.bind, name, world_size, backend, timeout_s, memory=memory, gpu=gpu, apart=apart)
            )
            return cls(await hosting, thread, bare(at.advertised))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def meet(self) -> None:
        await self._call("meeting", self._end.meet)

    async def send(self, flat: Tensor, following: Tensor | None, timeout_s: float) -> None:
        """Broadcast a bucket. ``following``: the tensor of the next call, if known. Raises PeerLost."""
        await self._call("sending", lambda: self._end.send(flat, timeout_s, following))

    def close(self) -> None:
        """Close the group and let its thread end, without waiting for a call under way."""
        self._end.close()
        self._thread.shutdown(wait=False)

    async def _call(self, doing: str, work: Callable[[], T]) -> T:
        try:
            future = _run(self._thread, work)
        except RuntimeError as error:  # the thread has been shut down
            raise PeerLost(self.name, doing, f"the group is closed: {error}") from None
        return await future


def _run(thread: ThreadPoolExecutor, work: Callable[[], T]) -> "asyncio.Future[T]":
    future = asyncio.get_running_loop().run_in_executor(thread, work)
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: "asyncio.Future[T]") -> None:
    """Mark the exception as retrieved: the caller may have gone."""
    if not future.cancelled():
        future.exception()


# ---- the process: python -m tidemill.weightstore.transport.senders DESCRIPTOR PARENT


class _Session:
    """One process group, which sends the memory that it gets handles of."""

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self._mapped = Mapped()
        self._verbs = {"host": self._host, "meet": self._meet, "send": self._send}

    def answer(self, request: JsonMapping) -> dict[str, object]:
        """Run a request and return its answer, in which ``lost`` is the reason of an error."""
        try:
            return self._verbs[request["verb"]](request)
        except PeerLost as error:
            return {"lost": error.reason}
        except Exception as error:  # torch, CUDA or the memory: the learner closes the group, and evicts
            _log.exception("%s failed", request.get("verb"))
            return {"lost": f"{type(error).__name__}: {error}"}

    def _host(self, request: JsonMapping) -> dict[str, object]:
        if request["gpu"]:
            import torch

            from tidemill.weightstore.transport.cuda_handles import ordinal

            torch.cuda.set_device(ordinal(request["gpu"]))
            self._mapped = Mapped(pinning=PINNING)
        arguments = [request[name] for name in ("address", "name", "world_size", "backend", "timeout_s")]
        self._group = BroadcastGroup.host(*arguments)
        return {"port": self._group.port}

    def _meet(self, request: JsonMapping) -> dict[str, object]:
        assert self._group is not None
        self._group.meet()
        return {}

    def _send(self, request: JsonMapping) -> dict[str, object]:
        assert self._group is not None
        following = None if request["following"] is None else self._tensor(request["following"])
        self._group.send(self._tensor(request["handle"]), request["timeout_s"], following)
        return {}

    def _tensor(self, handle: JsonMapping) -> Tensor:
        return Offered(self._mapped, handle).tensor()


def main() -> None:
    """Answer the requests on the pipe until the learner closes it."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)()
    session = _Session()
    with Connection(descriptor) as pipe:
        while True:
            try:
                request = msgpack.unpackb(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(msgpack.packb(session.answer(request)))


if __name__ == "__main__":
    main()
