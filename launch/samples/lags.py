"""Lag of samples when they were stored: the steps between their oldest version and the head at that time.

The lag that counts is that of the step that trains a sample (``sample_history``); this one is known as soon as a sample is stored.
"""

import asyncio
import time
from bisect import bisect_right
from dataclasses import replace

from tidemill.bus.client.jetstream import unix_time
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.launch.samples.filters import Headline

_PAUSE_S = 0.05
"""Seconds between two reads of the registry: samples stored meanwhile share the next one."""


class Lags:
    """The versions of a run by the time at which each became the head, known up to the newest sample requested so far."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = subjects.bucket_stream(bus.run, "weights")
        self._read = 0
        self._known_until_s = float("-inf")
        """Time up to which all rows are read, by the server's clock."""
        self._looked_s = float("-inf")
        self._steps: dict[int, int] = {}
        """Step of every version."""
        self._published: dict[int, float] = {}
        """Time at which the row of a published version was last written."""
        self._times: list[float] = []
        self._heads: list[int] = []
        """Step of the head from the time at the same place of ``_times`` on."""

    async def of(self, line: Headline) -> Headline:
        """Return the metadata with its lag; unchanged for an empty response, and for versions that the registry does not have."""
        if line.versions is None or line.versions[0] < 0:
            return line
        if line.stored_s > self._known_until_s:
            await self._look()
        step, place = self._steps.get(line.versions[0]), bisect_right(self._times, line.stored_s)
        return line if step is None or place == 0 else replace(line, lag=max(0, self._heads[place - 1] - step))

    async def _look(self) -> None:
        """Read the rows written since the last look."""
        await asyncio.sleep(self._looked_s + _PAUSE_S - time.monotonic())
        self._looked_s = time.monotonic()
        info = await self._bus.jet.call(f"STREAM.INFO.{self._stream}")
        last = int(info["state"]["last_seq"])
        if last > self._read:
            async for row, written in self._bus.rows("weights").written("v.*", self._read + 1):
                self._steps[row["version"]] = row["step"]
                if row.get("state") == "published":
                    self._published[row["version"]] = written.stored_s
            self._read = last
            self._order()
        self._known_until_s = unix_time(info["ts"])

    def _order(self) -> None:
        """Sort the heads by time. A snapshot rewrites the row of its version, but a version became the head before all later ones."""
        heads: list[tuple[float, int]] = []
        earliest_s = float("inf")
        for version in sorted(self._published, reverse=True):
            earliest_s = min(earliest_s, self._published[version])
            heads.append((earliest_s, self._steps[version]))
        self._times, self._heads = [stored_s for stored_s, _ in heads[::-1]], [step for _, step in heads[::-1]]
