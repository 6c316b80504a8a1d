"""An engine on the learner's host, over ZMQ: it gets handles of the staged buckets instead of their bytes.

A request is a msgpack map with ``verb``, ``id``, ``epoch`` and ``timeout_s``; its answer has the ``id`` and a
``status``, as in HTTP.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import zmq
import zmq.asyncio
from torch import Tensor

from tidemill.bus.errors import Fenced
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.format.adapters import AdapterHeader, in_request
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket, TensorSpec
from tidemill.weightstore.transport.handles import StagingMemory, shared_memory_domain
from tidemill.weightstore.transport.http_receiver import NOT_SUPPORTED, STALE_EPOCH, newer_epoch, stall_of
from tidemill.weightstore.transport.nccl import no_cuda_handles
from tidemill.weightstore.transport.parts import Buckets, Payload, RemotePart
from tidemill.weightstore.transport.port import Deadlines, Identity, OpenReceiver, Rendezvous, WeightReceiver, identity

_log = logging.getLogger(__name__)

OK, UNDER_WAY = 200, 102
# Event of a refused connection, the first one or a later one: ZMQ itself would retry without end
_GONE = zmq.EVENT_CONNECT_RETRIED


class HandleReceiver:
    """``WeightReceiver`` for one engine's socket. Context and memory belong to the caller.

    Requests that are no part of a push go over ``control``, another receiver of the same engine, if there is one.
    """

    carries = True
    adapters = True

    def __init__(
        self,
        context: zmq.asyncio.Context,
        url: str,
        *,
        epoch: int,
        deadlines: Deadlines,
        memory: StagingMemory,
        control: WeightReceiver | None = None,
        ranks: int = 1,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``ranks``: processes of the engine. ``refused`` gets the reason of an engine that cannot read the weights.

        Raises ZMQError for an invalid URL.
        """
        self.url = url
        self._epoch, self._deadlines, self._memory = epoch, deadlines, memory
        self._control, self._ranks = control, ranks
        self._refused = refused
        self._last_id, self._version = 0, -1
        self._waiters: dict[int, _Waiter] = {}
        self._reading, self._gone = asyncio.Lock(), False
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Before ``connect``: a refusal that comes at once would not be reported to a later monitor.
        self._monitor = self._socket.get_monitor_socket(_GONE)
        try:
            self._socket.connect(url)
        except zmq.ZMQError:
            self._close_socket()
            raise

    async def join(self, rendezvous: Rendezvous | None) -> None:
        """Send the id of this process, by which the engine notices its end. ``rendezvous`` is not used."""
        await self._offer("join", pid=os.getpid())

    async def begin(self, version: int, adapter: AdapterHeader | None = None) -> None:
        """Send ``begin``; the later requests of the push repeat the version."""
        self._version = version
        await self._request("begin", version=version, **in_request(adapter))

    async def bucket(self, specs: Sequence[TensorSpec], flat: Payload) -> None:
        """Send the handle of the bucket instead of its bytes. The answer comes when the engine has copied them."""
        packed = Bucket(specs=tuple(specs), num_bytes=0).packed
        await self._offer("bucket", version=self._version, handle=await self._handle(flat), specs=packed)

    async def receive(
        self, version: int, buckets: Buckets, *, serve: bool, adapter: AdapterHeader | None = None
    ) -> float | None:
        """Send all handles in one request, whose deadline begins anew with each bucket that the engine has copied.

        Never ends the push: an engine that was stopped meanwhile would serve what it finds in the memory by then.
        """
        self._version = version
        sent = [{"specs": bucket.packed, "handle": await self._handle(payload)} for bucket, payload in buckets]
        request = {"version": version, "buckets": sent} | in_request(adapter)
        await self._answered("push", request, self._deadlines.of("bucket"), messages=len(sent))
        return None

    async def _handle(self, payload: Payload) -> Mapping[str, object]:
        if isinstance(payload, Tensor):
            return self._memory.handle(payload, self._ranks)
        return await payload.handle(self._ranks)

    async def checksums(self, of: str = "update") -> ChecksumReport | None:
        """Return the engine's report; None for the status of an engine without checksums."""
        if of != "update" and self._control is not None:  # no part of a push: the engine need not have joined
            return await self._control.checksums(of)
        answer = await self._request("checksums")
        if answer["status"] in NOT_SUPPORTED:
            return None
        try:
            return ChecksumReport.parse(answer)
        except ValueError as error:
            raise ReceiverFailed(self.url, "checksums", str(error), answered=True) from None

    async def end(self) -> float:
        """Send ``end`` and return the seconds in its answer."""
        return stall_of(self.url, "end", await self._request("end", version=self._version))

    async def leave(self) -> None:
        """Send ``leave``; the engine unmaps this process' memory."""
        await self._request("leave")

    async def load_snapshot(self, directory: str, version: int) -> float:
        """Send the path, because engine and learner are on one host. Returns the seconds in the answer."""
        answer = await self._answered("load", {"directory": directory, "version": version}, self._deadlines.of("load"))
        return stall_of(self.url, "load", answer)

    async def release(self) -> None:
        """Release by the control receiver, which must be there."""
        assert self._control is not None
        await self._control.release()

    async def resume(self, what: str) -> None:
        """Resume by the control receiver, which must be there."""
        assert self._control is not None
        await self._control.resume(what)

    def close(self) -> None:
        """Close the control receiver and this one's socket."""
        if self._control is not None:
            self._control.close()
        self._close_socket()

    def _close_socket(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    async def _offer(self, verb: str, **fields: object) -> None:
        """Send a request that an engine refuses if it cannot read this memory. No answer is no refusal."""
        try:
            await self._request(verb, **fields)
        except ReceiverFailed as error:
            if error.answered:
                self._refused(error.reason)
            raise

    async def _request(self, verb: str, **fields: object) -> dict[str, object]:
        return await self._answered(verb, fields, self._deadlines.of("verify" if verb == "checksums" else verb))

    async def _answered(
        self, verb: str, fields: Mapping[str, object], deadline_s: float, *, messages: int = 0
    ) -> dict[str, object]:
        """Return the answer. The deadline begins anew with the first ``messages`` reports of work on it."""
        request_id = self._last_id = self._last_id + 1
        request = {"verb": verb, "id": request_id, "epoch": self._epoch, "timeout_s": deadline_s, **fields}
        try:
            async with asyncio.timeout(deadline_s) as limit:
                extensions = iter(range(messages))

                def under_way() -> None:
                    # Another request's waiter may read this message, when the deadline of this one is over.
                    if not limit.expired() and next(extensions, None) is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + deadline_s)

                await self._socket.send(msgpack.packb(request))
                answer = await self._answer(verb, request_id, under_way)
        except TimeoutError:
            raise ReceiverFailed(self.url, verb, f"no answer within {deadline_s:g} s") from None
        except (zmq.ZMQError, ValueError, msgpack.UnpackException) as error:
            raise ReceiverFailed(self.url, verb, str(error) or type(error).__name__) from None
        status = answer.get("status")
        if status == STALE_EPOCH and (epoch := newer_epoch(answer, self._epoch)):
            raise Fenced(f"engine {self.url}: {verb}", self._epoch, epoch)
        if status != OK and not (verb == "checksums" and status in NOT_SUPPORTED):
            reason = f"status {status}: {answer.get('message', '')}"
            if number := answer.get("bucket"):
                reason = f"bucket {number}: {reason}"
                self._refused(reason)
            raise ReceiverFailed(self.url, verb, reason, answered=True)
        return answer

    async def _answer(self, verb: str, request_id: int, under_way: Callable[[], None]) -> dict[str, object]:
        """Return the answer to this request; one waiter reads for all. Raises ReceiverFailed if the engine is gone."""
        answer = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = _Waiter(answer, under_way)
        try:
            while not answer.done():
                # Requests may be under way at the same time, but a socket has one reader: the waiter with the lock
                # reads one answer, of any of them.
                async with self._reading:
                    if not answer.done():
                        await self._read(verb)
            return answer.result()
        finally:
            del self._waiters[request_id]

    async def _read(self, verb: str) -> None:
        coming = asyncio.ensure_future(self._socket.recv())
        if self._gone:
            coming.cancel()  # unless it is there already
        else:
            await first_of(coming, self._monitor.recv_multipart())
        if coming.cancelled():
            self._gone = True
            raise ReceiverFailed(self.url, verb, "connection lost: no process listens there")
        answer = msgpack.unpackb(coming.result())
        waiter = self._waiters.get(answer.get("id", 0)) if isinstance(answer, dict) else None
        if waiter is None or waiter.answer.done():
            return
        if answer.get("status") == UNDER_WAY:
            waiter.under_way()
        else:
            waiter.answer.set_result(answer)


@dataclass(frozen=True, slots=True)
class _Waiter:
    answer: "asyncio.Future[dict[str, object]]"
    under_way: Callable[[], None]


class HandleReceivers:
    """Opens receivers: by handles for engines that can read this process' memory, else by ``otherwise``."""

    def __init__(
        self,
        memory: StagingMemory,
        otherwise: OpenReceiver,
        *,
        epoch: int,
        deadlines: Deadlines,
        gpu: str = "",
        parts: Sequence[RemotePart] = (),
    ) -> None:
        """``gpu``: UUID of the GPU that has the memory; "" = host memory. ``parts``: of other ranks."""
        self._gpu, self._parts = gpu, parts
        self._memory, self._otherwise, self._epoch, self._deadlines = memory, otherwise, epoch, deadlines
        self._context, self._place = zmq.asyncio.Context(), shared_memory_domain()
        self._logged: set[str] = set()
        # Engine -> why it gets no handles. Another process of the same name is tried again.
        self._refused: dict[Identity, str] = {}

    def open(self, row: LiveRow) -> WeightReceiver:
        """Return a receiver for an engine; one that gets no handles is logged once."""
        otherwise = self._otherwise(row)
        if why := self.why_not(row):
            if row.id not in self._logged:
                _log.warning(
                    "no handles for this engine, it is pushed to by broadcast engine=%s reason=%s", row.id, why
                )
                self._logged.add(row.id)
            return otherwise
        try:
            return HandleReceiver(
                self._context,
                row.handles,
                epoch=self._epoch,
                deadlines=self._deadlines,
                memory=self._memory,
                control=otherwise,
                ranks=row.capabilities.ranks,
                refused=lambda reason: self._refused.update({identity(row): reason}),
            )
        except zmq.ZMQError as error:
            self._refused[identity(row)] = f"{row.handles}: {error}"
            return self.open(row)

    def close(self) -> None:
        """Close the sockets of all receivers that were opened."""
        self._context.destroy(linger=0)

    def why_not(self, row: LiveRow) -> str:
        """Return why an engine cannot be sent handles; empty if it can."""
        if not row.handles:
            return "it offers none"
        if not self._place or row.place != self._place:
            return (
                f"it is elsewhere: {row.place or 'nowhere known'}, not "
                f"{self._place or 'where this is, which is not known'}"
            )
        for part in self._parts:
            if part.place.domain != row.place:
                return f"{part} is elsewhere: {part.place.domain or 'nowhere known'}, not {row.place}"
        for gpu in (self._gpu, *(part.place.end.uuid for part in self._parts)) if self._gpu else ():
            if blind := no_cuda_handles(gpu, row.capabilities):
                return blind
        if refused := self._refused.get(identity(row)):
            return f"it cannot take them: {refused}"
        return ""
