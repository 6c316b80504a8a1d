"""How old samples were when they came: the steps between their oldest version and the newest one there was then.

The lag that counts is that of the step that trains a sample (``launch.samples.fate``); this one is known as soon as a sample is there.
"""

import json
import time
from bisect import bisect_right
from dataclasses import replace
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.pull import present
from launch.samples.filters import Headline

_LOOK_EVERY_S = 0.5


class Lags:
    """The versions of a run by the time at which they became the head, read again when a sample shows a newer one."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._read = 0
        self._newest = -1
        self._looked_s = float("-inf")
        self._sought: set[int] = set()
        """Versions that were looked for."""
        self.steps: dict[int, int] = {}
        """Step of every version."""
        self._rows: dict[int, tuple[float, int]] = {}
        """Version: (when its row was last written, step)."""
        self._times: list[float] = []
        self._heads: list[int] = []
        """Step of the head from the time with the same place on."""

    async def of(self, line: Headline) -> Headline:
        """With its lag, where it has one: not for an empty response, nor for versions that the registry does not know."""
        if line.versions is None or line.versions[0] < 0:
            return line
        await self._catch_up(line.versions[1], line.stored_s)
        step = self.steps.get(line.versions[0])
        place = bisect_right(self._times, line.stored_s)
        if step is None or place == 0:
            return line
        return replace(line, lag=max(0, self._heads[place - 1] - step))

    async def _catch_up(self, version: int, stored_s: float) -> None:
        """Read what is new, if it can matter: for a version not heard of at once (but once), for a later head now and then."""
        unheard = version > self._newest and version not in self._sought
        later = not self._times or stored_s > self._times[-1]
        if unheard or (later and time.monotonic() - self._looked_s > _LOOK_EVERY_S):
            self._sought.add(version)
            self._looked_s = time.monotonic()
            await self._refresh()

    async def _refresh(self) -> None:
        stream = subjects.bucket_stream(self._bus.run, "weights")
        last = (await self._bus.jet.state(stream)).last_seq
        if last == self._read:
            return
        async for delivered in present(self._bus.jet, stream, self._read + 1, filters=[subjects.row(self._bus.run, "weights", "v.*")]):
            row = _row(delivered.data)
            if row.get("state") == "published":
                self._rows[int(row["version"])] = (delivered.stored_s, int(row["step"]))
            self.steps[int(row["version"])] = int(row["step"])
        self._read = last
        self._order()

    def _order(self) -> None:
        """A row is written again when its version gets a snapshot: a version became the head before any later one did."""
        self._times, self._heads = [], []
        earliest = float("inf")
        for version in sorted(self._rows, reverse=True):
            stored_s, step = self._rows[version]
            earliest = min(earliest, stored_s)
            self._times.append(earliest)
            self._heads.append(step)
        self._times.reverse()
        self._heads.reverse()
        self._newest = max(self.steps, default=-1)


def _row(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    return found if isinstance(found, dict) else {}
