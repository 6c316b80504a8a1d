"""The engine's end of pushes by handles: a ZMQ socket at which a learner of the same host sends references to its
staged weights.

    learner --join, push | begin, bucket, checksums, end, load, leave--> HandleListener --as over HTTP--> Updates

Requests and answers are msgpack maps (``docs/wire.md``); statuses and refusals are those of HTTP. The socket lies in a
directory that only this user can enter.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
import zmq
import zmq.asyncio

from tidemill.actors.errors import BadRequest, CannotTell, EngineError, StaleEpoch, UpdateRefused
from tidemill.actors.http_api import decode, need
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.command_bodies import UpdateBody
from tidemill.actors.serving.updates import Updates
from tidemill.bus.errors import DetailedError
from tidemill.bus.system.files import Scratch
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import WeightstoreError
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.transport.handles import PINNING, Mapped, Offered

log = logging.getLogger(__name__)

_SOCKET = "push"


@dataclass(slots=True)
class _Learner:
    """The learner that has joined, and its memory that is mapped here."""

    sender: bytes
    mapped: Mapped
    pidfd: int


class HandleListener:
    """One socket for one engine. ``start`` returns its URL."""

    def __init__(self, updates: Updates, authority: Authority | None = None, *, to_gpu: bool = False) -> None:
        """``to_gpu``: this process copies the weights to a GPU."""
        self._updates, self._authority, self._to_gpu = updates, authority or Authority(), to_gpu
        self._learner: _Learner | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._scratch: Scratch | None = None
        self._url = ""
        self._buckets: dict[bytes, Bucket] = {}
        """The buckets of the last push, as they were packed: the next one has the same."""
        self._verbs: dict[str, Callable[[Sequence[bytes], JsonMapping], Awaitable[dict[str, object]]]] = {
            "join": self._join,
            "push": self._push,
            "begin": self._begin,
            "bucket": self._bucket,
            "checksums": self._checksums,
            "end": self._end,
            "leave": self._leave,
            "load": self._load,
        }

    async def start(self) -> str:
        """Listen. Returns the socket's URL, or "" where there can be no socket: then pushes come by broadcast."""
        self._scratch = await asyncio.to_thread(Scratch, "handles")
        self._url = f"ipc://{self._scratch.path}/{_SOCKET}"
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.bind(self._url)
        except zmq.ZMQError as error:  # the path is too long, or the directory takes no sockets
            log.warning("pushes by handles are not possible: %s: %s; cure: a shorter TMPDIR", self._url, error)
            await self.close()
            return ""
        self._serving = asyncio.create_task(self._serve(), name="handles")
        return self._url

    async def close(self) -> None:
        """Stop listening and unmap the learner's memory. Safe to call without ``start``."""
        if self._scratch is None:
            return
        tasks = [task for task in (self._serving, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._unmap()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        await asyncio.to_thread(self._scratch.close)
        self._scratch = None

    async def _serve(self) -> None:
        while True:
            # The envelope of some sockets (REQ) has more than the sender.
            *envelope, request = await self._socket.recv_multipart()
            self._keep(asyncio.create_task(self._answer(envelope, request), name="handles: verb"))

    async def _answer(self, envelope: Sequence[bytes], request: bytes) -> None:
        """Check the epoch, run the verb, and send its result, with the statuses of ``http_api.translate``."""
        body: JsonMapping = {}
        try:
            body = _map_of(request)
            need(body, "epoch", int)
            verb = need(body, "verb", str)
            if verb not in self._verbs:
                raise BadRequest(f"verb: want one of {', '.join(self._verbs)}, got {verb!r}")
            await self._authority.require_current_epoch(self._updates.require_current_epoch, body, self._url, verb)
            if verb != "join":
                self._joined(envelope)
            answer = {"status": 200, **await self._verbs[verb](envelope, body)}
        except _BucketFailed as failed:
            answer = _failure(failed.error) | {"bucket": failed.number}
        except Exception as error:
            answer = _failure(error)
        await self._send(envelope, {"id": body.get("id"), **answer})

    async def _send(self, envelope: Sequence[bytes], answer: Mapping[str, object]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the learner has ended
            await self._socket.send_multipart([*envelope, msgpack.packb(answer)])

    async def _join(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        """Accept a learner. Its memory is unmapped when its process ends, in whatever way."""
        pid = need(body, "pid", int)
        try:
            # Readable when the process ends, also by kill -9. A pid alone may be another process's by then.
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise BadRequest(f"pid: want a process of this host, got {pid}: {error.strerror}") from None
        self._unmap()
        self._learner = _Learner(envelope[0], Mapped(pinning=PINNING if self._to_gpu else None), pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended)
        log.info("the learner joined, by handles pid=%d", pid)
        return {}

    async def _push(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        """Begin a push and read all its buckets. The learner gets a message after each bucket but the last."""
        sent = need(body, "buckets", list)
        version, update = need(body, "version", int), decode(body, UpdateBody)
        buckets = self._buckets = {
            packed: self._buckets.get(packed) or Bucket.unpacked(packed) for packed in map(_packed, sent)
        }

        async def read_all() -> None:  # in one operation, so that no other one comes between
            await self._updates.begin(version, adapter=update.adapter)
            for number, entry in enumerate(sent, 1):
                try:
                    offered = self._offered(self._joined(envelope), entry)
                    await self._updates.read_bucket(
                        buckets[_packed(entry)], offered, version=version, timeout_s=update.timeout_s
                    )
                except (EngineError, WeightstoreError, RuntimeError) as error:  # CUDA's are RuntimeErrors
                    raise _BucketFailed(number, error) from error
                if number < len(sent):
                    await self._send(envelope, {"id": body.get("id"), "status": 102})

        await self._updates.run_shielded(read_all())
        return {}

    async def _begin(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        adapter = decode(body, UpdateBody).adapter
        await self._updates.run_shielded(self._updates.begin(need(body, "version", int), adapter=adapter))
        return {}

    async def _bucket(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        offered, bucket = self._offered(self._joined(envelope), body), Bucket.unpacked(_packed(body))
        version, timeout_s = need(body, "version", int), decode(body, UpdateBody).timeout_s
        await self._updates.run_shielded(
            self._updates.read_bucket(bucket, offered, version=version, timeout_s=timeout_s)
        )
        return {}

    def _offered(self, learner: _Learner, entry: JsonMapping) -> Offered:
        """Return the bucket of a handle. Raises BadRequest when this engine does not see its GPU."""
        offered = Offered(learner.mapped, need(entry, "handle", dict))
        self._authority.require_visible(offered.handle)
        return offered

    async def _checksums(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        _, report = await self._updates.run_shielded(self._updates.checksum_report(of="update"))
        return report.to_json()

    async def _end(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        return {"stall_s": await self._updates.run_shielded(self._updates.end(need(body, "version", int)))}

    async def _load(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        directory, version = Path(need(body, "directory", str)), need(body, "version", int)
        return {"stall_s": await self._updates.run_shielded(self._updates.load_directory(directory, version))}

    async def _leave(self, envelope: Sequence[bytes], body: JsonMapping) -> dict[str, object]:
        self._unmap()
        await self._sender_left()
        return {}

    def _joined(self, envelope: Sequence[bytes]) -> _Learner:
        """Return the learner. Raises BadRequest for another sender, as late requests of an evicted learner."""
        if self._learner is None or self._learner.sender != envelope[0]:
            since = "" if self._learner is None else ": another learner has joined since"
            raise BadRequest(f"want join first{since}")
        return self._learner

    def _ended(self) -> None:
        """Treat the end of the learner's process like its ``leave``."""
        self._unmap()
        self._keep(asyncio.create_task(self._sender_left(), name="handles: sender left"))

    async def _sender_left(self) -> None:
        with contextlib.suppress(EngineError):  # there is no learner left to answer
            await self._updates.run_shielded(self._updates.sender_left())

    def _unmap(self) -> None:
        """Unmap the learner's memory; a copy that is under way keeps its part until it is done."""
        learner, self._learner = self._learner, None
        if learner is not None:
            asyncio.get_running_loop().remove_reader(learner.pidfd)
            os.close(learner.pidfd)
            if self._to_gpu:  # memory is unpinned first, which takes as long as pinning it
                self._keep(asyncio.create_task(asyncio.to_thread(learner.mapped.close), name="handles: unmap"))
            else:
                learner.mapped.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _BucketFailed(DetailedError):
    """A bucket of a push in one request failed."""

    number: int
    """Number of the bucket, from 1."""
    error: Exception


def _failure(error: Exception) -> dict[str, object]:
    match error:
        case StaleEpoch():
            return {"status": 409, "message": str(error), "epoch": error.seen}
        case BadRequest() | UpdateRefused() | WeightstoreError():
            return {"status": 400, "message": str(error)}
        case CannotTell():
            return {"status": 501, "message": str(error)}
        case EngineError():
            return {"status": 500, "message": str(error)}
    log.error("push by handles failed", exc_info=error)
    return {"status": 500, "message": repr(error)}


def _map_of(request: bytes) -> JsonMapping:
    try:
        body = msgpack.unpackb(request)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadRequest(f"request: want msgpack: {error!r}") from None
    if not isinstance(body, Mapping):
        raise BadRequest(f"request: want a map, got {type(body).__name__}")
    return body


def _packed(entry: object) -> bytes:
    if not isinstance(entry, Mapping):
        raise BadRequest(f"buckets: want a map for each, got {entry!r:.100}")
    return need(entry, "specs", bytes)
