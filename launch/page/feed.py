"""Changes of a run for all viewers of a page: one event a second, encoded once.

    reader.changes --flush--> event AT -> queue of each viewer -> its connection

``at`` rises by one with every event. An answer of the server flushes first, so that it holds exactly the changes up to
its ``at``: a viewer that applies the next events has no gap and no point twice. A new viewer gets the newest events
first, because its answers may be older than its connection. A viewer that reads too slowly loses the oldest events of
its queue, sees the jump in ``from``, and asks again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.subjects import nonce
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.reader import RunChanges, RunReader
from tidemill.launch.page.texts import to_json

EVENT_S = 1.0
QUEUE = 8  # Events that one viewer may be behind
REPEATED = 4  # Newest events that a new viewer gets: those between its first answers and its connection
MAX_VIEWERS = 64
UNWATCHED_S = 30.0  # Seconds without a viewer or a request after which no more headers are read
PROCESSES_EVERY_S, PROCESSES_PER_S = 2.0, 20.0  # Shortest interval of the list of processes, and its length a second
MAX_STEPS = 500  # Steps of one event: with more, viewers ask for the answers again

Queue = asyncio.Queue[bytes | None]


class Feed:
    """The events of a page."""

    def __init__(self, reader: RunReader, answers: RunAnswers) -> None:
        self._reader, self._answers = reader, answers
        self.boot, self.at = nonce(), 0
        self._viewers: set[Queue] = set()
        self._newest: deque[bytes] = deque(maxlen=REPEATED)
        self._sent: dict[str, object] = {}
        self._processes_s = float("-inf")
        self._requested_s = time.monotonic()

    @contextmanager
    def viewer(self) -> Iterator[Queue]:
        """Yield the queue of a new viewer; None in it ends the connection. Raises ValueError for one too many."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise ValueError(f"events: want at most {MAX_VIEWERS} viewers at once; close a page")
        queue: Queue = asyncio.Queue(QUEUE)
        for message in self._newest:
            queue.put_nowait(message)
        self._viewers.add(queue)
        self._reader.watched.set()
        try:
            yield queue
        finally:
            self._viewers.discard(queue)

    def position(self) -> JsonObject:
        """Send the changes that wait, and return the position behind them, for an answer."""
        self._requested_s = time.monotonic()
        self._reader.watched.set()
        changes = self._reader.changes
        if changes.steps or changes.pushes or changes.evaluations or changes.samples:
            self.flush()
        return {"boot": self.boot, "at": self.at}

    async def run(self) -> None:
        """Background loop: an event a second, until cancelled."""
        while True:
            await asyncio.sleep(EVENT_S)
            self.flush()
            if not self._is_watched():
                self._reader.watched.clear()

    def _is_watched(self) -> bool:
        return bool(self._viewers) or time.monotonic() <= self._requested_s + UNWATCHED_S

    def close(self) -> None:
        """End the connections of all viewers."""
        for queue in self._viewers:
            _put(queue, None)

    def flush(self) -> None:
        """Send an event with the changes since the last one."""
        changes, self._reader.changes = self._reader.changes, RunChanges()
        before, self.at = self.at, self.at + 1
        if len(changes.steps) > MAX_STEPS:
            self.boot = nonce()
            self._newest.clear()
        segments = self._reader.lanes.changed()
        if not self._is_watched():
            self._sent.clear()
            self._newest.clear()
            return
        event = {"boot": self.boot, "from": before, "at": self.at, "run": self._answers.run()}
        event |= self._news(changes)
        if segments:
            event["segments"] = segments
        message = b"id: %d\ndata: %b\n\n" % (self.at, to_json(event))
        self._newest.append(message)
        for queue in self._viewers:
            _put(queue, message)

    def _news(self, changes: RunChanges) -> JsonObject:
        reader = self._reader
        news: JsonObject = {}
        if changes.steps and len(changes.steps) <= MAX_STEPS:
            news["points"] = self._answers.points_of(sorted(changes.steps))
        if changes.pushes:
            news["pushes"] = changes.pushes
        if changes.evaluations:
            versions = {(line["version"], line["set"]) for line in changes.evaluations}
            known = self._answers.evaluations()
            news["evaluations"] = [line for line in known if (line["version"], line["set"]) in versions]
        if changes.samples:
            news["samples"] = {"last_seq": reader.last_seq, "new": changes.samples}
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._processes_s + max(PROCESSES_EVERY_S, len(reader.rows) / PROCESSES_PER_S):
            self._processes_s = now_s
            self._add_changed(news, "processes", self._answers.processes())
            self._add_changed(news, "overview", self._answers.summary())
        self._add_changed(news, "alarms", reader.alarms.as_list())
        self._add_changed(news, "flow", self._answers.flow())
        self._add_changed(news, "queue", self._answers.queue())
        return news

    def _add_changed(self, news: JsonObject, name: str, value: object) -> None:
        if self._sent.get(name) != value:
            self._sent[name] = news[name] = value


def _put(queue: Queue, message: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(message)
