"""A separate process group of one sender (rank 0) and its receivers, beside any other groups of the process.

Built from torch's classes directly, so no default group is touched. Store keys are laid out as by SGLang's own
constructor (``<name>``, then ``<name>/``, then ``<device>/``), so that a receiver may be SGLang. Every operation has a
deadline and cannot be interrupted before it. All calls block: run them in a thread.

NCCL has no deadline of its own: it creates its communicator inside the first broadcast, where it waits without end for
a dead peer, and an abort cannot reach it. It therefore runs in daemon threads that are abandoned at the deadline, on a
stream of its own: the default one has other work before it. The learner's end over NCCL is in a process of its own
(``sender_process``).

Pushes over gloo have run from a GPU; over NCCL groups of one alone, as a second member needs a second GPU.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.bus.system.functions import settle
from tidemill.weightstore.errors import PeerLost


class Buffers(Protocol):
    """Two buffers, 0 and 1, with a queue of copies in the order of the calls."""

    def copy(self, slot: int, source: Tensor) -> None:
        """Queue the copy of flat uint8 into a buffer, which grows to its size."""

    def ready(self, slot: int, num_bytes: int) -> Tensor:
        """Return the first bytes of a buffer, for work that is queued behind its last copy."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Ahead:
    slot: int
    address: int
    num_bytes: int


class DoubleBuffer:
    """Messages copied to a device one ahead of the broadcast."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._sent = 1  # The buffer of the last message
        self._ahead: _Ahead | None = None  # The message that has been copied before it is sent

    def message(self, flat: Tensor, following: Tensor | None = None) -> Tensor:
        """Return ``flat`` on the device, and queue the copy of ``following``, which may not change until it is sent."""
        slot, ahead = 1 - self._sent, self._ahead
        if ahead != _Ahead(slot, flat.data_ptr(), flat.numel()):
            self._buffers.copy(slot, flat)
        self._sent, self._ahead = slot, None
        if following is not None:
            self._ahead = _Ahead(1 - slot, following.data_ptr(), following.numel())
            self._buffers.copy(1 - slot, following)
        return self._buffers.ready(slot, flat.numel())


class DeviceBuffers:
    """``Buffers`` on the GPU of a stream. From pinned memory the copies are asynchronous."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """``stream``: of the work that is queued behind a copy."""
        self._stream, self._copies = stream, torch.cuda.Stream(stream.device, priority=-1)
        self._flats = [torch.empty(0, dtype=torch.uint8, device=stream.device) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def copy(self, slot: int, source: Tensor) -> None:
        with torch.cuda.stream(self._copies):
            if self._flats[slot].numel() < source.numel():
                self._flats[slot] = torch.empty(source.numel(), dtype=torch.uint8, device=self._stream.device)
            self._flats[slot][: source.numel()].copy_(source, non_blocking=True)
            self._copied[slot].record(self._copies)

    def ready(self, slot: int, num_bytes: int) -> Tensor:
        self._stream.wait_event(self._copied[slot])
        return self._flats[slot][:num_bytes]


# The device of a backend in torch: its name is part of the store's keys, so all members must agree on it
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
# NCCL's watchdog ends the whole process at its timeout. It must never fire; the deadline here is always earlier.
_NCCL_OWN_TIMEOUT = timedelta(days=1)
# Environment of an engine, unless it is set already: otherwise NCCL's watchdog ends its process where the learner's end
# of a group dies. Source: torch 2.11, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (NoHandling; the heartbeat
# monitor).
QUIET_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_POLL_S = 0.001  # Interval of asking whether a broadcast by NCCL is complete
_ABORT_S = 5.0  # An abort takes less time than this, or never returns

T = TypeVar("T")


def known(backend: str) -> str:
    """Return the backend. Raises ValueError for one that is not in ``BACKENDS``."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: want one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


class BroadcastGroup:
    """One end of a group, by ``host`` (rank 0) or ``join``; raises PeerLost for a peer that is dead or too late."""

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        name: str,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        server: dist.TCPStore | None = None,
    ) -> None:
        self.name, self.rank, self.world_size, self.backend = name, rank, world_size, known(backend)
        self.timeout_s = timeout_s  # Deadline of an operation without one of its own
        self.port: int = store.port
        self._store: dist.TCPStore | None = store
        # On rank 0, the server of all members' stores. When it closes, waits in those stores fail at once.
        self._server = server
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._copies: DoubleBuffer | None = None

    @classmethod
    def host(cls, host: str, name: str, world_size: int, backend: str, timeout_s: float) -> Self:
        """Listen at a free port, as rank 0, without a connection: send ``port`` to the peers, and call ``meet``.

        Raises PeerLost when torch cannot open its store.
        """
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        with _translated(name, "opening its store"):
            within = timedelta(seconds=timeout_s)
            # The socket is bound before torch gets it, so the port is known and no other process can take it in
            # between.
            server = dist.TCPStore(
                host, port, world_size, True, within, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            store = dist.TCPStore(host, port, world_size, False, within, wait_for_workers=False)
        return cls(store, name=name, rank=0, world_size=world_size, backend=backend, timeout_s=timeout_s, server=server)

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> "BroadcastGroup":
        """Join as rank 1 to world_size - 1 and wait for all. Raises PeerLost, ValueError for another rank."""
        if not 0 < rank < world_size:
            raise ValueError(f"rank: want 1 to {world_size - 1}, got {rank}")
        with _translated(name, f"joining at {host}:{port}"):
            socket.create_connection(
                (host, port), timeout=timeout_s
            ).close()  # torch would retry a refusal until its timeout, loudly

        def enter() -> BroadcastGroup:
            """Connect to the store and meet; may hang, so it runs in a thread that can be abandoned."""
            with _translated(name, f"joining at {host}:{port}"):
                store = dist.TCPStore(
                    host, port, world_size, False, timedelta(seconds=timeout_s), wait_for_workers=False
                )
            group = cls(store, name=name, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)
            group.meet()
            return group

        try:
            return _in_thread(enter, f"join {name}").result(timeout_s)
        except TimeoutError:
            raise PeerLost(name, f"joining at {host}:{port}", f"no answer within {timeout_s:g} s") from None

    def meet(self) -> None:
        """Wait until every rank is connected."""
        assert self._store is not None, "closed"
        outer = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        with _translated(self.name, f"meeting {self.world_size - 1} peers"):
            store = dist.PrefixStore(f"{BACKENDS[self.backend]}/", outer)
            self._group = self._gloo(store) if self.backend == "gloo" else self._nccl(store)

    def send(self, flat: Tensor, timeout_s: float | None = None, following: Tensor | None = None) -> None:
        """Broadcast flat uint8, as rank 0; returns when it has left this process. Raises PeerLost.

        ``following``: the next tensor, if its bytes are there: over NCCL it is copied to the GPU meanwhile.
        """
        assert self.rank == 0 and flat.dtype == torch.uint8 and flat.is_contiguous()
        self._broadcast(flat, "sending", timeout_s, following)

    def receive(self, nbytes: int, timeout_s: float | None = None, into: Tensor | None = None) -> Tensor:
        """Return the next broadcast, flat uint8 [nbytes], in ``into`` if that is large enough and on the right device.

        Not on rank 0. Raises PeerLost; after an error ``into`` may be written until the deadline.
        """
        assert self.rank > 0
        if into is None or into.numel() < nbytes or into.device.type != self._device.type:
            into = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        flat = into[:nbytes]
        self._broadcast(flat, "receiving", timeout_s)
        return flat

    def close(self) -> None:
        """Close the connections; waits for members end at once, also at the peers, and transfers by their deadline."""
        if self._group is not None and self.backend == "nccl":
            _in_thread(
                self._group.abort, f"close {self.name}"
            )  # otherwise the last reference would wait for its threads
        self._group = self._store = self._server = None

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())

    def _gloo(self, store: dist.Store) -> object:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self.timeout_s)
        # By default gloo offers the address that the name of this host resolves to, which peers may not reach.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        options._threads = 1
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)  # type: ignore[arg-type]

    def _nccl(self, store: dist.Store) -> object:
        if not dist.is_nccl_available():
            raise RuntimeError("this torch has no NCCL; cure: weights.backend: gloo")
        if self.rank > 0:
            for name, value in QUIET_WATCHDOG.items():
                os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NCCL_OWN_TIMEOUT
        return within(
            self.timeout_s, lambda: dist.ProcessGroupNCCL(store, self.rank, self.world_size, options), self.name
        )

    def _own_address(self) -> str:
        """Return the address of the interface that leads to the store: peers must reach this process there."""
        assert self._store is not None
        host = self._store.host
        if self.rank == 0:
            return host
        family, kind, protocol, _, address = socket.getaddrinfo(host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])

    def _broadcast(self, flat: Tensor, doing: str, timeout_s: float | None, following: Tensor | None = None) -> None:
        group, timeout_s = self._group, self.timeout_s if timeout_s is None else timeout_s
        if group is None:
            raise PeerLost(self.name, doing, "the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s) if self.backend == "gloo" else _NCCL_OWN_TIMEOUT
        with _translated(self.name, f"{doing} {flat.numel()} bytes"):
            if self.backend == "gloo":
                group.broadcast([flat], options).wait()
            else:
                stream = self._own_stream()
                _nccl_broadcast(group, self._on_device(flat, following, stream), options, stream, timeout_s, self.name)

    def _own_stream(self) -> torch.cuda.Stream:
        """Return the stream of the broadcasts; a receiver's is behind the work of this thread, which may read it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        if self.rank > 0:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream

    def _on_device(self, flat: Tensor, following: Tensor | None, stream: torch.cuda.Stream) -> Tensor:
        """Return ``flat`` itself if it is on the GPU, else its copy there."""
        if flat.is_cuda:
            return flat
        if self._copies is None:
            self._copies = DoubleBuffer(DeviceBuffers(stream))
        return self._copies.message(flat, following)


def _nccl_broadcast(
    group: Any, flat: Tensor, options: dist.BroadcastOptions, stream: torch.cuda.Stream, timeout_s: float, name: str
) -> None:
    """Poll the broadcast and abort the communicator at the deadline: NCCL's own wait would end the process."""
    late = threading.Event()

    def run() -> None:
        with torch.cuda.stream(stream):  # a new thread is on the first GPU
            work = group.broadcast([flat], options)
            while not work.is_completed() and not late.is_set():
                time.sleep(_POLL_S)
            if not late.is_set():
                work.wait()

    def abort() -> None:
        late.set()
        group.abort()

    within(timeout_s, run, name, abort)


def within(timeout_s: float, work: Callable[[], T], name: str, abort: Callable[[], None] = lambda: None) -> T:
    """Return the result of ``work``; at the deadline abort it (or abandon it), and raise RuntimeError."""
    try:
        return _in_thread(work, name).result(timeout_s)
    except TimeoutError:
        with suppress(Exception):  # only the missed deadline is reported; an abort may block like the broadcast
            _in_thread(abort, f"abort {name}").result(_ABORT_S)
        raise RuntimeError(f"not done within {timeout_s:g} s") from None


def _in_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Run ``work`` in a daemon thread that may be abandoned: torch waits without end for a store that is cut off."""
    done: Future[T] = Future()

    threading.Thread(target=settle, args=(done, work), name=name, daemon=True).start()
    return done


@contextmanager
def _translated(group: str, doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's DistError and its kin are RuntimeErrors
        text = str(error).strip()
        if text.startswith("["):  # gloo puts its source line first
            text = text.partition("] ")[2]
        raise PeerLost(group, doing, _reason(text) or type(error).__name__) from None


def _reason(text: str) -> str:
    """Return an error's first line with NCCL's own reason, which torch writes last, under "Last error:"."""
    first, _, details = text.partition("\n")
    causes = [line.strip() for line in details.partition("Last error:")[2].splitlines() if line.strip()]
    return f"{first}: {' '.join(causes)}" if causes else first
