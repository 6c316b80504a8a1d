"""New weights for a running SGLang server: paused, received, continued. Never served in part.

    begin = pause, open -> bucket, bucket, ... -> end = close, continue
                                    (refused unless every tensor was received exactly once)

SGLang receives directly into the weights it serves, so nothing is generated meanwhile: requests wait where they are and
continue with the new weights. A push that breaks off leaves weights of two versions: the server stays paused,
``version`` is -1, and only a complete update (the next push, or a snapshot) makes it serve again.

A colocated server releases the memory of weights, keys and values in between. SGLang ends when it is to release memory
while it is not idle, or to resume memory that it has: so it is paused with ``retract`` first, and only changes are
requested.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

from tidemill.actors.errors import CannotTell, UpdateRefused
from tidemill.actors.serving.port import COMMAND_S, Body, Result
from tidemill.actors.serving.sglang.server_process import Api, Pauses
from tidemill.actors.serving.sglang.tensors import HEAD, ServerLayout, SharedBucket, report_of
from tidemill.actors.serving.updates import KV_CACHE, WEIGHTS, Updates, require_all, require_new
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.weightstore.errors import WeightstoreError
from tidemill.weightstore.format.adapters import AdapterHeader
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.transport.handles import Offered

log = logging.getLogger(__name__)

LOAD_S = 600.0
"""Time limit in seconds of reading all weights: a load from a directory, or checksums."""
LISTENING_S = 5.0
"""Time limit in seconds of the check that a process listens at a group's address."""
NO_BRACKET = "no weight-update session is open"
"""Part of SGLang's error when there is no update to end."""


class SglangUpdates(Updates):
    """Owner of the order of updates of one server."""

    version = -1
    released: frozenset[str] = frozenset()

    def __init__(
        self,
        api: Api,
        names: frozenset[str],
        layout: ServerLayout,
        *,
        pause: str,
        ranks: int = 1,
        unfinished: Callable[[], int],
        on_update: Callable[[int, int], None],
    ) -> None:
        """``names``: every tensor of the model; ``pause``: in_place | retract; ``ranks``: processes of the server;
        ``unfinished``: number of requests that the server has."""
        super().__init__(on_update)
        self.pauses = Pauses(api)
        self._api, self._names, self._layout, self._pause = api, names, layout, pause
        self._unfinished, self._ranks, self._shared = unfinished, ranks, SharedBucket()
        self._flush = pause == "retract"  # otherwise retracted requests would find older weights' results in the cache
        self._open: int | None = None
        self._received: set[str] = set()
        self._receiving = False
        self._bracket = False
        self._turn = asyncio.Lock()
        self.operation: asyncio.Task[object] | None = None
        """The operation under way: the server may answer nothing else until it is done."""
        self._operation_ended_s = 0.0
        self._abandoned_after_s = COMMAND_S
        """Seconds without an operation after which an open update counts as abandoned."""

    async def run_shielded(self, operation: Coroutine[object, None, Result]) -> Result:
        """Run an operation to its end, one at a time. If the caller is cancelled, one that has not begun is dropped."""

        async def exclusive() -> Result:
            """Run the operation in its turn, and let requests wait no longer when it leaves weights of two versions."""
            try:
                async with self._turn:
                    self.operation = task
                    return await operation
            except UpdateRefused:
                if self.version < 0:
                    self.settled.set()  # requests need not wait for the end of an update that has broken off
                raise
            finally:
                if self.operation is task:
                    self.operation, self._operation_ended_s = None, time.monotonic()
                operation.close()  # it may never have been begun

        task = self._start(exclusive())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.operation is not task:
                task.cancel()
            raise

    @property
    def whole(self) -> bool:
        return self.version >= 0

    @property
    def keeps_cache(self) -> bool:
        """True when cached results of older weights stay after an update."""
        return not self._flush

    async def join(self, body: Body) -> None:
        timeout_s = float(body.get("timeout_s", COMMAND_S))
        with contextlib.suppress(UpdateRefused):  # the server has no such group
            await self.leave(str(body.get("group_name", "weight_update_group")), timeout_s)
        await _require_listener(str(body.get("master_address", "")), int(body.get("master_port", 0)))
        await self._api.command("/init_weights_update_group", _without_ours(body), timeout_s=timeout_s)

    async def leave(self, group_name: str, timeout_s: float = COMMAND_S) -> None:
        await self._api.command("/destroy_weights_update_group", {"group_name": group_name}, timeout_s=timeout_s)
        await self.sender_left()

    async def sender_left(self) -> None:
        """Abandon an open update: serve the weights before it or, once overwritten, let requests wait no longer."""
        if self._open is None:
            return
        log.warning("update abandoned version=%s served=%d", self._open, self.version)
        if self.version >= 0 and not self.released:
            await self.generate_as_is()
        else:
            self.settled.set()

    async def pause(self, mode: str) -> None:
        await self.pauses.pause(mode)

    async def continue_generation(self, body: Body) -> None:
        """Continue after a pause. Refused while weights are incomplete, memory is released, or an update is open."""
        if self.version < 0 or self.released:
            raise UpdateRefused(
                "continue_generation: " + ("memory is released" if self.released else "the weights are not complete")
            )
        if self._open is not None:
            raise UpdateRefused(f"continue_generation: the update to version {self._open} is open")
        await self._api.command("/continue_generation", _without_ours(body))
        self._resumed()

    async def generate_as_is(self) -> None:
        """Make the server generate with its present weights, whatever state it was left in."""
        self._bracket = True
        await self._close_bracket()
        await self.pauses.resume()
        self._open = None
        self._resumed()

    async def resume_if_abandoned(self) -> None:
        """Generate again, with the same weights, if an update was abandoned before any bucket of it was received."""
        if not self._is_abandoned():
            return

        async def generate_again() -> None:
            if self._is_abandoned():
                log.warning("update abandoned version=%s served=%d", self._open, self.version)
                await self.generate_as_is()

        with contextlib.suppress(UpdateRefused):
            await self.run_shielded(generate_again())

    def _is_abandoned(self) -> bool:
        idle = self.operation is None or self.operation is asyncio.current_task()
        silent = time.monotonic() - self._operation_ended_s > self._abandoned_after_s
        return self._receiving and self.version >= 0 and not self.released and idle and silent

    async def release(self, tags: frozenset[str]) -> None:
        """Release memory, after a pause with ``retract``."""
        if (unfinished := self._unfinished()) and self.pauses.mode is None:
            names = ", ".join(sorted(tags))
            raise UpdateRefused(f"release of {names}: {unfinished} requests are unfinished; pause generation first")
        new = tags - self.released
        if not new:
            return
        if self.pauses.mode != "retract":
            await self.pause("retract")
        if WEIGHTS in new:
            await self._close_bracket()
            self._open, self.version, self._receiving = None, -1, False
            self.settled.set()
        await self._api.command("/release_memory_occupation", {"tags": sorted(new)})
        self.released |= new
        log.info("memory released tags=%s", ",".join(sorted(new)))

    async def resume(self, tags: frozenset[str]) -> None:
        """Take released memory again. With all memory there, complete weights are served again."""
        resumed = tags & self.released
        if resumed:
            await self._api.command("/resume_memory_occupation", {"tags": sorted(resumed)})
            self.released -= resumed
            log.info("memory resumed tags=%s version=%d", ",".join(sorted(resumed)), self.version)
        # A release may have failed after its pause.
        paused = bool(resumed) or (self.pauses.mode is not None and KV_CACHE in tags)
        if paused and not self.released and self.version >= 0 and self._open is None:
            await self.pauses.resume()

    async def serve_directory(self, directory: Path, version: int | None, *, begun: int) -> float | None:
        if self.begun != begun:
            return None
        await self.resume(frozenset({WEIGHTS}))
        stall_s = await self.load_directory(directory, version)
        await self.resume(frozenset({KV_CACHE}))
        return stall_s

    async def begin(
        self, version: int | None, timeout_s: float = COMMAND_S, adapter: AdapterHeader | None = None
    ) -> None:
        """Pause, and open an update."""
        if adapter is not None:
            raise UpdateRefused("adapter: want merged weights, which this engine alone receives")
        if version is None:
            raise UpdateRefused("begin: want weight_version")
        self._require_weight_memory()
        self._abandoned_after_s = max(COMMAND_S, 2 * timeout_s)
        await self._hold()
        self.begun += 1
        if not self._bracket:
            await self._open_bracket()
        self._open, self._received = version, set()

    async def receive_bucket(self, body: Body, version: int | None) -> None:
        names = [str(name) for name in body["names"]]
        self._check_bucket(names, version)
        await self._write(
            "/update_weights_from_distributed", names, _without_ours(body), float(body.get("timeout_s", COMMAND_S))
        )

    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        names = [spec.name for spec in bucket.specs]
        self._check_bucket(names, version)
        try:
            payloads = await asyncio.to_thread(self._shared.payloads, bucket.specs, offered, self._ranks)
        except WeightstoreError as error:
            raise UpdateRefused(str(error)) from error
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket"}
        await self._write("/update_weights_from_tensor", names, body, timeout_s)

    def _check_bucket(self, names: Sequence[str], version: int | None) -> None:
        if self._open is None:
            raise UpdateRefused("a bucket was sent outside of an update: want begin_weight_update first")
        if version is not None and version != self._open:
            raise UpdateRefused(f"the open update is of version {self._open}, this bucket of version {version}")
        # The output projection may be sent, or left out, where it is tied to the embedding.
        require_new(names, self._names | {HEAD}, self._received)

    async def _write(self, path: str, names: Sequence[str], body: JsonMapping, timeout_s: float) -> None:
        self.version = -1  # from here on the weights are of two versions, until the end
        await self._api.command(
            path, {**body, "flush_cache": self._flush, "weight_version": str(self._open)}, timeout_s=timeout_s
        )
        self._received.update(names)

    async def end(self, version: int | None) -> float:
        if self._open is None:
            raise UpdateRefused("end: there is no open update")
        if version is not None and version != self._open:
            raise UpdateRefused(f"end: the open update is of version {self._open}, not {version}")
        self._check_whole("end")
        await self._close_bracket()
        return await self._served(self._open)

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Make the server load a directory. If that fails, no weights are served."""
        if version is None:
            raise UpdateRefused("load: want weight_version")
        self._require_weight_memory()
        await self._hold()
        await self._close_bracket()
        self._open, self.version = None, -1
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": self._flush}
        await self._api.command("/update_weights_from_disk", body, timeout_s=LOAD_S)
        return await self._served(version)

    async def checksums(self) -> dict[str, str]:
        """Return checksums by parameter, of the server's first rank."""
        answer = await self._api.call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=LOAD_S)
        return dict(answer["ranks"][0]["checksums"])

    async def checksum_report(self, *, of: str) -> tuple[int, ChecksumReport]:
        """Return (version, checksums). Raises CannotTell for checksums that cannot be compared."""
        if self._layout.not_comparable:
            raise CannotTell(self._api.url, self._layout.not_comparable)
        is_update = of == "update"
        version = self._open if is_update else self.version
        if version is None:
            raise UpdateRefused("checksums: there is no open update")
        if is_update:
            self._check_whole("checksums")
        report = report_of(await self.checksums(), self._layout)
        if unknown := self._names - {name for part in report.parts for name in part.names}:
            raise CannotTell(
                self._api.url,
                f"SGLang keeps {len(unknown)} tensors under names unknown here, among them {min(unknown)}",
            )
        return version, report

    def _check_whole(self, what: str) -> None:
        require_all(self._names - {HEAD}, self._received, f"{what}: ")

    async def close(self) -> None:
        """Cancel the operations under way and free the shared memory."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shared.close()

    async def _hold(self) -> None:
        if not (self._receiving or self.pauses.mode in ("retract", self._pause)):
            await self.pauses.hold(self._pause)
        self._receiving = True
        self.settled.clear()

    def _resumed(self) -> None:
        """Record that no request waits for new weights, and that the server generates if it has its memory."""
        self._receiving = False
        if not self.released:
            self.pauses.ended()
        self.settled.set()

    async def _open_bracket(self) -> None:
        try:
            await self._api.command("/begin_weight_update", {})
        except UpdateRefused:
            # The server may have one open that is not known here: another proxy's, or one with a lost answer.
            self._bracket = True
            await self._close_bracket()
            await self._api.command("/begin_weight_update", {})
        self._bracket = True

    async def _close_bracket(self) -> None:
        if self._bracket:
            try:
                await self._api.command("/end_weight_update", {})
            except UpdateRefused as error:
                if NO_BRACKET not in str(error):
                    raise
            self._bracket = False

    async def _served(self, version: int) -> float:
        """Continue with complete weights, if the server has all its memory. Returns seconds as ``end``."""
        if not self.released:
            await self.pauses.resume()
        stall_s = time.perf_counter() - self.pauses.began_s
        self._open = None
        self.version = version
        self._resumed()
        self._record_update(version, self.epoch, stall_s)
        return stall_s


async def _require_listener(host: str, port: int) -> None:
    """Raise UpdateRefused where a group is gone: the server would retry for minutes without an answer."""
    with contextlib.suppress(OSError, TimeoutError):  # with any other error the server may still reach it
        try:
            async with asyncio.timeout(LISTENING_S):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            reason = "the connection is refused: no process listens there"
            raise UpdateRefused(f"joining at {host}:{port}: {reason}") from None
        except ValueError as error:
            raise UpdateRefused(f"joining at {host!r}: not a valid host name: {error}") from None
        writer.close()
        await writer.wait_closed()


def _without_ours(body: Mapping[str, object]) -> JsonObject:
    return {name: value for name, value in body.items() if name not in ("epoch", "timeout_s")}
