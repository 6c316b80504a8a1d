"""How old samples were when they came: the steps between their oldest version and the newest one there was then.

The lag that counts is that of the step that trains a sample (``launch.samples.fate``); this one is known as soon as a sample is there.
"""

import asyncio
import time
from bisect import bisect_right
from dataclasses import replace

from bus.client.jetstream import unix_time
from bus.streams.connection import Bus
from bus.wire import subjects
from launch.samples.filters import Headline

_PAUSE_S = 0.05
"""Between two looks at the registry: samples that came meanwhile share the next one."""


class Lags:
    """The versions of a run by the time at which each became the head, known up to the newest sample that was asked about."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._stream = subjects.bucket_stream(bus.run, "weights")
        self._read = 0
        self._known_until_s = float("-inf")
        """By the server's clock."""
        self._looked_s = float("-inf")
        self._steps: dict[int, int] = {}
        """Of every version."""
        self._published: dict[int, float] = {}
        """When the row of a published version was last written."""
        self._times: list[float] = []
        self._heads: list[int] = []
        """Step of the head, from the time with the same place on."""

    async def of(self, line: Headline) -> Headline:
        """With its lag, where it has one: not for an empty response, nor for versions that the registry does not know."""
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
        """A row is written again when its version gets a snapshot: a version became the head before any later one did."""
        heads: list[tuple[float, int]] = []
        earliest_s = float("inf")
        for version in sorted(self._published, reverse=True):
            earliest_s = min(earliest_s, self._published[version])
            heads.append((earliest_s, self._steps[version]))
        self._times, self._heads = [stored_s for stored_s, _ in heads[::-1]], [step for _, step in heads[::-1]]
