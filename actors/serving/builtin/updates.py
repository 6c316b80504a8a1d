"""New weights for a running engine: received into a standby copy, flipped in when complete, never served in part.

    begin -> bucket, bucket, ... -> end = flip between two decoding steps
                                    (refused unless every tensor came exactly once)

Any failure before the flip (a lost peer, a deadline, a wrong tensor, another begin) discards the standby copy and leaves
the served weights as they are. Where the memory of the weights has been released there are none to serve: the first complete update after
its resume brings them, and until then nothing is generated. Knows no HTTP. Used in the loop's thread; blocking work runs in other threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from actors.errors import NotLent, StaleEpoch, UpdateRefused
from actors.serving.builtin.filling import fill_from_bucket, fill_from_directory, report_of_weights, seal
from actors.serving.builtin.receiving import Group, Incoming, Joined
from actors.serving.builtin.scheduler import KV_CACHE, WEIGHTS, Scheduler
from actors.serving.builtin.weights import EMBEDDING, HEAD, Weights
from weightstore.errors import WeightstoreError
from weightstore.format.checksums import ChecksumReport, sha256
from weightstore.format.manifest import Bucket, TensorSpec
from weightstore.transport.handles import Offered

log = logging.getLogger(__name__)

CLOSE_S = 5.0
OPEN_S = 60.0
"""Seconds that an engine that catches up waits for a push to end, before it loads a directory instead."""
LOOK_S = 0.02
Result = TypeVar("Result")


@dataclass(slots=True)
class Update:
    """A push between begin and end."""

    epoch: int
    version: int | None
    received: dict[str, None] = field(default_factory=dict)
    """Names of the tensors received, in order of arrival."""
    coming: set[str] = field(default_factory=set)
    """Names of the tensors requested so far."""
    alias: Tensor | None = None
    """Output projection that was sent although it is tied to the embedding; kept to be compared."""
    is_sent: bool = True
    """True when the update comes in messages, not from a directory."""


class WeightUpdates:
    """Owner of the standby copy and of the order of updates."""

    def __init__(self, served: Weights, scheduler: Scheduler, *, on_update: Callable[[int, int], None]) -> None:
        self.epoch = 0
        """Highest learner epoch seen."""
        self.completed = 0
        self.stall_s = 0.0
        """Sum of the seconds for which flips have held up decoding."""
        self._shape, self._dtype, self._device = served.shape, served.dtype, served.device
        self._sizes = served.shape.tensors()
        if served.shape.tied:
            self._sizes[HEAD] = self._sizes[EMBEDDING]
        self._served: Weights | None = served
        self._scheduler, self._on_update = scheduler, on_update
        self._standby: Weights | None = None
        self._open: Update | None = None
        self._groups: dict[str, Joined] = {}
        self._order: tuple[str, ...] = ()
        """Names in the order of the last push: the next standby copy has this order in memory."""
        self._straight: set[asyncio.Future[Tensor]] = set()
        """Messages that are received directly into the standby copy. Nothing else may use that copy while one is late."""
        self._writing = asyncio.Lock()
        """Held while the standby copy is written or swapped."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """Run an operation of this class to its end even if the caller is cancelled: a client that hangs up must not
        release the standby copy while a thread still writes it."""
        task = asyncio.create_task(verb)
        self._tasks.add(task)
        task.add_done_callback(self._carried_out)
        return await asyncio.shield(task)

    def _carried_out(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has received it, or has gone

    def admit(self, epoch: int | None, what: str) -> None:
        """Record the epoch. Raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    # -- groups ---------------------------------------------------------------------------------------------------------

    async def join(self, name: str, connect: Callable[[], Group]) -> None:
        """Join a process group; one of the same name is left first."""
        if name in self._groups:
            await self.leave(name)
        self._groups[name] = Joined(await asyncio.to_thread(connect))

    async def leave(self, name: str) -> None:
        joined = self._group(name)
        del self._groups[name]
        await self.sender_left()
        await asyncio.to_thread(joined.close)

    async def sender_left(self) -> None:
        """Discard an open update that comes in messages: its sender sends no more of them."""
        if self._open is not None and self._open.is_sent:
            self._discard("its sender has left")

    def _group(self, name: str) -> Joined:
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

    # -- memory ---------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """True when there are weights to serve."""
        return self._served is not None

    async def release(self, tags: frozenset[str]) -> None:
        """Release memory; with that of the weights an open update is discarded. Raises UpdateRefused while requests are being decoded."""
        async with self._writing:
            tokens = await asyncio.wrap_future(self._scheduler.release(tags))
            if WEIGHTS in tags:
                if self._open is not None:
                    self._discard("the memory of the weights is released")
                self._served = self._standby = None
            _give_back(self._device)
        log.info("memory released tags=%s version=%d tokens_generated=%d", ",".join(sorted(tags)), self._scheduler.version, tokens)

    async def resume(self, tags: frozenset[str]) -> None:
        """Take released memory again. Weights need an update then; keys and values are usable at once, and with them a pause ends."""
        async with self._writing:
            await self._restore(tags)

    async def _restore(self, tags: frozenset[str]) -> None:
        tokens = await asyncio.wrap_future(self._scheduler.restore(tags))
        log.info("memory resumed tags=%s version=%d tokens_generated=%d", ",".join(sorted(tags)), self._scheduler.version, tokens)

    async def came_meanwhile(self, version: int) -> bool:
        """Wait for an open update, for ``OPEN_S`` at most. Returns whether this version, or a newer one, is served then."""
        if self._open is None:
            return False
        deadline = time.monotonic() + OPEN_S
        while self._open is not None and time.monotonic() < deadline:  # noqa: ASYNC110 - it ends in many ways
            await asyncio.sleep(LOOK_S)
        async with self._writing:  # the flip may be under way
            return self.whole and self._scheduler.version >= version

    async def serve_directory(self, directory: Path, version: int | None) -> float:
        """Take released memory again, load a directory and serve it; a release waits until that is done. Returns seconds as ``end``."""
        async with self._writing:
            had_released = bool(self._scheduler.released)
            if had_released:
                await self._restore(frozenset({WEIGHTS}))
            stall_s = await self._load(self._instead(version), directory)
            if had_released:
                await self._restore(frozenset({KV_CACHE}))
            return stall_s

    def _want_memory(self) -> None:
        if WEIGHTS in self._scheduler.released:
            raise UpdateRefused("the memory of the weights is released: want resume_memory_occupation first")

    # -- an update ------------------------------------------------------------------------------------------------------

    async def begin(self, version: int | None) -> None:
        """Open an update. An update that is open already is discarded."""
        self._want_memory()
        if self._open is not None:
            self._discard("another one begins")
        update = Update(self.epoch, version)
        self._set_open(update)
        async with self._writing:
            await self._ensure_standby()
        self._check_current(update)

    async def receive(
        self, group_name: str, buckets: Sequence[Sequence[TensorSpec]], *, version: int | None, timeout_s: float, serve: bool
    ) -> float | None:
        """Begin an update, receive every bucket as one flat message, each within the time-out, and with ``serve`` end the update.

        Returns seconds as ``end``, or None without ``serve``.
        """
        await self.begin(version)
        update = self._current()
        await self._receive_all(update, group_name, [_bucket_of(specs) for specs in buckets], timeout_s)
        return await self._end(update) if serve else None

    async def bucket(self, group_name: str, specs: Sequence[TensorSpec], *, flat: bool, version: int | None, timeout_s: float) -> None:
        """Receive tensors into the standby copy, flattened into one message or one by one."""
        update = self._current()
        update.version = version if version is not None else update.version
        # One by one is the same as buckets of one tensor each.
        messages = [specs] if flat else [[spec] for spec in specs]
        await self._receive_all(update, group_name, [_bucket_of(each) for each in messages], timeout_s)

    async def _receive_all(self, update: Update, group_name: str, buckets: Sequence[Bucket], timeout_s: float) -> None:
        """Receive buckets, each while the one before is written. Any failure discards the update and raises UpdateRefused."""
        specs = [spec for bucket in buckets for spec in bucket.specs]
        try:
            self._check(update, specs)
            joined = self._group(group_name)
            async with joined.in_use(timeout_s):
                self._check_current(update)
                self._check(update, specs)
                update.coming.update(spec.name for spec in specs)
                incoming: list[Incoming] = []
                try:
                    for bucket in buckets:
                        self._check_current(update)
                        incoming.append(await self._receive(joined, bucket, timeout_s))
                        if len(incoming) > 1:
                            await self._write(update, incoming.pop(0))
                    while incoming:
                        await self._write(update, incoming.pop(0))
                finally:
                    for message in incoming:
                        message.pass_over()
        except (UpdateRefused, WeightstoreError, TimeoutError) as error:
            if update is self._open:
                self._discard(str(error))
            if isinstance(error, UpdateRefused):
                raise
            num_bytes = sum(bucket.num_bytes for bucket in buckets)
            raise UpdateRefused(f"receiving {num_bytes} bytes over group {group_name!r}: {str(error) or 'it is in use'}") from error

    async def take(self, specs: Sequence[TensorSpec], offered: Offered, *, version: int | None, timeout_s: float) -> None:
        """Copy one flat bucket, from memory that this process can read, into the standby copy."""
        update = self._current()
        update.version = version if version is not None else update.version
        bucket = _bucket_of(specs)
        try:
            self._check(update, specs)
            update.coming.update(spec.name for spec in specs)
            if offered.num_bytes != bucket.num_bytes:
                raise UpdateRefused(f"bucket: want {bucket.num_bytes} bytes, which these tensors have, got {offered.num_bytes}")
            async with asyncio.timeout(timeout_s), self._writing:
                self._check_current(update)
                standby = self._standby
                assert standby is not None
                await self._write_standby(lambda: self._copy(update, standby, bucket, offered.tensor()))
                update.received.update(dict.fromkeys(spec.name for spec in specs))
        except (UpdateRefused, WeightstoreError, TimeoutError) as error:
            if update is self._open:
                self._discard(str(error))
            if isinstance(error, UpdateRefused):
                raise
            raise UpdateRefused(f"reading {bucket.num_bytes} bytes: {str(error) or 'not done in time'}") from error

    async def end(self, version: int | None) -> float:
        """Serve the received weights. Returns the seconds for which decoding was held up."""
        update = self._current()
        update.version = version if version is not None else update.version
        return await self._end(update)

    async def _end(self, update: Update) -> float:
        async with self._writing:
            try:
                self._current()  # another epoch may have taken over meanwhile
                self._check_complete(update)
                return await self._flip(update)
            except UpdateRefused as error:
                if update is self._open:
                    self._discard(str(error))
                raise

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Load all weights of a directory with safetensors, or none. Returns seconds as ``end``."""
        update = self._instead(version)
        async with self._writing:
            return await self._load(update, directory)

    def _instead(self, version: int | None) -> Update:
        """Open an update from a directory, in place of one that comes in messages."""
        self._want_memory()
        if self._open is not None:
            self._discard("weights are loaded from a directory instead")
        update = Update(self.epoch, version, is_sent=False)
        self._set_open(update)
        return update

    async def _load(self, update: Update, directory: Path) -> float:
        try:
            standby = await self._ensure_standby()
            await self._write_standby(lambda: fill_from_directory(standby, directory))
            self._check_current(update)
            update.received.update(dict.fromkeys(standby.named))
            self._check_complete(update)
            return await self._flip(update)
        except Exception as error:
            if update is self._open:
                self._discard(str(error))
            raise error if isinstance(error, UpdateRefused) else UpdateRefused(f"{directory}: {error}") from error

    async def checksums(self) -> dict[str, str]:
        """Return the digest of the bytes of every served tensor, by name, as SGLang computes it."""
        async with self._writing:  # a flip holds it, so these tensors are not written while they are read
            named = self._want_whole().named
            return await asyncio.to_thread(lambda: {name: sha256([tensor]) for name, tensor in named.items()})

    async def served(self) -> tuple[int, Weights]:
        """Return the served version and its weights; the next push but one writes into them (``Weights.writes``). Raises NotLent."""
        async with self._writing:
            if self._served is None:
                raise NotLent("the memory of the weights is released")
            return self._scheduler.version, self._served

    async def told(self, *, of_update: bool) -> tuple[int | None, ChecksumReport]:
        """Return version and checksums of the served weights, or of those of the open update, which must be complete."""
        async with self._writing:
            if not of_update:
                return self._scheduler.version, await asyncio.to_thread(report_of_weights, self._want_whole())
            update = self._current()
            try:
                self._check_whole(update)
            except UpdateRefused as error:
                self._discard(str(error))
                raise
            assert self._standby is not None
            return update.version, await asyncio.to_thread(report_of_weights, self._standby)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _want_whole(self) -> Weights:
        if self._served is None:
            raise UpdateRefused("there are no weights: their memory was released, and no whole update has come since")
        return self._served

    def _current(self) -> Update:
        if self._open is None:
            raise UpdateRefused("none has begun (or it was discarded): want begin_weight_update first")
        if self._open.epoch != self.epoch:
            self._discard(f"begun by epoch {self._open.epoch}, epoch {self.epoch} has taken over")
            raise UpdateRefused(f"none has begun in epoch {self.epoch}: want begin_weight_update first")
        return self._open

    def _check_current(self, update: Update) -> None:
        if update is not self._open:
            raise UpdateRefused("another one has begun")

    def _set_open(self, update: Update | None) -> None:
        self._open, self._scheduler.updating = update, update is not None

    def _discard(self, reason: str) -> None:
        log.warning("weight update discarded reason=%s served=%d", reason, self._scheduler.version)
        self._set_open(None)

    async def _ensure_standby(self) -> Weights:
        """Return a copy that can be written: a new one when there is none, when tensors come in another order, or when a push that broke
        off may still write the old one."""
        if self._standby is None or self._straight or self._standby.order != self._order:
            self._standby, self._straight = None, set()
            shape, order = self._shape, self._order
            self._standby = await asyncio.to_thread(lambda: Weights(shape, dtype=self._dtype, device=self._device, order=order))
        return self._standby

    def _check(self, update: Update, specs: Sequence[TensorSpec]) -> None:
        sizes, seen = self._sizes, set(update.coming)
        for spec in specs:
            if spec.name not in sizes:
                raise UpdateRefused(f"{spec.name}: the model has no tensor of this name")
            if spec.shape != sizes[spec.name]:
                raise UpdateRefused(f"{spec.name}: want shape {sizes[spec.name]}, got {spec.shape}")
            if not getattr(torch, spec.dtype).is_floating_point:
                raise UpdateRefused(f"{spec.name}: want floating-point numbers, got {spec.dtype}")
            if spec.name in seen:
                raise UpdateRefused(f"{spec.name}: received twice")
            seen.add(spec.name)

    async def _receive(self, joined: Joined, bucket: Bucket, timeout_s: float) -> Incoming:
        """Request the next message: into the standby copy if its tensors have the same layout there, else into memory of the group."""
        assert self._standby is not None
        place = self._standby.place(bucket)
        if place is not None:
            self._standby.writes += 1
        future = await joined.receive(bucket.num_bytes, timeout_s, place)
        if place is not None:
            self._straight.add(future)
            future.add_done_callback(self._straight.discard)
        return Incoming(bucket, joined, place, future)

    async def _write(self, update: Update, incoming: Incoming) -> None:
        """Wait for a message, and copy it into the standby copy unless it was received there."""
        bucket, place, message = incoming.bucket, incoming.place, await incoming.future
        self._straight.discard(incoming.future)  # the message is complete, though its callbacks may not have run yet
        try:
            async with self._writing:
                self._check_current(update)
                standby = self._standby
                assert standby is not None
                if place is None or message.data_ptr() != place.data_ptr():
                    await self._write_standby(lambda: self._copy(update, standby, bucket, message))
                update.received.update(dict.fromkeys(spec.name for spec in bucket.specs))
        finally:
            if place is None:
                incoming.joined.give_back(message)

    async def _write_standby(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread. If this is cancelled before the thread is done, the copy is abandoned: it may still be written."""
        try:
            await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self._standby = None
            raise

    def _copy(self, update: Update, standby: Weights, bucket: Bucket, message: Tensor) -> None:
        alias = fill_from_bucket(standby, bucket, message)
        update.alias = update.alias if alias is None else alias

    def _check_complete(self, update: Update) -> None:
        self._check_whole(update)
        if update.version is None:
            raise UpdateRefused("weight_version: want the version of these weights, got none")
        if update.version < self._scheduler.version:
            raise UpdateRefused(f"weight_version: want >= {self._scheduler.version}, which is served, got {update.version}")

    def _check_whole(self, update: Update) -> None:
        self._check_current(update)
        if self._straight:
            raise UpdateRefused(f"{len(self._straight)} buckets are still on their way")
        assert self._standby is not None
        missing = self._standby.named.keys() - update.received.keys()
        if missing:
            raise UpdateRefused(f"{len(missing)} of {len(self._standby.named)} tensors are missing, among them {min(missing)}")
        if update.alias is not None and not torch.equal(update.alias.to(self._standby.device), self._standby.named[EMBEDDING]):
            raise UpdateRefused(f"{HEAD}: differs from {EMBEDDING}, to which the model's configuration ties it")

    async def _flip(self, update: Update) -> float:
        assert self._standby is not None and update.version is not None
        new = self._standby
        if new.derives or self._device.type == "cuda":
            await self._write_standby(lambda: seal(new))
        self._check_current(update)
        self._open = None
        old, stall_s = await asyncio.wrap_future(self._scheduler.flip(new, update.version))
        self._scheduler.updating = self._open is not None
        self._served, self._standby = new, old
        if update.coming:
            self._order = tuple(update.received)
        self.completed += 1
        self.stall_s += stall_s
        log.info("weights version=%d epoch=%d stall_s=%.6f", update.version, update.epoch, stall_s)
        self._on_update(update.version, update.epoch)
        return stall_s


def _bucket_of(specs: Sequence[TensorSpec]) -> Bucket:
    return Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":  # so that another process can have it
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
