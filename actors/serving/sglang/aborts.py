"""Aborts of responses: requested by clients, at any time, and repeated until they take effect; never caused by an update; counted."""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from actors.errors import EngineError
from actors.serving.sglang.api import Api
from actors.serving.sglang.names import Names
from actors.serving.sglang.updates import WeightUpdates

_ABORTED = re.compile(rb'"type"\s*:\s*"abort"')
"""Finish reason of an abort in an answer's JSON; in a text the quotes would be escaped."""
_OVERLAP = 64
"""Number of bytes kept of an answer's last part, more than a match has: a match may be cut between two parts."""
ABORT_S = 60.0
AGAIN_S = 0.2
AGAIN_MOST_S = 2.0
"""Longest interval at which an abort is sent again; the first is ``AGAIN_S``. SGLang ignores an id that it does not have yet."""
SETTLE_S = 0.1
"""Seconds in which SGLang's scheduler gets a request. Before that an abort is lost: SGLang (0.5.21 to 0.5.23) passes an id on once."""
BEFORE_PAUSE_S = 2.0
"""Seconds before a pause in which a request may be sent too late for it: its abort waits for the end of the pause."""


class Aborts:
    """Aborts of one engine, counted in ``counters``: requests_aborted, and of them requests_aborted_by_pushes."""

    def __init__(self, updates: WeightUpdates, counters: dict[str, float]) -> None:
        self._updates, self._counters = updates, counters
        counters.update(requests_aborted=0.0, requests_aborted_by_pushes=0.0)
        self._watches: set[Watch] = set()

    def call_off(self, rid: str | None) -> list["Watch"]:
        """Record a client's abort of a request, of one response of it, or of all (None). Returns the requests concerned."""
        return [watch for watch in self._watches if watch.call_off(rid)]

    @contextmanager
    def watching(self, names: Names) -> Iterator["Watch"]:
        """Watch the answer to a request. An abort that no client has requested counts as an update's, or a pause's, if there was one."""
        watch = Watch(names, self._updates)
        self._watches.add(watch)
        try:
            yield watch
            if watch.aborted:
                updated = self._updates.under_way or self._updates.completed != watch.since or self._updates.paused == "abort"
                self._counters["requests_aborted"] += watch.aborted
                self._counters["requests_aborted_by_pushes"] += watch.aborted * (updated and not watch.meant)
        finally:
            self._watches.discard(watch)
            watch.close()


class Watch:
    """One request, and its answer, which is read part by part."""

    def __init__(self, names: Names, updates: WeightUpdates) -> None:
        self.names, self._updates = names, updates
        self.meant: set[str] = set()
        """The responses that a client has aborted."""
        self.since = updates.completed
        """Number of completed updates when the request began."""
        self.aborted = 0
        self._tail = b""
        self._asked_s = float("inf")
        self._insisting: asyncio.Task[None] | None = None

    @property
    def called_off(self) -> bool:
        """True when all of its responses are to end."""
        return self.meant.issuperset(self.names.responses)

    def call_off(self, rid: str | None) -> bool:
        meant = self.names.meant(rid)
        self.meant |= meant
        return bool(meant)

    def asked(self) -> None:
        """Record that the request is sent to the server now."""
        self._asked_s = time.monotonic()

    def insist(self, api: Api, after_s: float = 0.0) -> None:
        """Send aborts of ``meant`` to the server, from the time when it can process them until the answer is complete."""
        if self._insisting is None:
            self._insisting = asyncio.create_task(self._insist(api, after_s))

    async def _insist(self, api: Api, after_s: float) -> None:
        again_s = AGAIN_S
        await asyncio.sleep(after_s)
        while True:
            left_s = self._scheduled_s() - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, SETTLE_S))
                continue
            for name in [one for one, told in self.names.at_server.items() if told in self.meant]:
                with contextlib.suppress(EngineError):  # the request itself fails with the same error
                    await api.call("POST", "/abort_request", {"rid": name}, timeout_s=ABORT_S)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MOST_S)

    def _scheduled_s(self) -> float:
        """Return when the server's scheduler has the request; inf while the server is paused, if the pause may have come first."""
        paused_s, (before_s, resumed_s) = self._updates.paused_since_s, self._updates.last_pause_s
        late_s = self._asked_s + BEFORE_PAUSE_S
        going_s = (max(self._asked_s, resumed_s) if late_s > before_s else self._asked_s) + SETTLE_S
        return going_s if max(going_s, late_s) < paused_s else float("inf")

    def close(self) -> None:
        """Stop sending aborts: the request has ended."""
        if self._insisting is not None:
            self._insisting.cancel()

    def see(self, part: bytes) -> None:
        text = self._tail + part
        end = 0
        for found in _ABORTED.finditer(text):
            self.aborted += 1
            end = found.end()
        self._tail = text[max(end, len(text) - _OVERLAP) :]
