"""Which engine a request goes to: one that serves, has the version asked for, and has the least to do.

Knows where engines are (URLs of the config, or live rows on the bus) and how they have behaved; not what is asked of them.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.engines.port import Engine
from actors.errors import EngineError, EngineFailed, EngineUnavailable, VersionUnavailable
from bus.client.waiter import Waiter
from bus.errors import BusError
from bus.liveness.live import LiveView

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Time between two looks at the engines."""
LOOK_EVERY_WAITING_S = 0.1
"""The same while somebody waits for one (at max_lag 0 every step waits for the new version), if no change is noticed before."""
ANSWER_S = 5.0
"""Time an engine has to say what it is."""
QUARANTINE_S = (0.5, 10.0)
"""Time without requests after the first failure in a row, doubled with each, and its bound."""


class NoEngine(EngineError):
    """No engine that would do was found in time; the request was not made."""

    def __init__(self, wanted: str, waited_s: float) -> None:
        super().__init__(wanted, waited_s)
        self.wanted, self.waited_s = wanted, waited_s

    def __str__(self) -> str:
        return f"waited {self.waited_s:.1f} s for {self.wanted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """An engine, as it was seen just now."""

    url: str
    id: str
    serving: bool
    version: int
    remark: str = ""
    """Why it does not serve."""
    process: str = ""
    """Which one it is, of all that were ever at this URL; empty = not known."""


class Lookout(Protocol):
    """Finds engines."""

    async def look(self) -> list[Sighting]:
        """All engines there are, serving or not. Raises nothing but BusError."""
        ...

    def noticing(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """While entered, ``wake`` is called when an engine has changed, as far as that can be noticed."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class LiveLookout:
    """Finds engines by their rows on the bus."""

    def __init__(self, view: LiveView) -> None:
        self._view = view

    async def look(self) -> list[Sighting]:
        return [
            Sighting(
                url=row.address,
                id=row.id,
                serving=row.phase == "serving",
                version=row.version,
                remark=row.phase,
                process=f"{row.host} {row.id} {row.pid}",
            )
            for row in await self._view.alive("engine")
            if row.address
        ]

    def noticing(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._view.noticing("engine", wake)

    async def close(self) -> None:
        pass


class UrlLookout:
    """Asks the engines at given URLs."""

    def __init__(self, urls: Sequence[str], engine: Callable[[str], Engine]) -> None:
        self._engines = {url: engine(url) for url in urls}

    async def look(self) -> list[Sighting]:
        return list(await asyncio.gather(*(self._ask(url, engine) for url, engine in self._engines.items())))

    def noticing(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()

    async def _ask(self, url: str, engine: Engine) -> Sighting:
        try:
            async with asyncio.timeout(ANSWER_S):
                serving, info = await engine.healthy(), await engine.info()
        except (EngineError, TimeoutError) as error:
            return Sighting(url=url, id=url, serving=False, version=-1, remark=str(error) or "no answer")
        return Sighting(url=url, id=url, serving=serving, version=info.version, remark="" if serving else "not healthy")


@dataclass(slots=True, kw_only=True)
class _Place:
    """One engine, as this actor knows it."""

    engine: Engine
    sighting: Sighting
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    quarantined_until: float = 0.0
    chosen: int = 0
    """When it was chosen last, as a count of all choices."""

    def remark(self, min_version: int) -> str:
        if not self.sighting.serving:
            return self.sighting.remark or "not serving"
        if self.sighting.version < min_version:
            return f"version {self.sighting.version}"
        return f"quarantined after {self.failures} failures"


class Engines:
    """All engines of an actor. Least in-flight first; one that fails is left alone for a while, twice as long each time.

    ``run`` keeps looking; it must be running while requests are made.
    """

    def __init__(
        self,
        lookout: Lookout,
        engine: Callable[[str], Engine],
        *,
        quarantine_s: tuple[float, float] = QUARANTINE_S,
        in_turn: bool = False,
    ) -> None:
        """``engine(url)`` gives a client; it is closed when its engine is gone, and by ``run`` at the end.

        ``in_turn``: of equally busy ones the one chosen longest ago, else the first by id.
        """
        self._lookout, self._engine, self._quarantine_s, self._in_turn = lookout, engine, quarantine_s, in_turn
        self._places: dict[str, _Place] = {}
        self._changed = Waiter()
        self._tickets, self._choices = itertools.count(), itertools.count(1)
        self._waiting: dict[int, tuple[int, float]] = {}
        """Ticket -> (version asked for, since when)."""
        self._look_now = Waiter()
        self._looks = 0
        self._closing = False

    async def run(self) -> None:
        """Look for engines, for ever; sooner while somebody waits."""
        try:
            async with AsyncExitStack() as stack:
                await self._notice(stack)
                while True:
                    try:
                        await self._update(await self._lookout.look())
                    except BusError as error:  # what was seen last is still the best guess
                        logger.debug("engines not seen error=%s", error)
                    self._looks += 1
                    self._changed.wake()
                    await self._look_now.wait(LOOK_EVERY_WAITING_S if self._waiting else LOOK_EVERY_S)
        finally:
            await self._lookout.close()
            for place in self._places.values():
                await place.engine.close()

    async def _notice(self, stack: AsyncExitStack) -> None:
        """Look at once when an engine changes and somebody waits for one."""

        def wake() -> None:
            if self._waiting:
                self._look_now.wake()

        try:
            await stack.enter_async_context(self._lookout.noticing(wake))
        except BusError as error:
            logger.warning("changes of engines are not noticed, only looked for error=%s", error)

    @asynccontextmanager
    async def one(self, *, min_version: int = 0, timeout_s: float, avoid: str = "", prefer: str = "") -> AsyncIterator[tuple[str, Engine]]:
        """Give (id, client) of an engine that serves ``min_version`` or newer: rather not the one with the id ``avoid``, then
        ``prefer`` if that one can, else one with the fewest requests.

        EngineUnavailable and EngineFailed that leave the block put the engine into quarantine (not when only its version is too old).
        Raises NoEngine when there is none within ``timeout_s``, or none at once and ``give_up`` was called.
        """
        place = await self._wait(min_version, timeout_s, avoid, prefer)
        place.in_flight += 1
        place.chosen = next(self._choices)
        try:
            yield place.sighting.id, place.engine
        except (EngineUnavailable, EngineFailed) as error:
            if not isinstance(error, VersionUnavailable):
                self._quarantine(place, error)
            raise
        else:
            place.failures = 0
        finally:
            place.in_flight -= 1
            self._changed.wake()

    async def look_again(self) -> None:
        """Return when what the lookout says now is known; at once, whoever waits."""
        async with asyncio.timeout(ANSWER_S):
            for _ in range(2):  # the first may have begun before
                seen = self._looks
                self._look_now.wake()
                while self._looks == seen:
                    await self._changed.wait()

    def give_up(self) -> None:
        """From now on nobody waits: who finds no engine at once gets NoEngine."""
        self._closing = True
        self._changed.wake()

    def waits_for(self) -> str:
        """Say what is waited for and since when; empty when nobody waits."""
        if not self._waiting:
            return ""
        min_version, since = min(self._waiting.values(), key=lambda waiting: waiting[1])
        return f"{self._wanted(min_version)}, for {time.monotonic() - since:.0f} s ({len(self._waiting)} samples wait)"

    def overview(self) -> list[dict[str, Any]]:
        """What is known of each engine, for onlookers."""
        now = time.monotonic()
        return [
            {
                "url": place.sighting.url,
                "id": place.sighting.id,
                "serving": place.sighting.serving and place.quarantined_until <= now,
                "version": place.sighting.version,
                "in_flight": place.in_flight,
                "failures": place.failures,
                "remark": place.remark(0) if not place.sighting.serving or place.quarantined_until > now else "",
            }
            for place in self._places.values()
        ]

    async def _wait(self, min_version: int, timeout_s: float, avoid: str, prefer: str) -> _Place:
        begin = time.monotonic()
        ticket = next(self._tickets)
        try:
            while (place := self._best(min_version, avoid, prefer)) is None:
                left_s = begin + timeout_s - time.monotonic()
                if self._closing or left_s <= 0:
                    raise NoEngine(self._wanted(min_version), time.monotonic() - begin)
                if ticket not in self._waiting:
                    self._waiting[ticket] = (min_version, begin)
                    self._look_now.wake()
                await self._changed.wait(min(left_s, self._next_return_s()))
            return place
        finally:
            self._waiting.pop(ticket, None)

    def _best(self, min_version: int, avoid: str, prefer: str) -> _Place | None:
        now = time.monotonic()
        able = [
            place
            for place in self._places.values()
            if place.sighting.serving and place.sighting.version >= min_version and place.quarantined_until <= now
        ]

        def rank(place: _Place) -> tuple[bool, bool, int, int, str]:
            id = place.sighting.id
            return id == avoid, id != prefer, place.in_flight, place.chosen if self._in_turn else 0, id

        return min(able, key=rank, default=None)

    def _next_return_s(self) -> float:
        """Time until the next engine leaves quarantine; long when none is in it."""
        now = time.monotonic()
        ends = [place.quarantined_until - now for place in self._places.values() if place.quarantined_until > now]
        return min(ends, default=LOOK_EVERY_S) + 0.001

    def _wanted(self, min_version: int) -> str:
        known = ", ".join(f"{place.sighting.id}: {place.remark(min_version)}" for place in self._places.values())
        return f"an engine that serves version {min_version} or newer ({known or 'none known'})"

    def _quarantine(self, place: _Place, error: EngineError) -> None:
        now = time.monotonic()
        if place.quarantined_until > now:  # one death fails many requests, and counts once
            return
        first_s, longest_s = self._quarantine_s
        pause_s = min(first_s * 2**place.failures, longest_s)
        place.failures += 1
        place.quarantined_until = now + pause_s
        logger.warning("engine quarantined id=%s pause_s=%.1f failures=%d error=%s", place.sighting.id, pause_s, place.failures, error)

    async def _update(self, sightings: Sequence[Sighting]) -> None:
        """Take in what was seen. An engine that serves again after it did not is trusted again."""
        seen = {sighting.url: sighting for sighting in sightings}
        gone = [url for url, place in self._places.items() if url not in seen and not place.in_flight]
        for place in [self._places.pop(url) for url in gone]:  # all at once, or one might be chosen while another is closed
            await place.engine.close()
        for url, place in self._places.items():
            sighting = seen.get(url) or replace(place.sighting, serving=False, remark="gone")
            if sighting.serving and not place.sighting.serving:
                place.failures, place.quarantined_until = 0, 0.0
            place.sighting = sighting
        for url, sighting in seen.items():
            if url not in self._places:
                self._places[url] = _Place(engine=self._engine(url), sighting=sighting)
        self._changed.wake()
