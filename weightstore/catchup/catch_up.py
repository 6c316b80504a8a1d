"""Catch-up: how an engine reaches the current version when it starts, and after pushes that it missed.

version < head  ->  a peer that serves the head  ->  or a snapshot of the learner  ->  download, verify, load
                    (a push that arrives meanwhile is as good)
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidemill.bus.errors import BusError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import VersionRow
from tidemill.weightstore.catchup.sources import Joiner, LearnerSnapshot, Loading, OnWait, Peers
from tidemill.weightstore.errors import CatchUpTimeout
from tidemill.weightstore.store.registry import HEAD, VersionRegistry

_log = logging.getLogger(__name__)

Allowed = Callable[[], Awaitable[bool]]
"""Returns whether the engine may take memory for weights now: one that shares the learner's accelerator only at certain
times."""

_POLL_S = 0.5
"""Interval of asking for the first version."""
_FETCH_S = 600.0
"""Deadline of one attempt of ``fetch_model``, which logs the reason and begins another one."""
GRACE_S = 10.0
"""A push that is under way, or the next one, usually brings the engine to the head within this time."""


async def catch_up(bus: Bus, joiner: Joiner, *, deadline_s: float) -> VersionRow | None:
    """Bring the engine to the present head or later. Returns that head, None before the first.

    Pushes reach an engine that is catching up, so a ``load`` that raises is retried: a push may have come between.
    Raises CatchUpTimeout, which names the wait and the last failure; it may be called again.
    """
    loading = Loading(bus, joiner)
    try:
        async with asyncio.timeout(deadline_s):
            return await _reach_head(
                VersionRegistry(bus), joiner.version, [Peers(bus, loading), LearnerSnapshot(bus, loading)]
            )
    except TimeoutError:
        raise CatchUpTimeout(
            deadline_s, loading.waits_for + (f" (last failure: {loading.failure})" if loading.failure else "")
        ) from None
    finally:
        joiner.on_wait("")


async def _reach_head(
    registry: VersionRegistry, version: Callable[[], int], sources: list[Peers | LearnerSnapshot]
) -> VersionRow | None:
    goal = await registry.head()
    while goal is not None and version() < goal.version:
        for source in sources:
            if await source.load(goal):
                break
    return goal


async def fetch_model(bus: Bus, into: Path, *, engine: str, on_wait: OnWait = lambda text: None) -> None:
    """Download the newest version, a whole model directory, to ``into``, for a machine without a model. No deadline.

    ``on_wait``: called with the thing that is waited for, and after a failure with its reason.
    """
    at = -1

    async def copy(directory: Path, version: int, epoch: int) -> None:
        """Keep the loaded snapshot: its own directory is removed afterwards."""
        nonlocal at
        await asyncio.to_thread(shutil.copytree, directory, into, dirs_exist_ok=True)
        at = version

    joiner = Joiner(
        engine=engine, version=lambda: at, load=copy, directory=into.with_name(f"{into.name}-fetched"), on_wait=on_wait
    )
    while at < 0:
        try:
            await catch_up(bus, joiner, deadline_s=_FETCH_S)
        except (CatchUpTimeout, BusError) as error:
            _log.warning("no model yet, trying on engine=%s error=%s", engine, error)
        if at < 0:  # nothing published yet
            on_wait("version 0 from the learner")
            await asyncio.sleep(_POLL_S)


async def keep_up(
    bus: Bus,
    joiner: Joiner,
    *,
    deadline_s: float,
    stale: Callable[[bool], None],
    grace_s: float = GRACE_S,
    allowed: Allowed | None = None,
) -> None:
    """Catch up whenever the engine is behind the head for ``grace_s``, between ``stale(True)`` and ``stale(False)``.

    Runs until cancelled. Time in which ``allowed()`` is False does not count towards the grace period.
    """
    rows, behind_since, was_stale = bus.rows("weights"), 0.0, False
    while True:
        await asyncio.sleep(min(1.0, grace_s / 4))  # several looks within any grace period
        try:
            row, _ = await rows.read(HEAD)
            head = -1 if row is None else int(row.get("version", -1))
            if joiner.version() >= head or (allowed is not None and not await allowed()):
                behind_since = 0.0
                if was_stale and joiner.version() >= head:  # a push was faster
                    stale(was_stale := False)
                continue
            behind_since = behind_since or time.monotonic()
            if time.monotonic() - behind_since < grace_s:
                continue
            stale(was_stale := True)
            await catch_up(bus, joiner, deadline_s=deadline_s)
        except (CatchUpTimeout, BusError) as error:
            _log.warning("engine behind the head, trying on engine=%s error=%s", joiner.engine, error)
