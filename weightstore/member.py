"""One engine in the push: its receiver, the process group it shares with the learner, and the phases of a push.

An engine's trouble stays its own: the group has two ends, and what blocks runs in a thread of this engine alone.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from bus.errors import Fenced
from bus.messages import LiveRow
from weightstore.broadcast import BroadcastGroup
from weightstore.checksums import Told
from weightstore.errors import PeerLost, ReceiverFailed
from weightstore.manifest import Bucket
from weightstore.port import Rendezvous, WeightReceiver

_log = logging.getLogger(__name__)

T = TypeVar("T")

Check = Callable[[Told], list[str]]
"""A line for every tensor that an engine does not have as it was sent. Blocking."""

GROUP = "tidemill"
"""Name of every pair's group: an engine that still has one of that name leaves it first."""
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
    """A live engine. ``update`` it with each version; after any error it must be ``close``d and made anew."""

    def __init__(self, row: LiveRow, receiver: WeightReceiver, *, host: str, backend: str, deadline_s: float) -> None:
        self.id, self.identity = row.id, identity(row)
        self._ranks = max(1, int(row.load.get("ranks", 1)))
        """Processes of the engine that receive: one for each of its tensor-parallel ranks."""
        self._receiver, self._host, self._backend, self._deadline_s = receiver, host, backend, deadline_s
        self._group: BroadcastGroup | None = None
        self.verified = False
        """Its checksums have been compared once, or it has none to show."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"push {row.id}")

    async def update(self, version: int, buckets: Sequence[tuple[Bucket, Tensor]], check: Check | None = None) -> Updated:
        """Push a version, and with ``check`` compare the engine's checksums before it serves it.

        Raises ReceiverFailed naming the phase, and in ``verify`` the tensors; Fenced.
        """
        group = self._group or await self._join()
        async with self._phase("begin"):
            await self._receiver.begin(version)
        for number, (bucket, flat) in enumerate(buckets, 1):
            async with self._phase(f"bucket {number} of {len(buckets)}"):
                await self._together(self._receiver.bucket(bucket.specs), lambda flat=flat: group.send(flat, self._deadline_s))  # type: ignore[misc]
        verify_s = None if check is None else await self._verify(version, check)
        async with self._phase("end"):
            return Updated(stall_s=await self._receiver.end(), verify_s=verify_s)

    async def _verify(self, version: int, check: Check) -> float | None:
        since = time.perf_counter()
        async with self._phase("verify"):
            told = await self._receiver.checksums()
            wrong = [] if told is None else await self._blocking(lambda: check(told))
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            reason = f"version {version} differs from what was sent in {len(wrong)} tensors: {'; '.join(wrong[:_SHOWN])}{more}"
            raise ReceiverFailed(self._receiver.url, "verify", reason)
        if told is None and not self.verified:
            _log.warning("weights not verified, the engine has no checksums to compare engine=%s url=%s", self.id, self._receiver.url)
        self.verified = True
        return None if told is None else time.perf_counter() - since

    async def _join(self) -> BroadcastGroup:
        """Form the pair."""
        async with self._phase("join"):
            group = await self._blocking(lambda: BroadcastGroup.host(self._host, GROUP, 1 + self._ranks, self._backend, self._deadline_s))
            self._group = group
            rendezvous = Rendezvous(host=self._host, port=group.port, rank=1, world_size=1 + self._ranks, name=GROUP, backend=self._backend)
            await self._together(self._receiver.join(rendezvous), group.meet)
        return group

    async def close(self, *, leave: bool) -> None:
        """Forget the pair; with ``leave`` the engine is told, if it answers quickly."""
        if leave and self._group is not None:
            with suppress(ReceiverFailed, Fenced, TimeoutError):  # a courtesy to an engine that may be dead
                async with asyncio.timeout(_LEAVE_S):
                    await self._receiver.leave()
        if self._group is not None:
            self._group.close()
        self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TimeoutError:
            raise ReceiverFailed(self._receiver.url, name, f"not done within {self._deadline_s:g} s") from None
        except ReceiverFailed as error:
            raise ReceiverFailed(error.url, name, error.reason) from None
        except PeerLost as error:
            raise ReceiverFailed(self._receiver.url, name, str(error)) from None

    def _blocking(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _together(self, asked: Coroutine[Any, Any, None], blocking: Callable[[], None]) -> None:
        """Ask the engine and do our part meanwhile; the first error of either is raised at once.

        Our part cannot be interrupted: after an error its thread ends by the group's deadline, unheard.
        """
        asking, doing = asyncio.ensure_future(asked), self._blocking(blocking)
        try:
            await asyncio.wait({asking, doing}, return_when=asyncio.FIRST_EXCEPTION)
            for part in (asking, doing):
                if part.done():
                    part.result()
        finally:
            asking.cancel()
            doing.add_done_callback(_unheard)
            await asyncio.gather(asking, return_exceptions=True)


def identity(row: LiveRow) -> tuple[str, str, int]:
    """Another one of these means another process: it has no group, whatever its name."""
    return row.id, row.address, row.pid


def _unheard(future: "asyncio.Future[None]") -> None:
    if not future.cancelled():
        future.exception()
