"""Parts of the weights in the memory of other ranks of the learner, each behind a server (``part_server``), as rank 0
uses them.

    rank 0: request of a push  -> PartServer of rank k: its process group broadcasts a bucket of its copy
            handle of a bucket -> an engine on that host maps it
            checksum report    -> compared with the copy there
            a tensor           -> read once, for a snapshot on rank 0's disk

A part is a few layers of a model. Every rank that sends one has as many copies of it as rank 0 has of its own, with the
same numbers.
"""

import asyncio
import http.client
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from torch import Tensor

from tidemill.bus.http.client import ApiClient, CallFailed
from tidemill.bus.keys import Keys
from tidemill.bus.system.processes import direct_opener
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import PartLost, PeerLost
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket, Manifest, TensorSpec, joined
from tidemill.weightstore.transport.nccl import DeviceEnd

_log = logging.getLogger(__name__)

ANSWER_S = 30.0  # Deadline in seconds of a request that waits for nothing but the rank
GRACE_S = 5.0  # Seconds beyond the deadline of a call in the other rank, in which its answer arrives
CHECK_S = 5.0  # Deadline in seconds of a request that is answered at once
FETCH_S = 120.0  # Deadline in seconds of each wait for a tensor's bytes


RELEASE_S = 600.0  # Time in seconds for which the release of a set of tensors is repeated: its rank waits for it
_AGAIN_S = 1.0


def staged(number: int) -> str:
    """Return the name of the set of tensors in a staging copy; sets are numbered as the copies are."""
    return f"staged-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """The address of a part, and all that rank 0 needs to know of it."""

    rank: int
    """Global rank."""
    url: str
    key: str = field(repr=False)
    """Its server requires it."""
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    end: DeviceEnd = field(default_factory=DeviceEnd)
    """The GPU of its rank."""
    domain: str = ""
    """Where its memory can be opened (``shared_memory_domain``)."""


@dataclass(frozen=True, slots=True)
class Division:
    """The tensors of a model, divided among the ranks that send them."""

    local: Manifest
    """The tensors that this process sends."""
    remote: tuple[PartPlace, ...] = ()
    """The parts that other ranks send."""

    @property
    def whole(self) -> Manifest:
        """All tensors, first the tensors that this process sends."""
        return joined([self.local, *(Manifest(place.specs) for place in self.remote)])


@dataclass(frozen=True, slots=True)
class RemoteBucket:
    """A bucket of another rank's copy, in the place of its bytes."""

    part: "RemotePart"
    copy: int
    index: int
    num_bytes: int

    async def handle(self, ranks: int) -> Mapping[str, object]:
        """Return the handle of the bucket for an engine of ``ranks`` processes. Raises PartLost."""
        return await self.part.handle(self, ranks)

    async def tensor(self) -> Tensor:
        """Return the bytes, flat uint8, for a transport of another kind: they come to this process. Raises PartLost."""
        return await self.part.read(self)


Payload = Tensor | RemoteBucket  # The bytes of a bucket: flat uint8 in this process, or in another rank
Buckets = Sequence[tuple[Bucket, Payload]]  # Buckets of a version, in the order in which they are sent


class RemotePart:
    """The client of one part server.

    Every call raises PartLost when the rank is gone, too slow or failing, and PeerLost for an engine lost in its group.
    """

    def __init__(self, place: PartPlace, number: int, *, connect_s: float = ANSWER_S) -> None:
        """``number``: of the part, from 1. ``connect_s``: deadline for a connection."""
        self.place, self.number, self.manifest = place, number, Manifest(place.specs)
        self._buckets = self.manifest.buckets(place.bucket_bytes, number)
        self._api = ApiClient(place.url, self._lost, headers=self._headers, connect_s=connect_s)
        self._names = self.manifest.by_name.keys()
        self._handles: dict[tuple[RemoteBucket, int], Mapping[str, object]] = {}
        self._closings: set[asyncio.Task[None]] = set()

    def __str__(self) -> str:
        return f"rank {self.place.rank} of the learner"

    def buckets(self, copy: int) -> list[tuple[Bucket, RemoteBucket]]:
        """Return the buckets of a copy, in the order in which they are sent."""
        return [
            (bucket, RemoteBucket(self, copy, index, bucket.num_bytes)) for index, bucket in enumerate(self._buckets)
        ]

    async def host(self, name: str, world_size: int, backend: str, timeout_s: float, start_s: float) -> "RemoteSender":
        """Have the rank listen, within ``start_s``. Returns its process group, without a connection."""
        body = {"name": name, "world_size": world_size, "backend": backend, "timeout_s": timeout_s}
        answer = await self.ask("POST", "/groups", body, start_s)
        return RemoteSender(
            self, str(answer["id"]), name, str(answer["host"]), int(answer["port"]), world_size, backend, timeout_s
        )

    async def handle(self, bucket: RemoteBucket, ranks: int) -> Mapping[str, object]:
        """Return a bucket's handle, which is requested once: it stays the same as long as the copy exists."""
        if (bucket, ranks) not in self._handles:
            body = {"copy": bucket.copy, "bucket": bucket.index, "ranks": ranks}
            raw = await self._api.read("POST", "/handles", body, timeout_s=ANSWER_S)
            self._handles[bucket, ranks] = msgpack.unpackb(raw)  # the name of a GPU's memory in it is bytes
        return self._handles[bucket, ranks]

    async def read(self, bucket: RemoteBucket) -> Tensor:
        """Return the bytes of a bucket, flat uint8."""
        path = f"/buckets/{bucket.copy}/{bucket.index}"
        raw = await self._api.read("GET", path, timeout_s=FETCH_S)
        if len(raw) != bucket.num_bytes:
            raise PartLost(path, "reading", f"{self}: want {bucket.num_bytes} bytes, got {len(raw)}")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    async def differences(self, copy: int, report: ChecksumReport, timeout_s: float) -> list[str]:
        """Return the lines of ``Staging.differences`` for a copy, within ``timeout_s``."""
        ours = tuple(checksum for checksum in report.parts if not self._names.isdisjoint(checksum.names))
        body = {"copy": copy, "report": ChecksumReport(scheme=report.scheme, parts=ours).to_json()}
        answer = await self.ask("POST", "/differences", body, timeout_s)
        return [str(line) for line in answer["lines"]]

    async def check(self) -> None:
        """Return if the rank answers."""
        await self.ask("GET", "/alive", {}, CHECK_S)

    async def ask(self, method: str, path: str, body: Mapping[str, object], timeout_s: float) -> JsonMapping:
        """Return the map in the answer."""
        answer = await self._api.call(method, path, body, timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise PartLost(path, "asking", f"{self}: want a map, got {answer!r:.200}")
        return answer

    def run_beside(self, closing: Coroutine[object, None, None]) -> None:
        """Run the end of a group, without waiting for the rank; ``close`` cancels it."""
        task = asyncio.create_task(closing)
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def close(self) -> None:
        """Close the connections; groups that are not closed yet are closed by their rank when it ends."""
        closings = tuple(self._closings)
        for closing in closings:
            closing.cancel()
        await asyncio.gather(*closings, return_exceptions=True)
        await self._api.close()

    async def _headers(self) -> Mapping[str, str]:
        return Keys.of(self.place.key).headers

    def _lost(self, failed: CallFailed) -> PeerLost:
        if failed.answer.get("lost"):
            return PeerLost(failed.path, "asking", f"{self}: {failed.reason}")
        return PartLost(failed.path, "asking", f"{self}: {failed.reason}")


class RemoteSender:
    """A process group whose rank 0 is another rank of the learner. Calls come from one event loop."""

    def __init__(
        self,
        part: RemotePart,
        group_id: str,
        name: str,
        host: str,
        port: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        self.part, self._path, self._timeout_s = part, f"/groups/{group_id}", timeout_s
        self.name, self.host, self.port, self.world_size, self.backend = name, host, port, world_size, backend

    async def meet(self) -> None:
        """Wait until every rank is connected. Raises PeerLost."""
        await self.part.ask("POST", f"{self._path}/meet", {}, self._timeout_s + GRACE_S)

    async def send(self, payload: RemoteBucket, following: RemoteBucket | None, timeout_s: float) -> None:
        """Have the rank broadcast a bucket of its copy, as ``BroadcastGroup.send``. Raises PeerLost."""
        body = {
            "copy": payload.copy,
            "bucket": payload.index,
            "following": None if following is None else following.index,
            "timeout_s": timeout_s,
        }
        await self.part.ask("POST", f"{self._path}/send", body, timeout_s + GRACE_S)

    def close(self) -> None:
        """Have the rank close its end, without waiting for it; a call under way there ends by its deadline."""
        self.part.run_beside(self.delete())

    async def delete(self) -> None:
        """Have the rank close its end, and repeat the request while there is no answer."""
        for pause_s in (1.0, 5.0, 25.0, 0.0):
            try:
                await self.part.ask("DELETE", self._path, {}, ANSWER_S)
                return
            except PeerLost as error:
                _log.info("group not closed group=%s reason=%s", self.name, error)
            await asyncio.sleep(pause_s)


class PartTensors(Mapping[str, Tensor]):
    """Another rank's set of tensors: each is read when it is requested, and not kept. Blocking; raises OSError."""

    def __init__(self, place: PartPlace, name: str) -> None:
        """``name`` of the set, for example ``staged(0)``."""
        self._place, self._name = place, name
        self._specs = {spec.name: spec for spec in place.specs}

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        raw = bytearray(_asked(self._place, "GET", f"/tensors/{self._name}?{urllib.parse.urlencode({'name': name})}"))
        if len(raw) != spec.num_bytes:
            raise OSError(
                f"{name}: want {spec.num_bytes} bytes of rank {self._place.rank} of the learner, got {len(raw)}"
            )
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class _Answered(OSError):
    """The rank has answered, with an error."""


def leave(place: PartPlace) -> None:
    """Let another rank end: no further request will follow. Blocking; raises OSError."""
    _asked(place, "POST", "/leave", timeout_s=CHECK_S)


def release(place: PartPlace, name: str, within_s: float = RELEASE_S) -> None:
    """Release a set of tensors in another rank, which waits; repeated for ``within_s``. Blocking; raises OSError."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            _asked(place, "DELETE", f"/tensors/{name}")
            return
        except OSError as error:
            gone = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
            if gone or isinstance(error, _Answered) or time.monotonic() >= deadline:
                raise
        time.sleep(_AGAIN_S)


def _asked(place: PartPlace, method: str, path: str, timeout_s: float = FETCH_S) -> bytes:
    request = urllib.request.Request(place.url + path, method=method, headers=Keys.of(place.key).headers)
    try:
        with direct_opener().open(request, timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise _Answered(f"{path}: rank {place.rank} of the learner: {error}: {error.read()[:500]!r}") from None
    except http.client.HTTPException as error:
        raise OSError(f"{path}: rank {place.rank} of the learner: {error!r}") from error
