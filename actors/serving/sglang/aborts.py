"""Aborts of responses: requested by clients, at any time, and repeated until they take effect; never caused by an
update; counted.

SGLang (0.5.21 to 0.5.23) ends every request with an id that begins with the id of an abort, and aborts a stream's id
once more 2 s after the stream has ended. So the server gets ids of one length, new ones each time a request is sent
(``RequestIds``); the client sees its own.
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tidemill.actors.errors import EngineError
from tidemill.actors.serving.sglang.server_process import Api
from tidemill.actors.serving.sglang.weight_updates import SglangUpdates
from tidemill.bus.wire.json_object import JsonMapping

_ID = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')


class RequestIds:
    """Request ids of the ``responses`` to one validated body of /generate."""

    def __init__(self, body: JsonMapping, responses: int) -> None:
        prompts: Any = body["input_ids"] if body.get("text") is None else body["text"]
        self._batch = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
        self.given: str | Sequence[str] = body.get("rid") or secrets.token_hex(16)
        if not isinstance(self.given, str):
            self.responses = tuple(self.given)
        elif self._batch or responses > 1:
            self.responses = tuple(f"{self.given}_{place}" for place in range(responses))
        else:
            self.responses = (self.given,)
        self._known = responses == (len(prompts) if self._batch else 1)
        """True when the ids at the server are known: SGLang does not report the ids of ``n`` responses to a prompt."""
        self.replaced = self._known and not body.get("session_params")
        """True when the server gets ids of the proxy. A session continues a request by its id, which is kept."""
        self.at_server: Mapping[str, str] = {}
        """Ids that the server has now -> ids of the client."""

    def for_sending(self) -> str | Sequence[str]:
        """Return the ids with which to send the request now."""
        if not self.replaced:
            self.at_server = {name: name for name in self.responses} if self._known else {}
            return self.given
        self.at_server = {secrets.token_hex(16): name for name in self.responses}
        return list(self.at_server) if self._batch else next(iter(self.at_server))

    def matching(self, name: str | None) -> set[str]:
        """Return the responses with this id, or of the request with this id; None = all."""
        if name is None or name == self.given:
            return set(self.responses)
        return {name} & set(self.responses)

    def with_client_ids(self, raw: bytes) -> bytes:
        """Return whole lines of an answer with the client's ids."""
        return _ID.sub(self._client_id, raw) if self.replaced else raw

    def _client_id(self, match: re.Match[bytes]) -> bytes:
        name = self.at_server.get(match[1].decode())
        return match[0] if name is None else b'"id":' + json.dumps(name).encode()


_ABORTED = re.compile(rb'"type"\s*:\s*"abort"')
"""Finish reason of an abort in an answer's JSON; in a text the quotes would be escaped."""
_OVERLAP = 64
"""Number of bytes kept of an answer's last part, more than a match has: a match may be cut between two parts."""
ABORT_S = 60.0
"""Time limit in seconds of one abort at the server."""
AGAIN_S = 0.2
AGAIN_MAX_S = 2.0
"""Longest interval between two sends of an abort; the first is ``AGAIN_S``. SGLang ignores ids it does not have yet."""
SETTLE_S = 0.1
"""Seconds until SGLang's scheduler has a request. Before that an abort is lost (0.5.21 to 0.5.23: sent on once)."""
BEFORE_PAUSE_S = 2.0
"""Seconds before a pause in which a request may be sent too late for it: its abort waits for the end of the pause."""


class Aborts:
    """Aborts of one engine, counted in ``counters``: requests_aborted, and of them requests_aborted_by_pushes."""

    def __init__(self, updates: SglangUpdates, counters: dict[str, float]) -> None:
        self._updates, self._counters = updates, counters
        self._watches: set[Watch] = set()

    def abort(self, rid: str | None) -> list["Watch"]:
        """Record a client's abort of a request, of one of its responses, or of all (None). Returns the requests."""
        return [watch for watch in self._watches if watch.abort(rid)]

    @contextmanager
    def watching(self, ids: RequestIds) -> Iterator["Watch"]:
        """Watch the answer to a request. An abort that no client requested counts as an update's or a pause's."""
        watch = Watch(ids, self._updates)
        self._watches.add(watch)
        try:
            yield watch
            if watch.aborted:
                updates = self._updates
                is_updated = updates.under_way or updates.completed != watch.since or updates.pauses.mode == "abort"
                self._counters["requests_aborted"] += watch.aborted
                if is_updated and not watch.aborted_by_client:
                    self._counters["requests_aborted_by_pushes"] += watch.aborted
        finally:
            self._watches.discard(watch)
            watch.close()


class Watch:
    """One request, and its answer, which is read part by part."""

    def __init__(self, ids: RequestIds, updates: SglangUpdates) -> None:
        self.ids, self._updates = ids, updates
        self.aborted_by_client: set[str] = set()
        """The responses that a client has aborted."""
        self.since = updates.completed
        """Number of completed updates when the request began."""
        self.aborted = 0
        self._tail = b""
        self.sent_s = float("inf")
        """Time at which the request was sent to the server; infinity before."""
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_aborted(self) -> bool:
        """True when a client has aborted all of its responses."""
        return self.aborted_by_client.issuperset(self.ids.responses)

    def abort(self, rid: str | None) -> bool:
        """Record an abort by a client, as ``Aborts.abort``. Returns whether it concerns this request."""
        matching = self.ids.matching(rid)
        self.aborted_by_client |= matching
        return bool(matching)

    def sent(self) -> None:
        """Record that the request is sent to the server now."""
        self.sent_s = time.monotonic()

    def send_aborts(self, api: Api, after_s: float = 0.0) -> None:
        """Send the aborts to the server, from the time when it can process them until the answer is complete."""
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_aborts(api, after_s))

    async def _send_aborts(self, api: Api, after_s: float) -> None:
        again_s = AGAIN_S
        await asyncio.sleep(after_s)
        while True:
            left_s = self.scheduled_s() - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(min(left_s, SETTLE_S))
                continue
            ids = [name for name, client_id in self.ids.at_server.items() if client_id in self.aborted_by_client]
            for name in ids:
                with contextlib.suppress(EngineError):  # the request itself fails with the same error
                    await api.call("POST", "/abort_request", {"rid": name}, timeout_s=ABORT_S)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_MAX_S)

    def scheduled_s(self) -> float:
        """Return when the scheduler has the request; inf while it is paused, if the pause may have come first."""
        paused_s, (before_s, resumed_s) = self._updates.pauses.since_s, self._updates.pauses.last_s
        late_s = self.sent_s + BEFORE_PAUSE_S
        going_s = (max(self.sent_s, resumed_s) if late_s > before_s else self.sent_s) + SETTLE_S
        return going_s if max(going_s, late_s) < paused_s else float("inf")

    def close(self) -> None:
        """Stop sending aborts: the request has ended."""
        if self._sending is not None:
            self._sending.cancel()

    def scan(self, part: bytes) -> None:
        """Count the aborted responses in the next part of the answer, given without gaps or overlap."""
        text = self._tail + part
        end = 0
        for match in _ABORTED.finditer(text):
            self.aborted += 1
            end = match.end()
        self._tail = text[max(end, len(text) - _OVERLAP) :]
