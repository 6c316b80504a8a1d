"""A part of the weights in a rank of the learner other than rank 0, served to rank 0, which pushes it (``parts``).

    trainer's thread                         server's thread (own loop)
    stage(number, tensors): a copy  -------> broadcasts its buckets, in a process group for each push group of rank 0
                                             compares it with an engine's checksums, gives handles of it
    offer(name, tensors)            -------> sends them one at a time, to be written into a file by rank 0

Rank 0 decides everything: which copy is filled, which bucket is sent next, and when. Every request needs the key that
this server made.
"""

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgpack
import torch
from aiohttp import web
from torch import Tensor

from tidemill.bus.client.addresses import Reach
from tidemill.bus.http.access import Route, RunAccess
from tidemill.bus.http.listener import Listener, body_in, json_in
from tidemill.bus.keys import Keys, RunKeys
from tidemill.bus.system.coroutines import LoopThread
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import PeerLost, PublisherClosed
from tidemill.weightstore.format.checksums import ChecksumReport, beside
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.transport.broadcast import known
from tidemill.weightstore.transport.handles import shared_memory_domain
from tidemill.weightstore.transport.nccl import own_end
from tidemill.weightstore.transport.parts import PartPlace, staged
from tidemill.weightstore.transport.senders import Sender
from tidemill.weightstore.transport.staging import Staging, StagingPool, staging_memory

_log = logging.getLogger(__name__)

START_S = 30.0  # Deadline in seconds for the thread to listen, and to end
_SHUTDOWN_S = 1.0
_KEY_BYTES = 24
# Answers a request, with the map in its body; None = an empty map
_Work = Callable[[web.Request, Mapping[str, Any]], Coroutine[object, None, dict[str, object] | bytes | None]]


class PartServer:
    """``start``, then ``stage`` and ``offer`` in the trainer's thread, and ``close``."""

    def __init__(self, manifest: Manifest, config: WeightsConfig, *, rank: int, at: Reach) -> None:
        """``manifest``: the tensors of the part. ``rank``: global rank of this process; ``at``: where it listens."""
        self._manifest, self._rank, self._at = manifest, rank, at
        self._end = own_end()
        self._memory = staging_memory(config, self._end)
        self._bucket_bytes = config.bucket_size(on_gpu=bool(self._end.uuid))
        self.pool = StagingPool(manifest, self._bucket_bytes, memory=self._memory)
        """Copies of the part."""
        self._copies: dict[int, Staging] = {}
        self._sets: dict[str, Mapping[str, Tensor]] = {}
        self._read: dict[str, threading.Event] = {}  # Set name -> set when rank 0 has read it
        self._has_left = threading.Event()  # Set when no request of rank 0 will follow
        self.groups: dict[str, Sender] = {}
        """Open groups by id."""
        self._met: set[str] = set()  # Ids of the groups that members have begun to join
        self._ids = itertools.count(1)
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self.thread = LoopThread("weight part", self._serve)
        self._url = ""

    # -- the trainer's thread

    def start(self) -> PartPlace:
        """Listen. Returns the address for rank 0. Raises OSError."""
        self.thread.start(START_S)
        count, num_bytes = len(self._manifest.specs), self._manifest.num_bytes
        _log.info("part of the weights rank=%d tensors=%d bytes=%d url=%s", self._rank, count, num_bytes, self._url)
        return PartPlace(
            rank=self._rank,
            url=self._url,
            key=self._key,
            specs=self._manifest.specs,
            bucket_bytes=self._bucket_bytes,
            end=self._end,
            domain=shared_memory_domain(),
        )

    def stage(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the copy of this number, which rank 0 has found free. Raises BadManifest, PublisherClosed."""
        if not self.thread.is_alive:
            raise PublisherClosed(f"the server of this rank's weights has ended: {self.thread.failure!r}")
        copy = self.pool.at(number)
        copy.fill(tensors)
        self._copies[number] = copy
        self._sets[staged(number)] = dict(copy.tensors())

    def offer(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Let rank 0 read these tensors, all of this part, until it releases them (``wait_until_read``)."""
        self._read[name] = threading.Event()
        self._sets[name] = tensors

    def wait_until_read(self, name: str, timeout_s: float) -> bool:
        """Wait until rank 0 has read the last set of this name. Returns whether it has, or there is none."""
        read = self._read.get(name)
        return read is None or read.wait(timeout_s)

    def wait_until_left(self, timeout_s: float) -> bool:
        """Wait until no request of rank 0 will follow. Returns whether that is so, or the server has ended."""
        return not self.thread.is_alive or self._has_left.wait(timeout_s)

    def close(self) -> None:
        """Stop serving, close all groups, and end the thread. Safe to call twice."""
        self.thread.close(START_S)
        if self._memory is not None:
            self._memory.close()

    # -- the server's thread

    async def _serve(self) -> None:
        listener = self.listener()
        try:
            # Without the advertised name, by which engines reach this machine: rank 0 is on the same one, or on its
            # network.
            self._url = await listener.start(self._at.bind, 0, name="weights.host")
            self.thread.ready()
            await self.thread.closing()
        finally:
            for group_id in list(self.groups):
                self.groups.pop(group_id).close()
            await listener.close()

    def listener(self) -> Listener:
        """Return the listener. Every route needs the key of this server."""
        routes = {
            "GET /alive": self._answer(self._alive),
            "POST /leave": self._answer(self._leave),
            "POST /groups": self._answer(self._host),
            "POST /groups/{id}/meet": self._answer(self._meet),
            "POST /groups/{id}/send": self._answer(self._send),
            "DELETE /groups/{id}": self._answer(self._close_group),
            "POST /differences": self._answer(self._differences),
            "POST /handles": self._answer(self._handle),
            "GET /buckets/{copy}/{bucket}": self._answer(self._bucket),
            "GET /tensors/{set}": self._answer(self._tensor),
            "DELETE /tensors/{set}": self._answer(self._release),
        }
        return Listener(routes, RunAccess(RunKeys.fixed(Keys.of(self._key))), shutdown_s=_SHUTDOWN_S)

    def _answer(self, work: _Work) -> Route:
        """Return the route of commands that are answered by ``work``, or with the reason and status of its error."""

        async def handle(request: web.Request) -> web.Response:
            try:
                content = await work(request, _map_in(body_in(request)))
                return web.Response(body=content) if isinstance(content, bytes) else web.json_response(content or {})
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                return web.json_response({"message": f"{request.path}: {error!r}"}, status=400)
            except PeerLost as error:  # of an engine: this rank is well
                return web.json_response({"message": error.reason, "lost": True}, status=500)
            except OSError as error:
                return web.json_response({"message": str(error)}, status=500)

        return Route.command(handle)

    async def _alive(self, request: web.Request, body: Mapping[str, Any]) -> None:
        return

    async def _leave(self, request: web.Request, body: Mapping[str, Any]) -> None:
        self._has_left.set()

    async def _host(self, request: web.Request, body: Mapping[str, Any]) -> dict[str, object]:
        name, world_size, timeout_s = str(body["name"]), int(body["world_size"]), _seconds_in(body)
        backend = known(str(body["backend"]))  # before a process is started for it
        try:
            sender = await Sender.open(
                name, world_size, backend, timeout_s, at=self._at, memory=self._memory, gpu=self._end.uuid
            )
        except PeerLost as error:
            raise OSError(str(error)) from None  # no engine has part in this
        group_id = str(next(self._ids))
        self.groups[group_id] = sender
        # If the answer is lost, rank 0 knows of no group to be closed.
        asyncio.get_running_loop().call_later(START_S + 2 * timeout_s, self.drop_unmet, group_id)
        return {"id": group_id, "host": sender.host, "port": sender.port}

    async def _meet(self, request: web.Request, body: Mapping[str, Any]) -> None:
        group = self._group(request)
        self._met.add(request.match_info["id"])
        await group.meet()

    def drop_unmet(self, group_id: str) -> None:
        """Close a group of which rank 0 has not said in time that engines join it."""
        if group_id in self.groups and group_id not in self._met:
            _log.warning("group closed, because no engine was requested to join it id=%s", group_id)
            self.groups.pop(group_id).close()

    async def _send(self, request: web.Request, body: Mapping[str, Any]) -> None:
        group, timeout_s = self._group(request), _seconds_in(body)
        flat = self._flat(body["copy"], body["bucket"])
        following = None if body["following"] is None else self._flat(body["copy"], body["following"])
        await group.send(flat, following, timeout_s)

    async def _close_group(self, request: web.Request, body: Mapping[str, Any]) -> None:
        group_id = request.match_info["id"]
        if group_id in self.groups:  # an earlier request may have closed it, and its answer been lost
            self.groups.pop(group_id).close()
        self._met.discard(group_id)

    async def _differences(self, request: web.Request, body: Mapping[str, Any]) -> dict[str, object]:
        report, compare = ChecksumReport.parse(body["report"]), self._copies[body["copy"]].differences
        return {"lines": await asyncio.to_thread(compare, report)}

    async def _handle(self, request: web.Request, body: Mapping[str, Any]) -> bytes:
        if self._memory is None:
            raise ValueError("the memory of this rank cannot be read by others")
        packed: bytes = msgpack.packb(self._memory.handle(self._flat(body["copy"], body["bucket"]), int(body["ranks"])))
        return packed

    async def _bucket(self, request: web.Request, body: Mapping[str, Any]) -> bytes:
        flat = self._flat(int(request.match_info["copy"]), int(request.match_info["bucket"]))
        return await asyncio.to_thread(_bytes_of, flat)

    async def _tensor(self, request: web.Request, body: Mapping[str, Any]) -> bytes:
        tensor = self._sets[request.match_info["set"]][request.query["name"]]
        return await asyncio.to_thread(_bytes_of, tensor)

    async def _release(self, request: web.Request, body: Mapping[str, Any]) -> None:
        name = request.match_info["set"]
        read = self._read[name]
        self._sets.pop(name, None)
        read.set()  # last: the trainer's thread may offer another one by this name now

    def _group(self, request: web.Request) -> Sender:
        return self.groups[request.match_info["id"]]

    def _flat(self, copy: int, bucket: int) -> Tensor:
        return self._copies[copy].buckets[bucket][1]


def _map_in(raw: bytes) -> Mapping[str, Any]:
    body = json_in(raw) if raw else {}
    if not isinstance(body, dict):
        raise ValueError(f"body: want a JSON map, got {type(body).__name__}")
    return body


def _seconds_in(body: Mapping[str, Any]) -> float:
    seconds = float(body["timeout_s"])
    if not 1e-3 <= seconds <= 1e6:
        raise ValueError(f"timeout_s: want 0.001 to 1,000,000, got {seconds}")
    return seconds


def _bytes_of(tensor: Tensor) -> bytes:
    with beside(tensor):
        return bytes(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
