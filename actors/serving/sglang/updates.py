"""New weights for a running SGLang server: paused, received, continued. Never served in part.

    begin = pause, open -> bucket, bucket, ... -> end = close, continue
                                    (refused unless every tensor came exactly once)

SGLang receives directly into the weights it serves, so nothing is generated meanwhile: requests wait where they are and continue with
the new weights. A push that breaks off leaves torn weights (of two versions): the server stays paused, ``version`` is -1, and only a
complete update (the next push, or a snapshot) makes it serve again.

A colocated server releases the memory of weights, keys and values in between. SGLang ends when it is to release memory while it is not
idle, or to resume memory that it has: so it is paused with ``retract`` first, and only changes are requested.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from actors.errors import BadRequest, CannotTell, EngineError, StaleEpoch, UpdateRefused
from actors.serving.sglang.api import Api
from actors.serving.sglang.checksums import Layout, told_of
from actors.serving.sglang.tensors import SharedBucket
from weightstore.errors import WeightstoreError
from weightstore.format.checksums import ChecksumReport
from weightstore.format.manifest import TensorSpec
from weightstore.transport.handles import Offered

log = logging.getLogger(__name__)

COMMAND_S = 60.0
LOAD_S = 600.0
LISTENING_S = 5.0
NO_BRACKET = "no weight-update session is open"
"""Part of SGLang's error when there is no update to end."""
HEAD = "lm_head.weight"
"""Output projection, which may be sent, or left out, where it is tied to the embedding."""
Result = TypeVar("Result")


class WeightUpdates:
    """Owner of the order of updates of one server."""

    def __init__(
        self,
        api: Api,
        names: frozenset[str],
        layout: Layout,
        *,
        pause: str,
        ranks: int = 1,
        on_update: Callable[[int, int], None],
    ) -> None:
        """``names``: every tensor of the model; ``pause``: in_place | retract; ``ranks``: processes of the server."""
        self.epoch = 0
        """Highest learner epoch seen."""
        self.version = -1
        """Version of the served weights; -1 = none are complete."""
        self.completed = 0
        self.stall_s = 0.0
        """Sum of the seconds for which updates have held up generation."""
        self._api, self._names, self._layout, self._pause, self._on_update = api, names, layout, pause, on_update
        self._ranks, self._shared = ranks, SharedBucket()
        self._flush = pause == "retract"  # otherwise retracted requests would find older weights' results in the cache
        self._open: int | None = None
        self._received: set[str] = set()
        self._paused: str | None = None
        """Mode of the pause; None = the server generates."""
        self._paused_s = 0.0
        self.paused_since_s, self.last_pause_s = float("inf"), (float("inf"), 0.0)
        """Times of time.monotonic: earliest beginning of the pause, inf = there is none; beginning and end of the pause before."""
        self._taking = False
        self.settled = asyncio.Event()
        """Set while no update is under way, or after one has broken off."""
        self.settled.set()
        self.released: frozenset[str] = frozenset()
        """Kinds of memory that are released: some of ``weights`` and ``kv_cache``."""
        self._bracket = False
        self._turn = asyncio.Lock()
        self.carried_out: asyncio.Task[Any] | None = None
        """The operation under way: the server may answer nothing else until it is done."""
        self._carried_out_s = 0.0
        self._patience_s = COMMAND_S
        """Seconds without an operation after which an open update counts as abandoned."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """Run an operation to its end, one at a time, even if the caller is cancelled: it is dropped then only if it has not begun."""

        async def alone() -> Result:
            try:
                async with self._turn:
                    self.carried_out = task
                    return await verb
            except UpdateRefused:
                if self.version < 0:
                    self.settled.set()  # requests need not wait for the end of an update that has broken off
                raise
            finally:
                if self.carried_out is task:
                    self.carried_out, self._carried_out_s = None, time.monotonic()
                verb.close()  # it may never have been begun

        task = asyncio.create_task(alone())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.carried_out is not task:
                task.cancel()
            raise

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def admit(self, epoch: int | None, what: str) -> None:
        """Record the epoch. Raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    @property
    def paused(self) -> str | None:
        """Mode of the pause; None = there is none."""
        return self._paused

    @property
    def under_way(self) -> bool:
        """True while new weights are received, for which generation waits."""
        return not self.settled.is_set()

    @property
    def keeps_cache(self) -> bool:
        """True when cached results of older weights stay after an update."""
        return not self._flush

    async def join(self, body: Mapping[str, Any]) -> None:
        """Join the process group that the body of /init_weights_update_group names; one of the same name is left first."""
        timeout_s = float(body.get("timeout_s", COMMAND_S))
        with contextlib.suppress(UpdateRefused):  # the server has no such group
            await self.leave(str(body.get("group_name", "weight_update_group")), timeout_s)
        await _want_listening(str(body.get("master_address", "")), int(body.get("master_port", 0)))
        await self._ask("/init_weights_update_group", _without_ours(body), timeout_s=timeout_s)

    async def leave(self, name: str, timeout_s: float = COMMAND_S) -> None:
        await self._ask("/destroy_weights_update_group", {"group_name": name}, timeout_s=timeout_s)
        await self.sender_left()

    async def sender_left(self) -> None:
        """Abandon an open update: the weights before it are served on, or, once they are torn, requests stop waiting for its end."""
        if self._open is None:
            return
        log.warning("update left alone version=%s, served=%d", self._open, self.version)
        if self.version >= 0 and not self.released:
            await self.free()
        else:
            self.settled.set()

    async def pause(self, mode: str) -> None:
        """Pause at a client's request: in_place | retract | abort."""
        before, self._paused = self._paused, mode  # the requests that it ends are answered before it is
        try:
            await self._ask_to_pause(mode)
        except UpdateRefused:
            self._paused = before
            raise
        if before is None:
            self._paused_s = time.perf_counter()

    async def go_on(self, body: Mapping[str, Any]) -> None:
        """Continue after a pause. Raises UpdateRefused while weights are not complete, memory is released, or an update is open."""
        if self.version < 0 or self.released:
            raise UpdateRefused("continue_generation: " + ("memory is released" if self.released else "the weights are not whole"))
        if self._open is not None:
            raise UpdateRefused(f"continue_generation: the update to version {self._open} is open")
        await self._ask("/continue_generation", _without_ours(body))
        self._resumed()

    async def free(self) -> None:
        """Make the server generate with its present weights, whatever state it was left in."""
        self._bracket = True
        await self._close_bracket()
        await self._continue()
        self._open = None
        self._resumed()

    async def let_go(self) -> None:
        """Generate again, with the same weights, if an update was abandoned before any bucket of it was received."""
        if not self._is_left_alone():
            return

        async def generate_again() -> None:
            if self._is_left_alone():
                log.warning("update left alone version=%s, version=%d is served on", self._open, self.version)
                await self.free()

        with contextlib.suppress(UpdateRefused):
            await self.carry_out(generate_again())

    def _is_left_alone(self) -> bool:
        idle = self.carried_out is None or self.carried_out is asyncio.current_task()
        silent = time.monotonic() - self._carried_out_s > self._patience_s
        return self._taking and self.version >= 0 and not self.released and idle and silent

    async def release(self, tags: frozenset[str], *, unfinished: int) -> None:
        """Release memory; with that of the weights an open update is discarded. Refused for unfinished requests without a pause."""
        if unfinished and self._paused is None:
            names = ", ".join(sorted(tags))
            raise UpdateRefused(f"release of {names}: {unfinished} requests are unfinished; want a pause first")
        new = tags - self.released
        if not new:
            return
        if self._paused != "retract":
            await self.pause("retract")
        if "weights" in new:
            await self._close_bracket()
            self._open, self.version, self._taking = None, -1, False
            self.settled.set()
        await self._ask("/release_memory_occupation", {"tags": sorted(new)})
        self.released |= new
        log.info("memory released tags=%s", ",".join(sorted(new)))

    async def resume(self, tags: frozenset[str]) -> None:
        """Take released memory again. Weights need an update then; with all memory there, complete weights are served again."""
        back = tags & self.released
        if back:
            await self._ask("/resume_memory_occupation", {"tags": sorted(back)})
            self.released -= back
            log.info("memory resumed tags=%s version=%d", ",".join(sorted(back)), self.version)
        paused = bool(back) or (self._paused is not None and "kv_cache" in tags)  # a release may have failed after its pause
        if paused and not self.released and self.version >= 0 and self._open is None:
            await self._continue()

    async def serve_directory(self, directory: Path, version: int | None) -> float:
        """Take released memory again, load a directory and serve it. Returns seconds as ``end``."""
        await self.resume(frozenset({"weights"}))
        stall_s = await self.load_directory(directory, version)
        await self.resume(frozenset({"kv_cache"}))
        return stall_s

    def _want_memory(self) -> None:
        if "weights" in self.released:
            raise UpdateRefused("the memory of the weights is released: want resume_memory_occupation first")

    async def begin(self, version: int | None, timeout_s: float = COMMAND_S) -> None:
        """Pause, and open an update; an unfinished one is replaced. Each request that follows takes at most ``timeout_s``."""
        if version is None:
            raise UpdateRefused("begin: want weight_version")
        self._want_memory()
        self._patience_s = max(COMMAND_S, 2 * timeout_s)
        await self._hold()
        if not self._bracket:
            await self._open_bracket()
        self._open, self._received = version, set()

    async def bucket(self, body: Mapping[str, Any], version: int | None) -> None:
        """Receive one message of the group into the weights."""
        names = [str(name) for name in body["names"]]
        self._check_bucket(names, version)
        await self._write("/update_weights_from_distributed", names, _without_ours(body), float(body.get("timeout_s", COMMAND_S)))

    async def take(self, specs: Sequence[TensorSpec], offered: Offered, *, version: int | None, timeout_s: float) -> None:
        """Make the server read one flat bucket, from memory that processes of this host can read, into the weights."""
        names = [spec.name for spec in specs]
        self._check_bucket(names, version)
        try:
            payloads = await asyncio.to_thread(self._shared.payloads, specs, offered, self._ranks)
        except WeightstoreError as error:
            raise UpdateRefused(str(error)) from error
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
        await self._write("/update_weights_from_tensor", names, body, timeout_s)

    def _check_bucket(self, names: Sequence[str], version: int | None) -> None:
        if self._open is None:
            raise UpdateRefused("a bucket came outside of an update: want begin_weight_update first")
        if version is not None and version != self._open:
            raise UpdateRefused(f"the open update is of version {self._open}, this bucket of version {version}")
        strange = [name for name in names if name not in self._names and name != HEAD]
        again = [name for name in names if name in self._received]
        if strange or again or len(set(names)) != len(names):
            raise UpdateRefused(f"{(strange or again or names)[0]}: " + ("the model has no such tensor" if strange else "came twice"))

    async def _write(self, path: str, names: Sequence[str], body: Mapping[str, Any], timeout_s: float) -> None:
        self.version = -1  # from here on the weights are torn until the end
        await self._ask(path, {**body, "flush_cache": self._flush, "weight_version": str(self._open)}, timeout_s=timeout_s)
        self._received.update(names)

    async def end(self, version: int | None) -> float:
        """Serve the received weights. Returns the seconds for which generation was held up. Raises UpdateRefused if a tensor is missing."""
        if self._open is None:
            raise UpdateRefused("end: there is no open update")
        if version is not None and version != self._open:
            raise UpdateRefused(f"end: the open update is of version {self._open}, not {version}")
        self._check_whole("end")
        await self._close_bracket()
        return await self._served(self._open)

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Load the weights from files. Returns seconds as ``end``."""
        if version is None:
            raise UpdateRefused("load: want weight_version")
        self._want_memory()
        await self._hold()
        await self._close_bracket()
        self._open, self.version = None, -1
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": self._flush}
        await self._ask("/update_weights_from_disk", body, timeout_s=LOAD_S)
        return await self._served(version)

    async def checksums(self) -> dict[str, str]:
        """Return checksums by parameter, as SGLang computes them on its first rank."""
        answer = await self._api.call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=LOAD_S)
        return dict(answer["ranks"][0]["checksums"])

    async def told(self, *, of_update: bool) -> tuple[int, ChecksumReport]:
        """Return version and checksums of the served weights, or of those of the open update, which must be complete."""
        if self._layout.not_comparable:
            raise CannotTell(self._api.url, self._layout.not_comparable)
        version = self._open if of_update else self.version
        if version is None:
            raise UpdateRefused("checksums: there is no open update")
        if of_update:
            self._check_whole("checksums")
        told = told_of(await self.checksums(), self._layout)
        if unknown := self._names - {name for part in told.parts for name in part.names}:
            raise CannotTell(self._api.url, f"SGLang keeps {len(unknown)} tensors under names unknown here, among them {min(unknown)}")
        return version, told

    def _check_whole(self, what: str) -> None:
        if missing := self._names - self._received - {HEAD}:
            raise UpdateRefused(f"{what}: {len(missing)} of {len(self._names)} tensors have not come, among them {min(missing)}")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shared.close()

    async def _hold(self) -> None:
        """Pause for an update; nothing is generated from here on."""
        if not (self._taking or self._paused in ("retract", self._pause)):
            begun = time.perf_counter()
            await self._ask_to_pause(self._pause)
            self._note_pause(self._pause, begun)
        self._taking = True
        self.settled.clear()

    def _note_pause(self, mode: str, begun_s: float | None = None) -> None:
        if self._paused is None:
            self._paused_s = time.perf_counter() if begun_s is None else begun_s
        self._paused = mode

    async def _continue(self) -> None:
        await self._ask("/continue_generation", {"torch_empty_cache": False})
        self._note_resume()

    def _resumed(self) -> None:
        """Record that no request waits for new weights, and that the server generates if it has its memory."""
        self._taking = False
        if not self.released:
            self._note_resume()
        self.settled.set()

    def _note_resume(self) -> None:
        self._paused = None
        if self.paused_since_s < float("inf"):
            self.paused_since_s, self.last_pause_s = float("inf"), (self.paused_since_s, time.monotonic())

    async def _ask_to_pause(self, mode: str) -> None:
        before = self.paused_since_s
        self.paused_since_s = min(before, time.monotonic())
        try:
            await self._ask("/pause_generation", {"mode": mode})
        except UpdateRefused as error:
            if isinstance(error.__cause__, BadRequest):  # otherwise the server may be paused all the same
                self.paused_since_s = before
            raise

    async def _open_bracket(self) -> None:
        try:
            await self._ask("/begin_weight_update", {})
        except UpdateRefused:  # the server may have one open that is not known here: another guard's, or one with a lost answer
            self._bracket = True
            await self._close_bracket()
            await self._ask("/begin_weight_update", {})
        self._bracket = True

    async def _close_bracket(self) -> None:
        if self._bracket:
            try:
                await self._ask("/end_weight_update", {})
            except UpdateRefused as error:
                if NO_BRACKET not in str(error):
                    raise
            self._bracket = False

    async def _served(self, version: int) -> float:
        """Continue with complete weights, if the server has all its memory. Returns the seconds for which generation was held up."""
        if not self.released:
            await self._continue()
        stall_s = time.perf_counter() - self._paused_s
        self._open = None
        self.version, self.completed, self.stall_s = version, self.completed + 1, self.stall_s + stall_s
        log.info("weights updated version=%d stall_s=%.4f", version, stall_s)
        self._resumed()
        self._on_update(version, self.epoch)
        return stall_s

    async def _ask(self, path: str, body: Mapping[str, Any], *, timeout_s: float = COMMAND_S) -> None:
        try:
            answer = await self._api.call("POST", path, body, timeout_s=timeout_s)
        except BadRequest as error:
            raise UpdateRefused(error.reason) from error
        except EngineError as error:
            raise UpdateRefused(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpdateRefused(f"{path}: {answer.get('message')}")


async def _want_listening(host: str, port: int) -> None:
    """Raise UpdateRefused where a group is gone: the server would retry for minutes without an answer."""
    with contextlib.suppress(OSError, TimeoutError):  # with any other error the server may still reach it
        try:
            async with asyncio.timeout(LISTENING_S):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            raise UpdateRefused(f"joining at {host}:{port}: nobody listens there") from None
        except ValueError as error:
            raise UpdateRefused(f"joining at {host!r}: no name of a host: {error}") from None
        writer.close()
        await writer.wait_closed()


def _without_ours(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("epoch", "timeout_s")}
