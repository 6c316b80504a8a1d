"""Rewards asked of scorers: the choice of one, and another when it ends or freezes. Knows no reward.

::

    actor --> scorer with the fewest calls --> reward, or the reason for which there is none
                |
                +-- not there, full, or it refuses: left alone for a while; another one is asked, without a limit
                +-- lost while it worked: another one is asked, at most MAX_LOST times
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from tidemill.actors.engines.server_discovery import BusDiscovery
from tidemill.actors.engines.server_pool import ServerPool
from tidemill.actors.errors import ScorerLost, ScorerUnavailable
from tidemill.actors.scoring.server import ALIVE_S, ROLE, SCORE, SCORE_GROUP
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.liveness import LiveView, RunKeys
from tidemill.bus.system.coroutines import first_of
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GROUP, GroupRequest
from tidemill.rewards.port import Contract, RewardRequest
from tidemill.rewards.registry import REWARD
from tidemill.rewards.remote import MAX_ANSWER_BYTES

MAX_LOST = 4
"""Scorers lost while they worked on one request, after which its sample is FAILED: the request may end them."""
CONNECT_S = 5.0
"""Deadline of a connection."""
SILENT_S = 6 * ALIVE_S
"""Seconds without a byte of an answer, after which its scorer counts as lost; it writes a blank every ``ALIVE_S``."""
MAX_S = 3600.0
"""Deadline of a call, its wait for a place in the scorer included. The scorer bounds the reward itself."""
_MAX_REASON = 1000
"""Characters of a reason that are kept."""
_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.NonHttpUrlClientError, ValueError)
_REFUSED = (400, 413, 422)
"""Statuses that refuse the request itself."""
_SHOWN = 200
"""Length at which an answer is cut off in messages."""


class ScorerClient:
    """Calls of one scorer. The session is made at the first call."""

    def __init__(self, url: str, keys: RunKeys) -> None:
        self._url, self._keys = url, keys
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes) -> Any:
        """Return the answer's JSON, and its reason as RewardFailed. Raises ScorerUnavailable, ScorerLost."""
        if self._session is None:
            self._session = open_session(total_s=MAX_S, connect_s=CONNECT_S, read_s=SILENT_S)
        headers, answered = {"Content-Type": "application/json", **await self._keys.headers()}, False
        try:
            posting = self._session.post(f"{self._url}{path}", data=body, headers=headers, allow_redirects=False)
            async with posting as response:
                answered = True
                status, content = response.status, await content_of(response.content, MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            # No connection, or an address that is none: nothing was sent.
            unsent = isinstance(error, _UNSENT) and not answered
            raise (ScorerUnavailable if unsent else ScorerLost)(self._url, str(error) or type(error).__name__) from None
        shown = f"status {status}: {content[:_SHOWN]!r}"
        if status in _REFUSED:
            raise RewardFailed("scorers", f"refused by the scorer at {self._url}: {shown}", outside=True)
        if status == 500:
            raise ScorerLost(self._url, shown)
        if status != 200:
            raise ScorerUnavailable(self._url, shown)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ScorerLost(self._url, f"want JSON, got {content[:_SHOWN]!r}: {error}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class ScorerPool(ServerPool[ScorerClient]):
    """The scorers of a run."""

    noun = "scorer"

    def _describe_server(self, min_version: int) -> str:
        return "a scorer (tidemill scorer, or up.scorers) that serves"

    @classmethod
    def on_bus(cls, view: LiveView, keys: RunKeys) -> "ScorerPool":
        """Return the pool of those with a live row."""
        return cls(BusDiscovery(view, ROLE), lambda url: ScorerClient(url, keys), in_turn=True)


class RemoteScoring:
    """The rewards of a run as its actor calls them (``Scorer`` and ``GroupScorer`` of ``tidemill.rewards``)."""

    def __init__(self, pool: ScorerPool) -> None:
        self._pool = pool

    async def score(self, request: RewardRequest) -> float | dict[str, float]:
        """Return the reward of a sample, however long there is no scorer. Raises RewardFailed."""
        reward: float | dict[str, float] = await self._request(REWARD, SCORE, "reward", request)
        return reward

    async def group_score(self, request: GroupRequest) -> list[float | dict[str, float]]:
        """Return the reward of each sample of a group. Raises RewardFailed."""
        rewards: list[float | dict[str, float]] = await self._request(GROUP, SCORE_GROUP, "rewards", request)
        if len(rewards) != len(request.samples):
            reason = f"want {len(request.samples)} rewards, one for each sample, got {len(rewards)}"
            raise RewardFailed("scorers", reason, GROUP.word)
        return rewards

    async def _request(self, contract: Contract, path: str, field: str, request: object) -> Any:
        try:
            body = contract.encode(request)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"want values that JSON has in label, prompt and metadata: {error}"
            raise RewardFailed("scorers", reason, contract.word) from None
        num_lost, avoid = 0, ""
        while True:
            try:
                async with self._pool.acquire(min_version=-1, timeout_s=math.inf, avoid=avoid) as (scorer, client):
                    avoid = scorer
                    return _read(scorer, contract, field, await self._call(scorer, client, path, body))
            # A reward is a function without a state: another scorer computes it again (decision 045).
            except ScorerLost as error:
                num_lost += 1
                if num_lost >= MAX_LOST:
                    reason = f"{num_lost} scorers were lost while they worked on it, the last: {error}"
                    raise RewardFailed("scorers", reason, outside=True) from None
            except ScorerUnavailable:  # the pool leaves it alone for a while
                continue

    async def _call(self, scorer: str, client: ScorerClient, path: str, body: bytes) -> Any:
        """Call a scorer until it answers or is gone."""
        calling, _ = await first_of(client.post(path, body), self._pool.gone(client))
        if calling.cancelled():
            raise ScorerLost(scorer, "it has ended, or written no live row for ten seconds")
        return calling.result()


def _read(scorer: str, contract: Contract, field: str, answer: Any) -> Any:
    """Return the reward in an answer of a scorer. Raises RewardFailed, ScorerLost."""
    if isinstance(answer, Mapping) and isinstance(answer.get("failed"), str):
        raise RewardFailed("scorers", answer["failed"][:_MAX_REASON], contract.word)
    if not isinstance(answer, Mapping) or field not in answer:
        raise ScorerLost(scorer, f"want a map with {field} or failed, got {answer!r}"[: 2 * _SHOWN])
    return contract.checked("scorers", answer[field])
