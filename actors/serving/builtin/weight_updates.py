"""New weights for a running engine: received into a standby copy, flipped in when complete, never served in part.

    begin -> bucket, bucket, ... -> end = flip between two decoding steps
                                    (refused unless every tensor was received exactly once)

An update may have an adapter: together with all weights, or alone. Alone it is added to the served weights, which stay
as they are, and no standby copy is needed.

Any failure before the flip (a lost peer, a deadline, a wrong tensor, another begin) discards the standby copy and
leaves the served weights as they are. Where the memory of the weights has been released there are none to serve: the
first complete update after its resume brings them, and until then nothing is generated. Used in the loop's thread;
blocking work runs in other threads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from tidemill.actors.errors import PeerTransferRefused, UpdateRefused
from tidemill.actors.http_api import decode
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.receiving import Incoming, JoinedGroup, Update, bucket_of
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.weight_copies import ServedWeights, Standby
from tidemill.actors.serving.builtin.weights import WeightSet, empty_cache
from tidemill.actors.serving.command_bodies import BucketBody, UpdateBody
from tidemill.actors.serving.port import COMMAND_S, Body
from tidemill.actors.serving.updates import KV_CACHE, WEIGHTS, Updates
from tidemill.bus.system.functions import errors_as
from tidemill.weightstore.errors import WeightstoreError
from tidemill.weightstore.format import adapters
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.format.checksums import ChecksumReport, report_checksums
from tidemill.weightstore.format.manifest import Bucket, TensorSpec
from tidemill.weightstore.store import snapshot_files
from tidemill.weightstore.transport.handles import Offered

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that operations under way have to end when the engine is closed."""


class BuiltinUpdates(Updates):
    """Owner of the order of updates, and of the two copies of the weights (see ``weight_copies.py``)."""

    def __init__(self, served: WeightSet, scheduler: Scheduler, *, on_update: Callable[[int, int], None]) -> None:
        super().__init__(on_update)
        self._sizes = {name: tuple(tensor.shape) for name, tensor in served.with_alias().items()}
        self._sizes |= served.unused
        self._served, self._standby = ServedWeights(served), Standby(served)
        self._scheduler = scheduler
        self._open: Update | None = None
        self._groups: dict[str, JoinedGroup] = {}
        self.writing = asyncio.Lock()
        """Held while the standby copy is written or swapped."""

    # -- groups

    async def join(self, body: Body) -> None:
        name = decode(body, UpdateBody).group_name
        if name in self._groups:
            await self.leave(name)
        self._groups[name] = await JoinedGroup.join(name, body)

    async def leave(self, group_name: str) -> None:
        group = self._group(group_name)
        del self._groups[group_name]
        await self.sender_left()
        await asyncio.to_thread(group.close)

    async def sender_left(self) -> None:
        if self._open is not None and self._open.is_sent:
            self._discard("its sender has left")

    def _group(self, name: str) -> JoinedGroup:
        if name not in self._groups:
            raise UpdateRefused(f"there is no group {name!r}; joined: {sorted(self._groups)}")
        return self._groups[name]

    async def close(self) -> None:
        """Leave all groups. Operations under way have ``CLOSE_S`` seconds to end, and are cancelled then."""
        for name in list(self._groups):
            await self.leave(name)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # -- state, pauses and memory

    @property
    def version(self) -> int:
        """Version of the served weights, as the decoding thread has it."""
        return self._scheduler.version

    @property
    def weights(self) -> WeightSet | None:
        """Weights that requests are answered with; None while their memory is released."""
        return self._served.weights

    @property
    def standby(self) -> WeightSet | None:
        """Copy that the next update is written into, from the first update on."""
        return self._standby.weights

    @property
    def open_update(self) -> Update | None:
        """Update that has begun and not ended."""
        return self._open

    @property
    def groups(self) -> Mapping[str, JoinedGroup]:
        """Groups of senders that this engine has joined, by name."""
        return self._groups

    @property
    def whole(self) -> bool:
        return self._served.weights is not None

    @property
    def released(self) -> frozenset[str]:
        return self._scheduler.released

    async def pause(self, mode: str) -> None:
        await asyncio.wrap_future(self._scheduler.pause(mode))

    async def continue_generation(self, body: Body) -> None:
        await asyncio.wrap_future(self._scheduler.resume())

    async def release(self, tags: frozenset[str]) -> None:
        """Release memory; with ``weights`` both copies are dropped."""
        async with self.writing:
            tokens = await asyncio.wrap_future(self._scheduler.release(tags))
            if WEIGHTS in tags:
                if self._open is not None:
                    self._discard("the memory of the weights is released")
                self._served.replace(None, None)
                self._standby.drop()
            await asyncio.to_thread(empty_cache, self._scheduler.device)
        self._log_memory("released", tags, tokens)

    async def resume(self, tags: frozenset[str]) -> None:
        async with self.writing:
            await self._restore(tags)

    async def _restore(self, tags: frozenset[str]) -> None:
        self._log_memory("resumed", tags, await asyncio.wrap_future(self._scheduler.restore(tags)))

    def _log_memory(self, change: str, tags: frozenset[str], tokens: int) -> None:
        names = ",".join(sorted(tags))
        log.info("memory %s tags=%s version=%d tokens_generated=%d", change, names, self.version, tokens)

    async def between_updates(self, timeout_s: float) -> None:
        """Wait while an update is open, for ``timeout_s`` at most, and for the end of a flip."""
        await super().between_updates(timeout_s)
        async with self.writing:
            pass

    async def serve_directory(self, directory: Path, version: int | None, *, begun: int) -> float | None:
        async with self.writing:  # a release waits until it is done
            if self.begun != begun:
                return None
            had_released = bool(self.released)
            if had_released:
                await self._restore(frozenset({WEIGHTS}))
            stall_s = await self._load(self._open_from_directory(version), directory)
            if had_released:
                await self._restore(frozenset({KV_CACHE}))
            return stall_s

    # -- an update

    async def begin(
        self, version: int | None, timeout_s: float = COMMAND_S, adapter: AdapterHeader | None = None
    ) -> None:
        """Open an update, with a standby copy to write unless it has an adapter alone. ``timeout_s`` is not used: each
        bucket has its own.
        """
        update = self._open_update(version, "another one begins", adapter=adapter)
        self.begun += 1
        async with self.writing:
            if update.has_weights:
                await self._standby.prepare()
            else:
                assert adapter is not None
                with self._discarding(update, "adapter"):
                    await self._served.require_base(adapter.base)
        self._check_current(update)

    async def receive(
        self,
        buckets: Sequence[tuple[str, Sequence[TensorSpec]]],
        *,
        version: int | None,
        timeout_s: float,
        serve: bool,
        adapter: AdapterHeader | None = None,
    ) -> float | None:
        """Begin an update, receive every bucket within ``timeout_s`` each over the named process group, and with
        ``serve`` end it. Returns seconds as ``end``, or None without ``serve``.
        """
        await self.begin(version, adapter=adapter)
        update = self._current()
        for group_name, messages in groupby(buckets, key=lambda named: named[0]):
            await self._receive_all(update, group_name, [bucket_of(specs) for _, specs in messages], timeout_s)
        return await self._end(update) if serve else None

    async def receive_bucket(self, body: Body, version: int | None) -> None:
        bucket = decode(body, BucketBody)
        specs, update = bucket.specs(), self._current(version)
        # One by one is the same as buckets of one tensor each.
        messages = [[spec] for spec in specs] if bucket.load_format is None else [specs]
        await self._receive_all(update, bucket.group_name, [bucket_of(specs) for specs in messages], bucket.timeout_s)

    async def _receive_all(self, update: Update, group_name: str, buckets: Sequence[Bucket], timeout_s: float) -> None:
        """Receive buckets, each while the one before is written. Any failure discards the update."""
        specs = [spec for bucket in buckets for spec in bucket.specs]
        doing = f"receiving {sum(bucket.num_bytes for bucket in buckets)} bytes over group {group_name!r}"
        with self._discarding(update, doing, at_timeout="it is in use"):
            update.check_new(specs, self._sizes)
            group = self._group(group_name)
            async with group.in_use(timeout_s):
                # Again: another request may have announced them while this one waited for the group.
                self._check_current(update)
                update.announce(specs, self._sizes)
                incoming: list[Incoming] = []
                into_buffers = False
                try:
                    for bucket in buckets:
                        self._check_current(update)
                        incoming.append(await self._receive(update, group, bucket, timeout_s))
                        into_buffers |= incoming[-1].place is None
                        if len(incoming) > 1:
                            await self._write(update, incoming.pop(0))
                    while incoming:
                        await self._write(update, incoming.pop(0))
                finally:
                    for message in incoming:
                        message.discard()
                    # Each rank of the learner that sends has a group. From the third push of weights on, messages are
                    # received into the standby copy and need no buffers; those of adapters always need them.
                    if len(self._groups) > 1 or not into_buffers:
                        group.drop_buffers()

    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        """Copy one flat bucket of the learner's memory into the standby copy. Any failure discards the update."""
        update = self._current(version)
        with self._discarding(update, f"reading {bucket.num_bytes} bytes", at_timeout="not done in time"):
            update.announce(bucket.specs, self._sizes)
            if offered.num_bytes != bucket.num_bytes:
                raise UpdateRefused(
                    f"bucket: want {bucket.num_bytes} bytes, which these tensors have, got {offered.num_bytes}"
                )
            async with asyncio.timeout(timeout_s), self.writing:
                await self._store(update, bucket, offered.tensor)
                if update.has_weights and self._standby.is_filled_by(update.received):
                    await self._standby.finalized()  # here, so that the end takes less time

    async def end(self, version: int | None) -> float:
        return await self._end(self._current(version))

    async def _end(self, update: Update) -> float:
        async with self.writing:
            with self._discarding(update, "end"):
                self._current()  # another epoch may have taken over meanwhile
                self._check_whole(update)
                return await self._flip(update)

    async def load_directory(self, directory: Path, version: int | None) -> float:
        update = self._open_from_directory(version)
        async with self.writing:
            return await self._load(update, directory)

    def _open_update(
        self, version: int | None, reason: str, *, is_sent: bool = True, adapter: AdapterHeader | None = None
    ) -> Update:
        """Open an update. One that is open is discarded for the ``reason``."""
        self._require_weight_memory()
        if self._open is not None:
            self._discard(reason)
        incoming = None if adapter is None else self._served.incoming_adapter(adapter)
        update = Update(self.epoch, version, is_sent=is_sent, adapter=incoming)
        self._set_open(update)
        return update

    def _open_from_directory(self, version: int | None) -> Update:
        return self._open_update(version, "weights are loaded from a directory instead", is_sent=False)

    async def _load(self, update: Update, directory: Path) -> float:
        # safetensors raises its own errors
        refused = errors_as(lambda error: UpdateRefused(f"{directory}: {error}"), but=(UpdateRefused,))
        with self._discarding(update, str(directory)), refused:
            if (directory / adapters.CONFIG).exists():
                return await self._load_adapter(update, directory)
            standby = await self._standby.load(directory)
            self._check_current(update)
            update.received.update(dict.fromkeys(standby.named))
            self._check_whole(update)
            return await self._flip(update)

    async def _load_adapter(self, update: Update, directory: Path) -> float:
        """Load a snapshot of an adapter alone. Raises SnapshotBroken, UpdateRefused for one of other weights."""
        await asyncio.to_thread(snapshot_files.verify, directory)
        header, tensors = await asyncio.to_thread(adapters.read_directory, directory)
        await self._served.require_base(header.base)
        incoming = self._served.incoming_adapter(header)
        await asyncio.to_thread(incoming.load, tensors)
        self._check_current(update)
        update.adapter = incoming
        self._check_whole(update)
        return await self._flip(update)

    async def load_adapter(self, name: str, directory: Path, version: int) -> None:
        """Serve an adapter in PEFT's format to the requests that name it, until other weights are served. Raises
        UpdateRefused for one that does not fit, is not finite, or one whose base has another digest.
        """
        try:
            header, tensors = await asyncio.to_thread(adapters.read_directory, directory)
        except (OSError, WeightstoreError, SafetensorError) as error:
            raise UpdateRefused(f"lora_path: {error}") from error
        incoming = self._served.incoming_adapter(header)
        await asyncio.to_thread(incoming.load, tensors)
        await asyncio.to_thread(incoming.check_finite)
        async with self.writing:
            if header.base:
                await self._served.require_base(header.base)
            adapter = await asyncio.to_thread(incoming.built)
            await asyncio.wrap_future(self._scheduler.set_adapter(name, adapter, version))
        log.info("adapter loaded name=%s version=%d directory=%s", name, version, directory)

    async def checksums(self) -> dict[str, str]:
        async with self.writing:  # a flip holds it, so these tensors are not written while they are read
            return await self._served.checksums()

    async def served(self) -> tuple[int, WeightSet, Adapter | None]:
        """Return the served version, its weights, into which the next push of weights but one writes, and the adapter
        that is added to them.
        """
        async with self.writing:
            if self._served.weights is None:
                raise PeerTransferRefused("the memory of the weights is released")
            return self._scheduler.version, self._served.weights, self._served.adapter

    async def checksum_report(self, *, of: str) -> tuple[int | None, ChecksumReport]:
        async with self.writing:
            if of != "update":
                report = await self._served.report(with_adapter=of == "served")
                return self._scheduler.version, report
            update = self._current()
            with self._discarding(update, "checksums"):
                self._check_whole(update)
            received: dict[str, Tensor] = {}
            if update.has_weights:
                assert self._standby.weights is not None
                received |= self._standby.weights.with_alias()
            if update.adapter is not None:
                received |= update.adapter.named
            return update.version, await asyncio.to_thread(report_checksums, received)

    # -- inside

    def _current(self, version: int | None = None) -> Update:
        """Return the open update, with its version if that is given only now."""
        if self._open is None:
            raise UpdateRefused("none has begun (or it was discarded): want begin_weight_update first")
        if self._open.epoch != self.epoch:
            self._discard(f"begun by epoch {self._open.epoch}, epoch {self.epoch} has taken over")
            raise UpdateRefused(f"none has begun in epoch {self.epoch}: want begin_weight_update first")
        if version is not None:
            self._open.version = version
        return self._open

    def _check_current(self, update: Update) -> None:
        if update is not self._open:
            raise UpdateRefused("another one has begun")

    def _set_open(self, update: Update | None) -> None:
        self._open, self._scheduler.updating = update, update is not None
        (self.settled.set if update is None else self.settled.clear)()

    def _discard(self, reason: str) -> None:
        log.warning("weight update discarded reason=%s served=%d", reason, self._scheduler.version)
        self._set_open(None)

    @contextmanager
    def _discarding(self, update: Update, doing: str, at_timeout: str = "") -> Iterator[None]:
        """Discard the update if this context fails, and raise UpdateRefused."""
        try:
            yield
        except (UpdateRefused, WeightstoreError, TimeoutError, RuntimeError) as error:  # CUDA's are RuntimeErrors
            if update is self._open:
                self._discard(str(error))
            if isinstance(error, UpdateRefused):
                raise
            raise UpdateRefused(f"{doing}: {str(error) or at_timeout}") from error

    async def _receive(self, update: Update, group: JoinedGroup, bucket: Bucket, timeout_s: float) -> Incoming:
        """Request the next message."""
        if update.adapter_of(bucket) is not None:
            return await group.receive(bucket, timeout_s)
        return await self._standby.receive(group, bucket, timeout_s)

    async def _write(self, update: Update, incoming: Incoming) -> None:
        """Wait for a message, and copy it to its tensors unless it was received there."""
        message = await incoming.future
        try:
            async with self.writing:
                if incoming.is_in_place(message):
                    self._check_current(update)
                    update.record(incoming.bucket)
                else:
                    await self._store(update, incoming.bucket, lambda: message)
        finally:
            incoming.return_buffer(message)

    async def _store(self, update: Update, bucket: Bucket, flat: Callable[[], Tensor]) -> None:
        """Copy a bucket into the adapter or the standby copy. ``flat`` is called in another thread."""
        self._check_current(update)
        if (adapter := update.adapter_of(bucket)) is not None:
            await asyncio.to_thread(lambda: adapter.add(bucket, flat()))
        else:
            update.aliases |= await self._standby.write(bucket, flat)
        update.record(bucket)

    def _check_whole(self, update: Update) -> None:
        self._check_current(update)
        self._standby.check_arrived()
        update.check_complete(self._standby.weights)

    async def _flip(self, update: Update) -> float:
        update.check_version(self._scheduler.version)
        assert update.version is not None
        incoming = update.adapter
        adapter = None if incoming is None else await asyncio.to_thread(incoming.built)
        new = await self._standby.finalized() if update.has_weights else self._served.require()
        self._check_current(update)
        # Not by _set_open: requests that end before the flip still count as ended while an update was open.
        self._open = None
        self.settled.set()
        old, stall_s = await asyncio.wrap_future(self._scheduler.flip(new, update.version, adapter))
        self._scheduler.updating = self._open is not None  # another update may have begun during the flip
        self._served.replace(new, adapter)
        if update.has_weights:
            self._standby.exchange(old, [name for name in update.received if name in self._sizes and update.announced])
        else:
            self._standby.drop()  # adapters need no second copy of the weights
        self._record_update(update.version, update.epoch, stall_s)
        return stall_s
