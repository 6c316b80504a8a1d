"""One engine in a push: its verbs, each with the deadline of its phase."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

from tidemill.bus.errors import Fenced
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import PartLost, PeerLost, ReceiverFailed
from tidemill.weightstore.format.adapters import AdapterHeader, base_digest
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.transport.parts import Buckets
from tidemill.weightstore.transport.port import Deadlines, Rendezvous, WeightReceiver, identity

_log = logging.getLogger(__name__)

# Returns a line for every tensor that an engine does not have as it was sent. Raises PartLost.
Check = Callable[[ChecksumReport], Awaitable[list[str]]]
# Deadline for leaving a group before the engine is dropped; optional, because the next join leaves the old group
_LEAVE_S = 1.0
_SHOWN = 5  # Differing tensors named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Times of one engine's update to a version."""

    stall_s: float
    """Seconds for which generation was paused."""
    verify_s: float | None = None
    """Seconds in which its checksums were compared; None = they were not."""


class Member:
    """A live engine. After an error it must be ``close``d. Verbs raise ReceiverFailed with the phase, and Fenced."""

    def __init__(
        self,
        row: LiveRow,
        receiver: WeightReceiver,
        *,
        deadlines: Deadlines,
        backend: str = "gloo",
        adapters: bool = False,
    ) -> None:
        """``backend``: of its process groups, if it has some. ``adapters``: it is to receive adapters alone."""
        self.id, self.identity = row.id, identity(row)
        self.backend, self.devices = backend, row.capabilities.devices
        self.ranks, self.colocated = row.capabilities.ranks, row.capabilities.colocated
        self.receiver, self.deadlines = receiver, deadlines
        self.verified = False  # True once the engine's checksums have been compared, or if it has none to compare
        # A push can be one request (``receive``) instead of ``begin`` and the buckets
        self.single_request = row.capabilities.single_request_push
        self.adapters = adapters
        # Digest of the weights that it holds, once they have been found equal to the base of the adapters
        self.base = ""
        self._joined = False

    async def join(self, rendezvous: Rendezvous | None) -> None:
        """Join a process group; None = the engine reads the buckets itself."""
        # Set before the request: an engine may have joined although its answer was lost, and then has a group to leave.
        self._joined = True
        async with self.phase("join"):
            await self.receiver.join(rendezvous)

    async def find_base(self, differences: Check) -> None:
        """Compare the weights that it holds with the base of the adapters, unless they are known to be equal.

        An engine that does not answer has no base: the push that follows finds out why.
        """
        if self.base or self.colocated:  # a colocated engine has released its weights
            return
        try:
            async with self.phase("verify"):
                report = await self.receiver.checksums("base")
            async with self.phase("verify", bounded=False):
                lines = ["it has no checksums"] if report is None else await differences(report)
        except ReceiverFailed as error:
            lines = [str(error)]
        if lines:
            _log.info(
                "the base of the adapters is sent too, the engine has other weights engine=%s tensors=%d first=%s",
                self.id,
                len(lines),
                lines[0],
            )
        elif report is not None:
            self.base = base_digest(report)

    async def begin(self, version: int, adapter: AdapterHeader | None = None) -> None:
        """Begin a push; a colocated engine has memory for weights again afterwards."""
        await self._resume("weights")
        async with self.phase("begin"):
            await self.receiver.begin(version, adapter)

    async def receive(
        self, version: int, buckets: Buckets, *, serve: bool, adapter: AdapterHeader | None = None
    ) -> float | None:
        """Begin a push and receive all buckets. With ``serve`` also end it, and return the seconds of paused
        generation.

        It has no deadline, unless the receiver ``carries``; the caller sets one.
        """
        await self._resume("weights")
        async with self.phase("transfer", bounded=False):
            return await self.receiver.receive(version, buckets, serve=serve, adapter=adapter)

    async def finish(self, version: int, check: Check | None = None, served_s: float | None = None) -> Updated:
        """Have the engine serve the version, unless it does (``served_s``), after a comparison of its checksums by
        ``check``.
        """
        verify_s = None if check is None else await self._verify(version, check)
        stall_s = served_s
        if stall_s is None:
            async with self.phase("end"):
                stall_s = await self.receiver.end()
        await self._resume("kv_cache")
        return Updated(stall_s=stall_s, verify_s=verify_s)

    async def load(self, directory: str, version: int) -> None:
        """Have the engine load its weights from a directory on its machine."""
        await self._resume("weights")
        async with self.phase("load"):
            await self.receiver.load_snapshot(directory, version)
        await self._resume("kv_cache")

    async def release(self) -> None:
        """Have the engine release its memory."""
        async with self.phase("release"):
            await self.receiver.release()

    async def _resume(self, what: str) -> None:
        if self.colocated:
            async with self.phase(f"resume {what}"):
                await self.receiver.resume(what)

    async def _verify(self, version: int, check: Check) -> float | None:
        since = time.perf_counter()
        async with self.phase("verify"):
            report = await self.receiver.checksums()
        async with self.phase("verify", bounded=False):  # the time of this process: the engine has answered
            wrong = [] if report is None else await check(report)
        if wrong:
            remainder = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            reason = (
                f"version {version} differs from what was sent in {len(wrong)} tensors: "
                f"{'; '.join(wrong[:_SHOWN])}{remainder}"
            )
            raise ReceiverFailed(self.receiver.url, "verify", reason, answered=True)
        if report is None and not self.verified:
            _log.warning(
                "weights not verified, the engine has no checksums to compare engine=%s url=%s",
                self.id,
                self.receiver.url,
            )
        self.verified = True
        return None if report is None else time.perf_counter() - since

    async def answers(self) -> bool:
        """Return whether it answers a request to leave its group, with success or an error. Raises Fenced."""
        self._joined = False
        try:
            async with self.phase("leave"):
                await self.receiver.leave()
        except ReceiverFailed as error:
            return error.answered
        return True

    async def close(self, *, leave: bool) -> None:
        """Release the receiver; with ``leave`` the engine is first asked to leave its group, within a second."""
        if leave and self._joined:
            with suppress(ReceiverFailed, Fenced):  # optional: the engine may be dead
                async with self.phase("leave"), asyncio.timeout(_LEAVE_S):
                    await self.receiver.leave()
        self._joined = False
        self.receiver.close()

    @asynccontextmanager
    async def phase(self, name: str, *, bounded: bool = True) -> AsyncIterator[None]:
        """Turn any failure within it, or the end of the deadline, into ReceiverFailed with this name; Fenced and
        PartLost stay."""
        deadline_s = self.deadlines.of(name)
        try:
            async with asyncio.timeout(deadline_s if bounded else None):
                with self.deadlines.measure(name) if bounded else nullcontext():
                    yield
        except TimeoutError:
            raise ReceiverFailed(self.receiver.url, name, f"not done within {deadline_s:g} s") from None
        except ReceiverFailed as error:
            raise ReceiverFailed(error.url, name, error.reason, answered=error.answered) from None
        except PartLost:
            raise
        except PeerLost as error:
            raise ReceiverFailed(self.receiver.url, name, str(error)) from None
        except Fenced:
            raise
        except Exception as error:  # a bug, or an unexpected answer: this engine fails the push, and no other
            _log.exception("phase failed with an unexpected error engine=%s phase=%s", self.id, name)
            raise ReceiverFailed(self.receiver.url, name, repr(error)) from error
