"""One engine in a push: its verbs, each with the deadline of its phase. Knows no process group and no other engine."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from bus.errors import Fenced
from bus.messages import LiveRow
from weightstore.checksums import Told
from weightstore.errors import PeerLost, ReceiverFailed
from weightstore.manifest import TensorSpec
from weightstore.port import PushReceiver, Rendezvous, WeightReceiver

_log = logging.getLogger(__name__)

Check = Callable[[Told], list[str]]
"""A line for every tensor that an engine does not have as it was sent. Blocking."""

_LEAVE_S = 1.0
_SHOWN = 5
"""Differing tensors named in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """How an engine took a version."""

    stall_s: float
    """Generation was held up."""
    verify_s: float | None = None
    """Its checksums were compared; None = they were not."""


class Member:
    """A live engine. After any error it must be ``close``d and made anew.

    Every verb raises ReceiverFailed naming the phase, and Fenced.
    """

    def __init__(self, row: LiveRow, receiver: WeightReceiver, *, deadline_s: float) -> None:
        self.id, self.identity = row.id, identity(row)
        self.ranks = row.capabilities.ranks
        """Processes of the engine that receive: one for each of its tensor-parallel ranks."""
        self._at_once = receiver if row.capabilities.single_request_push and isinstance(receiver, PushReceiver) else None
        self.receiver, self.deadline_s = receiver, deadline_s
        self.colocated = row.capabilities.colocated
        """It shares the learner's accelerator."""
        self.verified = False
        """Its checksums have been compared once, or it has none to show."""
        self._joined = False

    @property
    def at_once(self) -> bool:
        """It can be asked for all of a push at once."""
        return self._at_once is not None

    async def join(self, rendezvous: Rendezvous | None) -> None:
        self._joined = True
        async with self.phase("join"):
            await self.receiver.join(rendezvous)

    async def begin(self, version: int) -> None:
        """A colocated engine has memory for weights again afterwards."""
        await self._resume("weights")
        async with self.phase("begin"):
            await self.receiver.begin(version)

    async def receive(self, version: int, buckets: Sequence[Sequence[TensorSpec]], *, serve: bool) -> float | None:
        """``begin``, all buckets, and with ``serve`` the end: then seconds for which that held up generation. Bounded by nothing."""
        assert self._at_once is not None
        await self._resume("weights")
        async with self.phase("transfer", bounded=False):
            return await self._at_once.receive(version, buckets, serve=serve)

    async def finish(self, version: int, check: Check | None = None, served_s: float | None = None) -> Updated:
        """Serve what has come, unless it does (``served_s``); with ``check`` its checksums are compared first, and an error names the
        tensors."""
        verify_s = None if check is None else await self._verify(version, check)
        stall_s = served_s
        if stall_s is None:
            async with self.phase("end"):
                stall_s = await self.receiver.end()
        await self._resume("kv_cache")
        return Updated(stall_s=stall_s, verify_s=verify_s)

    async def load(self, directory: str, version: int) -> None:
        """Have the engine take its weights from a directory on its machine."""
        await self._resume("weights")
        async with self.phase("load"):
            await self.receiver.load_snapshot(directory, version)
        await self._resume("kv_cache")

    async def release(self) -> None:
        """Have the engine give up its memory."""
        async with self.phase("release"):
            await self.receiver.release()

    async def _resume(self, what: str) -> None:
        if self.colocated:
            async with self.phase(f"resume {what}"):
                await self.receiver.resume(what)

    async def _verify(self, version: int, check: Check) -> float | None:
        since = time.perf_counter()
        async with self.phase("verify"):
            told = await self.receiver.checksums()
            wrong = [] if told is None else await asyncio.to_thread(check, told)
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            reason = f"version {version} differs from what was sent in {len(wrong)} tensors: {'; '.join(wrong[:_SHOWN])}{more}"
            raise ReceiverFailed(self.receiver.url, "verify", reason, answered=True)
        if told is None and not self.verified:
            _log.warning("weights not verified, the engine has no checksums to compare engine=%s url=%s", self.id, self.receiver.url)
        self.verified = True
        return None if told is None else time.perf_counter() - since

    async def answers(self) -> bool:
        """Whether it says anything at all, asked to leave its group. Raises Fenced."""
        self._joined = False
        try:
            async with self.phase("leave"):
                await self.receiver.leave()
        except ReceiverFailed as error:
            return error.answered
        return True

    async def close(self, *, leave: bool) -> None:
        """Forget the engine; with ``leave`` it is told, if it answers quickly."""
        if leave and self._joined:
            with suppress(ReceiverFailed, Fenced):  # a courtesy to an engine that may be dead
                async with self.phase("leave"), asyncio.timeout(_LEAVE_S):
                    await self.receiver.leave()
        self._joined = False
        self.receiver.close()

    @asynccontextmanager
    async def phase(self, name: str, *, bounded: bool = True) -> AsyncIterator[None]:
        """What fails in it, in whatever way, or outlasts the deadline is a ReceiverFailed of this name; but Fenced."""
        try:
            async with asyncio.timeout(self.deadline_s if bounded else None):
                yield
        except TimeoutError:
            raise ReceiverFailed(self.receiver.url, name, f"not done within {self.deadline_s:g} s") from None
        except ReceiverFailed as error:
            raise ReceiverFailed(error.url, name, error.reason, answered=error.answered) from None
        except PeerLost as error:
            raise ReceiverFailed(self.receiver.url, name, str(error)) from None
        except Fenced:
            raise
        except Exception as error:
            _log.exception("phase failed in a way not foreseen engine=%s phase=%s", self.id, name)
            raise ReceiverFailed(self.receiver.url, name, repr(error)) from error


def identity(row: LiveRow) -> tuple[str, str, int]:
    """Another one of these means another process: it has no group, whatever its name."""
    return row.id, row.address, row.pid
