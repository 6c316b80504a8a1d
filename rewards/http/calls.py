"""One POST of JSON with bounded retries and a circuit breaker, for rewards that ask a server."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from tidemill.bus.http.client import content_of, open_session
from tidemill.rewards.errors import RewardFailed

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a call is repeated."""
OF_THE_BODY = frozenset({400, 413, 422})
"""Statuses that refuse the content of one call, not all calls."""
MAX_ANSWER_BYTES = 4 << 20
"""Size of the largest answer that is read, unpacked."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
"""Bounds of the pause before a repeated call; it doubles, and its length is random between the half and the whole."""
OPEN_AFTER = 8
"""Calls in a row without an answer, after which the server is left alone."""
OPEN_S = 5.0
"""Seconds for which it is left alone; then one call tries it, and the others wait for its end."""


class Calls:
    """Calls of one URL. The session is made at the first call, in the event loop that makes it."""

    def __init__(
        self, name: str, url: str, *, headers: Mapping[str, str], timeout_s: float, retries: int, connections: int
    ) -> None:
        """``name``: of the reward, for messages. Raises ValueError for values that cannot be."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: want http://... or https://..., got {url!r}")
        if not 0 < timeout_s < math.inf or not 0 <= retries <= 100 or not 1 <= connections <= 4096:
            raise ValueError(
                f"want timeout_s > 0, retries 0..100 and connections 1..4096, got {timeout_s}, {retries}, {connections}"
            )
        self._name, self._url, self._headers = name, url, dict(headers)
        self._timeout_s, self._retries, self._connections = timeout_s, retries, connections
        self._session: aiohttp.ClientSession | None = None
        self._failures, self._open_until_s = 0, 0.0
        self._trying = asyncio.Lock()
        """Held by the one call that tries a server which is left alone."""

    async def post(self, body: object, read: Callable[[Any], Any]) -> Any:
        """Return ``read`` of the answer's JSON.

        A call without an answer, with one of ``AGAIN``, or with one that ``read`` refuses by ValueError is repeated.
        While the server is left alone, calls wait: failing at once would use up prompts as fast as they come. Raises
        RewardFailed with the last reason.
        """
        pause_s, reason = FIRST_PAUSE_S, ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                result = read(await self._permitted(body))
            except _CallRefused as error:
                raise RewardFailed(self._name, str(error), outside=error.status not in OF_THE_BODY) from None
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
                slow = isinstance(error, TimeoutError) and not str(error)
                what = f"no answer within {self._timeout_s:g} s" if slow else str(error) or type(error).__name__
                reason = f"{self._url}: {what}"[:1000]
                self._note_failure()
                continue
            self._failures = 0
            return result
        raise RewardFailed(self._name, f"{reason} ({self._retries + 1} attempts)", outside=True)

    async def _permitted(self, body: object) -> Any:
        """Call at once; while the server is left alone, when its time is over and no other call is trying it."""
        if self._failures < OPEN_AFTER:
            return await self._once(body)
        async with self._trying:
            if self._failures >= OPEN_AFTER:
                await asyncio.sleep(self._open_until_s - time.monotonic())
            return await self._once(body)

    def _note_failure(self) -> None:
        self._failures += 1
        if self._failures >= OPEN_AFTER:
            self._open_until_s = time.monotonic() + OPEN_S

    async def _once(self, body: object) -> Any:
        if self._session is None:
            self._session = open_session(
                total_s=self._timeout_s, headers=self._headers, max_connections=self._connections
            )
        async with self._session.post(self._url, json=body, allow_redirects=False) as response:
            content = await content_of(response.content, MAX_ANSWER_BYTES)
            if response.status in AGAIN:
                raise ValueError(f"status {response.status}: {content[:200]!r}")
            if response.status >= 300:
                raise _CallRefused(f"{self._url}: status {response.status}: {content[:200]!r}", response.status)
        return json.loads(content)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


class _CallRefused(Exception):
    """An answer that refuses the call itself as wrong."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason, self.status = reason, status

    def __str__(self) -> str:
        return self.reason
