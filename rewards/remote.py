"""Rewards that ask a server: one POST of JSON with bounded retries and a circuit breaker, and ``remote``.

The request goes out as JSON; the answer is a number or named numbers.
"""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tidemill.bus.errors import DetailedError
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.wire.json_object import is_number
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GROUP, GroupRequest, group_fields
from tidemill.rewards.port import Parts, RewardRequest, fields_of

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
OF_THE_BODY = frozenset({400, 413, 422})  # Statuses that refuse the content of one call, not all calls
MAX_ANSWER_BYTES = 4 << 20  # Size of the largest answer that is read, unpacked
# Bounds of the pause before a repeated call; it doubles, and its length is random between the half and the whole
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
OPEN_AFTER = 8  # Calls in a row without an answer, after which the server is left alone
OPEN_S = 5.0  # Seconds for which it is left alone; then one call tries it, and the others wait for its end


class Calls:
    """Calls of one URL. The session is made at the first call, in the event loop that makes it."""

    def __init__(
        self, name: str, url: str, *, headers: Mapping[str, str], timeout_s: float, retries: int, connections: int
    ) -> None:
        """``name``: of the reward, for messages. Raises ValueError for values that cannot be."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: want http://... or https://..., got {url!r}")
        if not 0 < timeout_s < math.inf or not 0 <= retries <= 100 or not 1 <= connections <= 4096:
            got = f"{timeout_s}, {retries}, {connections}"
            raise ValueError(f"want timeout_s > 0, retries 0..100 and connections 1..4096, got {got}")
        self._name, self._url, self._headers = name, url, dict(headers)
        self._timeout_s, self._retries, self._connections = timeout_s, retries, connections
        self._session: aiohttp.ClientSession | None = None
        self._failures, self._open_until_s = 0, 0.0
        self._trying = asyncio.Lock()  # Held by the one call that tries a server which is left alone

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
        if self._session is not None:
            await self._session.close()


class _CallRefused(DetailedError):
    """An answer that refuses the call itself as wrong."""

    reason: str
    status: int
    template = "{reason}"


@dataclass(eq=False)
class AskingReward:
    """Options of every reward that asks a server. Raises ValueError for options that cannot be."""

    url: str
    timeout_s: float = 60.0
    """Limit of one attempt."""
    retries: int = 3
    connections: int = 64

    def calls(self, name: str, path: str, key_variable: str) -> Calls:
        """Return the calls of a path of the server, with the key in an environment variable. Raises ValueError."""
        return Calls(
            name,
            self.url.rstrip("/") + path if path else self.url,
            headers=bearer(key_variable),
            timeout_s=self.timeout_s,
            retries=self.retries,
            connections=self.connections,
        )


@dataclass(eq=False)
class _RemoteReward(AskingReward):
    timeout_s: float = 20.0
    token_env: str = ""
    """Environment variable with a bearer token."""

    def __post_init__(self) -> None:
        self._calls = self.calls("remote", "", self.token_env)


@dataclass(eq=False)
class RemoteGroupReward(_RemoteReward):
    """A reward of groups: asks ``tidemill reward-server NAME --group``, or any server of ``{samples, rewards}``.

    The answer is a list with a reward for each sample, or a map with this under ``rewards``, or ``failed`` with a
    reason.
    """

    async def __call__(self, request: GroupRequest) -> list[Parts]:
        answer: list[Parts] = await self._calls.post(group_fields(request), self._read)
        return answer

    def _read(self, answer: object) -> list[Parts]:
        _refuse_failed(answer, GROUP.word)
        fields = answer.get("rewards") if isinstance(answer, Mapping) else answer
        if not isinstance(fields, list) or not all(map(_is_reward, fields)):
            raise ValueError(f"want a list of rewards, or a map with it under rewards, got {answer!r}"[:300])
        return fields


@dataclass(eq=False)
class Remote(_RemoteReward):
    """Asks ``tidemill reward-server``, or any server of ``{prompt, response, label, ...}``, such as slime's remote_rm.

    The answer is a number, a map of numbers, or a map with ``reward``, or ``failed`` with a reason.
    """

    key: str = ""
    """Member of the answer with the reward."""

    async def __call__(self, request: RewardRequest) -> Parts:
        answer: Parts = await self._calls.post(fields_of(request), self._read)
        return answer

    def _read(self, answer: Any) -> Any:
        _refuse_failed(answer)
        key = self.key or ("reward" if isinstance(answer, Mapping) and not _is_reward(answer) else "")
        if key:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        if not _is_reward(answer):
            raise ValueError(f"want a number or a map of numbers{' under ' + key if key else ''}, got {answer!r}"[:300])
        return answer


def _refuse_failed(answer: object, word: str = "reward") -> None:
    if isinstance(answer, Mapping) and isinstance(answer.get("failed"), str):
        raise RewardFailed("remote", f"failed there: {answer['failed'][:500]}", word)


def bearer(variable: str, where: str = "") -> dict[str, str]:
    """Return the header with the token in an environment variable; none for an empty name. Raises ValueError.

    ``where``: the option that names it, for the message; empty = an option of a reward.
    """
    if not variable:
        return {}
    token = os.environ.get(variable, "")
    if not token:
        problem = f"want the variable {variable} set"
        raise ValueError(f"{where}: {problem}" if where else f"{problem} where the actor runs")
    return {"Authorization": f"Bearer {token}"}


def _is_reward(answer: object) -> bool:
    if isinstance(answer, Mapping):
        return bool(answer) and all(_is_reward(value) and not isinstance(value, Mapping) for value in answer.values())
    return is_number(answer)
