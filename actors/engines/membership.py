"""Connection of an actor, engine or router process to a run: its name, its bus connection, the run's config.

Knows the bus, not the work of the process.
"""

import asyncio
import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar, cast

from tidemill.actors.errors import BadRow
from tidemill.actors.guarded_settings import refuse_foreign
from tidemill.bus.config import LEAF_CURE, BusConfig
from tidemill.bus.errors import BusError, BusUnavailable, NotFound
from tidemill.bus.liveness import Waiting
from tidemill.bus.section import read
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import LiveRow

logger = logging.getLogger(__name__)

BUS_WAIT_S = 300.0
"""Longest wait in seconds for the bus, and for the config of the run, at the start."""
WARN_S = 3.0
"""Time in seconds without the streams of the run after which a log names the cures."""
STEP_S = 1.0
"""Longest time in seconds between two checks of ``draining`` during such a wait."""
CONFIG_KEY = "config"
"""Row of the bucket ``run`` with the config of the run: ``{"actor": {...}, "bus": {...}, ...}``."""

Config = TypeVar("Config")


def default_id() -> str:
    """Return a name that no other live process has: host and process id."""
    return f"{host_name()}-{os.getpid()}"


def host_name() -> str:
    """Return this machine's name, in characters that the bus accepts."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname().partition(".")[0])


def first_row(role: str, process_id: str) -> LiveRow:
    """Return the live row of a process that starts."""
    return LiveRow(role=role, id=process_id, host=socket.gethostname(), pid=os.getpid(), phase="starting")


async def connected(
    stack: AsyncExitStack, url: str, run: str, config: BusConfig, *, name: str, draining: asyncio.Event
) -> Bus | None:
    """Return a connection to a run that has rows, closed with ``stack``; None when ``draining`` is set before there is
    one.

    Raises BusUnavailable after ``BUS_WAIT_S``, and NotFound when the run has none by then.
    """
    deadline, warn_s, bus = time.monotonic() + BUS_WAIT_S, time.monotonic() + WARN_S, None
    while not draining.is_set():
        try:
            if bus is None:
                bus = await stack.enter_async_context(connect(url, run, config, name=name, wait_s=STEP_S))
            await bus.rows("live").read("none")
            return bus
        except (BusUnavailable, NotFound) as error:
            if time.monotonic() > deadline:
                raise
            what = "the bus" if bus is None else f"the streams of run {run}, made by its bus or learner"
            logger.info("waiting for %s error=%s", what, error)
            if bus is not None and isinstance(error, NotFound) and time.monotonic() > warn_s:
                text = (
                    "no streams of run %s in the JetStream of %s; if it is a leaf node with a JetStream of its own, %s"
                )
                logger.warning(text, run, bus.connected_url, LEAF_CURE)
                warn_s = math.inf
            if bus is not None:
                await asyncio.sleep(STEP_S)
    return None


async def config_of_run(
    bus: Bus, draining: asyncio.Event, *, role: str, id: str, allowed: Sequence[str] = (), changed: Iterable[str] = ()
) -> JsonObject | None:
    """Return the config of the run for a process of ``role``, once it is written; None when ``draining`` is set before.

    While it waits, there is a live row ``<role>.<id>`` with the reason. ``allowed``: patterns for settings that name
    code, programs, environment or files, as in ``actors/guarded_settings.py``; ``changed``: settings that this machine
    replaces in it. Raises NotAllowed for a setting that fits none of the patterns, NotFound after ``BUS_WAIT_S``.
    """
    deadline = time.monotonic() + BUS_WAIT_S
    async with AsyncExitStack() as stack:
        waiting: Waiting | None = None
        while not draining.is_set():
            try:
                row = await bus.rows("run").get(CONFIG_KEY)
                if row is not None:
                    refuse_foreign(row[0], role, allowed, where=f"run {bus.run}, row run/{CONFIG_KEY}", changed=changed)
                    return row[0]
            except BusError as error:
                logger.info("waiting for the config of the run error=%s", error)
            if time.monotonic() > deadline:
                raise NotFound(
                    f"run {bus.run}", f"config within {BUS_WAIT_S:g} s (row run/{CONFIG_KEY}); cure: start its learner"
                )
            if waiting is None:
                text = f"the config of run {bus.run}, which its learner writes (row run/{CONFIG_KEY})"
                waiting = await stack.enter_async_context(Waiting(bus, first_row(role, id), text))
            await asyncio.sleep(STEP_S / 4)
    return None


def section(config: JsonObject, name: str, kind: type[Config]) -> Config:
    """Return a section of the config as ``kind``. Raises BadRow naming an unknown key or a wrong value."""
    try:
        return cast(Config, read(kind, config.get(name) or {}, name))
    except ValueError as error:
        raise BadRow(str(error)) from error
