"""New weights for a running engine: received into a standby copy, flipped in when complete, never served in part.

    begin -> bucket, bucket, ... -> end = flip between two decoding steps
                                    (refused unless every tensor came exactly once)

Whatever goes wrong before the flip (a lost peer, a deadline, a wrong tensor, another begin) discards the standby copy and leaves
the served weights as they are. Knows no HTTP. Used in the loop's thread; what blocks runs in threads by name.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from actors.builtin.scheduler import Scheduler
from actors.builtin.weights import EMBEDDING, HEAD, Weights, read_safetensors
from actors.errors import StaleEpoch, UpdateRefused
from weightstore import delta, snapshot
from weightstore.checksums import Told, sha256, told_of
from weightstore.errors import WeightstoreError
from weightstore.manifest import Bucket, TensorSpec

log = logging.getLogger(__name__)

CLOSE_S = 5.0
Result = TypeVar("Result")


class Group(Protocol):
    """The receiving end of a push (``weightstore.broadcast``)."""

    def receive(self, nbytes: int, timeout_s: float | None = None) -> Tensor:
        """The next message; its memory is used again by the next call."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Joined:
    """A group, and who uses it."""

    group: Group
    in_use: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from receiving a message until it is written: the group has one buffer."""


@dataclass(slots=True)
class Update:
    """A push between begin and end."""

    epoch: int
    version: int | None
    received: set[str] = field(default_factory=set)
    alias: Tensor | None = None
    """An output projection sent although it is tied to the embedding: kept to be compared."""
    begun_s: float = field(default_factory=time.perf_counter)


class WeightUpdates:
    """Owner of the standby copy and of the order of updates."""

    def __init__(self, served: Weights, scheduler: Scheduler, *, on_update: Callable[[int, int], None]) -> None:
        self.epoch = 0
        """The highest seen."""
        self.completed = 0
        self.stall_s = 0.0
        """Seconds that flips have held up decoding, all together."""
        self._served, self._scheduler, self._on_update = served, scheduler, on_update
        self._standby: Weights | None = None
        self._open: Update | None = None
        self._groups: dict[str, Joined] = {}
        self._writing = asyncio.Lock()
        """Held while the standby copy is written or swapped."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """Run a verb of this class to its end even if the caller is cancelled: a client that hangs up must not
        release the standby copy while a thread still writes it."""
        task = asyncio.create_task(verb)
        self._tasks.add(task)
        task.add_done_callback(self._carried_out)
        return await asyncio.shield(task)

    def _carried_out(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, or has gone

    def admit(self, epoch: int | None, what: str) -> None:
        """Remember the epoch; raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    # -- groups ---------------------------------------------------------------------------------------------------------

    async def join(self, name: str, connect: Callable[[], Group]) -> None:
        """Enter a process group; one of the same name is left first."""
        if name in self._groups:
            await self.leave(name)
        self._groups[name] = Joined(await asyncio.to_thread(connect))

    async def leave(self, name: str) -> None:
        joined = self._group(name)
        del self._groups[name]
        await asyncio.to_thread(joined.group.close)

    def _group(self, name: str) -> Joined:
        if name not in self._groups:
            raise UpdateRefused(f"there is no group {name!r}; joined: {sorted(self._groups)}")
        return self._groups[name]

    async def close(self) -> None:
        """Leave all groups; what is under way gets a moment to end, and is cancelled then."""
        for name in list(self._groups):
            await self.leave(name)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # -- an update ------------------------------------------------------------------------------------------------------

    async def begin(self, version: int | None) -> None:
        """Open an update; one that is open is discarded."""
        if self._open is not None:
            self._discard("another one begins")
        self._set_open(Update(self.epoch, version))
        async with self._writing:
            await self._ensure_standby()

    async def bucket(self, group_name: str, specs: Sequence[TensorSpec], *, flat: bool, version: int | None, timeout_s: float) -> None:
        """Receive tensors, flattened into one message or one by one, into the standby copy."""
        update = self._current()
        update.version = version if version is not None else update.version
        whole = Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))
        # One by one is the same as buckets of one tensor each.
        buckets = [whole] if flat else [Bucket(specs=(spec,), num_bytes=spec.num_bytes) for spec in specs]
        try:
            self._check(update, specs)
            joined = self._group(group_name)
            async with asyncio.timeout(timeout_s):
                await joined.in_use.acquire()
            try:
                for bucket in buckets:
                    message = await asyncio.to_thread(joined.group.receive, bucket.num_bytes, timeout_s)
                    await self._write(update, bucket, message)
            finally:
                joined.in_use.release()
        except (UpdateRefused, WeightstoreError, TimeoutError) as error:
            if update is self._open:
                self._discard(str(error))
            if isinstance(error, UpdateRefused):
                raise
            raise UpdateRefused(f"receiving {whole.num_bytes} bytes over group {group_name!r}: {error or 'it is in use'}") from error

    async def end(self, version: int | None) -> float:
        """Serve what has been received; gives the seconds that decoding was held up."""
        update = self._current()
        update.version = version if version is not None else update.version
        async with self._writing:
            try:
                self._check_complete(update)
                return await self._flip(update)
            except UpdateRefused as error:
                self._discard(str(error))
                raise

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Take weights from a directory with safetensors, or a delta on what is served, whole or not at all; seconds as of ``end``."""
        if self._open is not None:
            self._discard("weights are loaded from a directory instead")
        update = Update(self.epoch, version)
        self._set_open(update)
        async with self._writing:
            try:
                standby = await self._ensure_standby()
                await asyncio.to_thread(self._fill, standby, directory)
                self._check_current(update)
                update.received.update(standby.named)
                self._check_complete(update)
                return await self._flip(update)
            except Exception as error:
                if update is self._open:
                    self._discard(str(error))
                raise error if isinstance(error, UpdateRefused) else UpdateRefused(f"{directory}: {error}") from error

    def _fill(self, standby: Weights, directory: Path) -> None:
        changes = delta.read(directory)
        if changes is None:
            fill_from_directory(standby, directory)
            return
        if changes.base != self._scheduler.version:
            raise UpdateRefused(f"{directory}: a delta on version {changes.base}, and version {self._scheduler.version} is served")
        standby.writes += 1
        for name, tensor in self._served.named.items():
            standby.named[name].copy_(tensor)
        delta.apply(directory, changes, standby.named)
        _seal(standby)

    async def checksums(self) -> dict[str, str]:
        """A digest of the bytes of every served tensor, by name, as SGLang has it."""
        async with self._writing:  # whoever flips holds it, so these tensors are not written while they are read
            return await asyncio.to_thread(lambda: {name: sha256([tensor]) for name, tensor in self._served.named.items()})

    async def served(self) -> tuple[int, Weights]:
        """The version that is served, and its weights; the next push but one writes into them (``Weights.writes``)."""
        async with self._writing:
            return self._scheduler.version, self._served

    async def told(self, *, of_update: bool) -> tuple[int | None, Told]:
        """Version and checksums of what is served, or of what the open update has brought: all of it, and not served yet."""
        async with self._writing:
            if not of_update:
                return self._scheduler.version, await asyncio.to_thread(_told, self._served)
            update = self._current()
            try:
                self._check_whole(update)
            except UpdateRefused as error:
                self._discard(str(error))
                raise
            assert self._standby is not None
            return update.version, await asyncio.to_thread(_told, self._standby)

    # -- inside -----------------------------------------------------------------------------------------------------------

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
        if self._standby is None:
            served = self._served
            self._standby = await asyncio.to_thread(Weights, served.shape, dtype=served.dtype, device=served.device)
        return self._standby

    def _check(self, update: Update, specs: Sequence[TensorSpec]) -> None:
        sizes = self._served.shape.tensors()
        if self._served.shape.tied:
            sizes[HEAD] = sizes[EMBEDDING]
        names = [spec.name for spec in specs]
        for spec in specs:
            if spec.name not in sizes:
                raise UpdateRefused(f"{spec.name}: the model has no tensor of this name")
            if spec.shape != sizes[spec.name]:
                raise UpdateRefused(f"{spec.name}: want shape {sizes[spec.name]}, got {spec.shape}")
            if not getattr(torch, spec.dtype).is_floating_point:
                raise UpdateRefused(f"{spec.name}: want floating-point numbers, got {spec.dtype}")
            if spec.name in update.received or names.count(spec.name) > 1:
                raise UpdateRefused(f"{spec.name}: received twice")

    async def _write(self, update: Update, bucket: Bucket, message: Tensor) -> None:
        async with self._writing:
            self._check_current(update)
            self._check(update, bucket.specs)  # again: another bucket may have been written meanwhile
            assert self._standby is not None
            await asyncio.to_thread(_copy, update, self._standby, bucket, message)
            update.received.update(spec.name for spec in bucket.specs)

    def _check_complete(self, update: Update) -> None:
        self._check_whole(update)
        if update.version is None:
            raise UpdateRefused("weight_version: want the version of these weights, got none")
        if update.version < self._scheduler.version:
            raise UpdateRefused(f"weight_version: want >= {self._scheduler.version}, which is served, got {update.version}")

    def _check_whole(self, update: Update) -> None:
        self._check_current(update)
        assert self._standby is not None
        missing = self._standby.named.keys() - update.received
        if missing:
            raise UpdateRefused(f"{len(missing)} of {len(self._standby.named)} tensors are missing, among them {min(missing)}")
        if update.alias is not None and not torch.equal(update.alias.to(self._standby.device), self._standby.named[EMBEDDING]):
            raise UpdateRefused(f"{HEAD}: differs from {EMBEDDING}, to which the model's configuration ties it")

    async def _flip(self, update: Update) -> float:
        assert self._standby is not None and update.version is not None
        new = self._standby
        await asyncio.to_thread(_seal, new)
        self._check_current(update)
        self._open = None
        old, stall_s = await asyncio.wrap_future(self._scheduler.flip(new, update.version))
        self._scheduler.updating = self._open is not None
        self._served, self._standby = new, old
        self.completed += 1
        self.stall_s += stall_s
        log.info("weights version=%d epoch=%d stall_s=%.6f", update.version, update.epoch, stall_s)
        self._on_update(update.version, update.epoch)
        return stall_s


def fill_from_directory(weights: Weights, directory: Path) -> None:
    """Fill and seal a set of weights; raises UpdateRefused unless every tensor is there once, with its shape.

    A snapshot is verified first, byte by byte (SnapshotBroken); a plain model directory has no checksums.
    """
    if (directory / snapshot.MANIFEST).exists():
        snapshot.verify(directory)
    filled: set[str] = set()
    weights.writes += 1
    for name, tensor in read_safetensors(directory):
        target = weights.named.get(name)
        if target is None and name == HEAD and weights.shape.tied:
            continue
        if target is None or name in filled:
            raise UpdateRefused(
                f"{directory}: {name}: " + ("there twice" if target is not None else "the model has no tensor of this name")
            )
        if target.shape != tensor.shape:
            raise UpdateRefused(f"{directory}: {name}: want shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
        target.copy_(tensor)
        filled.add(name)
    missing = weights.named.keys() - filled
    if missing:
        raise UpdateRefused(f"{directory}: {len(missing)} of {len(weights.named)} tensors are missing, among them {min(missing)}")
    _seal(weights)


def _told(weights: Weights) -> Told:
    return told_of(weights.named | ({HEAD: weights.named[EMBEDDING]} if weights.shape.tied else {}))


def _seal(weights: Weights) -> None:
    weights.seal()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)  # the decoding thread must not overtake the copies


def _copy(update: Update, standby: Weights, bucket: Bucket, message: Tensor) -> None:
    standby.writes += 1
    for spec, place in bucket.places():
        part, dtype = message[place], getattr(torch, spec.dtype)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()  # a sender that mixes types need not align them
        tensor = part.view(dtype).view(spec.shape)
        if spec.name in standby.named:
            standby.named[spec.name].copy_(tensor)
        else:
            update.alias = tensor.to(standby.dtype, copy=True)


def parse_specs(names: Iterable[str], dtypes: Iterable[str], shapes: Iterable[Iterable[int]]) -> list[TensorSpec]:
    """As announced in SGLang's JSON; raises UpdateRefused for what no tensor can have."""
    try:
        return [
            TensorSpec(name=str(name), shape=tuple(map(int, shape)), dtype=str(dtype).removeprefix("torch."))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
    except (WeightstoreError, TypeError, ValueError) as error:
        raise UpdateRefused(str(error)) from error
