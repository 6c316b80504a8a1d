"""Scores of samples: the reward of each sample or of a whole group, and the log-probs of a teacher beside it.

Rewards are computed here, or by scorers (``ScorerPool``):

    actor --> scorer with the fewest calls --> reward, or the reason for which there is none
                |
                +-- not there, full, or it refuses: left alone for a while; another one is asked, without a limit
                +-- lost while it worked: another one is asked, at most MAX_LOST times
"""

import json
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tidemill.actors.actor.single_turn import failed
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.server_discovery import BusDiscovery
from tidemill.actors.engines.server_pool import ServerPool
from tidemill.actors.episodes.port import Made
from tidemill.actors.errors import ScorerLost, ScorerUnavailable
from tidemill.actors.scoring import ALIVE_S, ROLE, SCORE, SCORE_GROUP
from tidemill.actors.teachers import TeacherFailed, Teachers
from tidemill.bus.http.client import content_of, open_session
from tidemill.bus.keys import RunKeys
from tidemill.bus.liveness import LiveView
from tidemill.bus.system.coroutines import all_of, first_of
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.messages import Kind, Sample, Status, Task, Timings
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GROUP, GroupRequest
from tidemill.rewards.part_settings import fits
from tidemill.rewards.port import Contract, RewardRequest, Scorer
from tidemill.rewards.registry import REWARD
from tidemill.rewards.remote import MAX_ANSWER_BYTES
from tidemill.rewards.scorers import GroupScorer

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Functions that score samples."""

    score: Scorer | None
    """Reward of each sample; None = the reward of groups alone."""
    group_score: GroupScorer | None = None
    """Reward of whole groups; None = samples alone have one."""
    teachers: Teachers | None = None
    """Models that score the tokens of training samples; None = samples need none."""
    never_waits: bool = False
    """True if ``score`` returns without waiting for anything, so that rewards gain nothing from running at once."""
    waits_for: Callable[[], str] = lambda: ""
    """Returns what a reward waits for, in words; empty when it waits for nothing outside of its own process."""
    stop_waiting: Callable[[], None] = lambda: None
    """From this call on a reward raises NoServer instead of waiting for a process that computes it."""
    run: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Finds those processes, without end, beside the actor; None = there are none."""


class SampleScorer:
    """Scores samples of tasks: a sample whose reward or teacher fails is returned as FAILED. Raises NoServer."""

    def __init__(
        self,
        actor_id: str,
        config: ActorConfig,
        scorers: Scorers,
        activity: Activity,
        note_outage: Callable[[Task], None],
    ) -> None:
        """``note_outage``: called for a task whose score fails for a cause outside of its row."""
        self._actor_id, self._config, self._activity, self._note_outage = actor_id, config, activity, note_outage
        self._score, self._group_score, self._teachers = scorers.score, scorers.group_score, scorers.teachers
        self._never_waits = scorers.never_waits
        self._repeated = FailureLog(logger)
        self.running = 0
        """Rewards of samples that are computed, or wait for it."""

    def scores_together(self, task: Task) -> bool:
        """Return whether the samples of a task are scored as a group, once all are made."""
        if self._group_score is None or not fits(self._config.group_reward_when, task.metadata):
            return False
        return task.kind is not Kind.EVAL or self._score is None  # an evaluation scores each sample by itself

    def scores_at_once(self, task: Task) -> bool:
        """Return whether ``score`` of a sample of the task waits for nothing."""
        return self._never_waits and (self._teachers is None or task.kind is not Kind.TRAIN)

    async def score(self, task: Task, made: Made) -> Sample:
        """Return the sample with its reward and, for training, its teacher's scores; its tokens stay when one fails."""
        if self._teachers is None or task.kind is not Kind.TRAIN:
            return await self._reward(task, made)
        rewarded, taught = await all_of([self._reward(task, made), self._teach(self._teachers, task, made.sample)])
        if rewarded.status is Status.FAILED or taught.status is Status.FAILED:
            return rewarded if rewarded.status is Status.FAILED else taught
        return replace(
            rewarded,
            teacher_log_probs=taught.teacher_log_probs,
            teacher_top_ids=taught.teacher_top_ids,
            teacher_top_log_probs=taught.teacher_top_log_probs,
        )

    async def score_group(self, task: Task, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of a whole group with their rewards; all are FAILED if one has failed, or the reward."""
        assert self._group_score is not None
        if broken := [sample for sample in samples if sample.status is Status.FAILED]:
            reason = f"sample {broken[0].index} of its group: {broken[0].metadata['error']}"
            return [sample if sample in broken else failed(sample, reason) for sample in samples]
        rewards = tuple(sample.reward for sample in samples) if self._score is not None else ()
        request = GroupRequest(samples=tuple(_request_of(task, sample) for sample in samples), rewards=rewards)
        try:
            with self._activity:
                group_rewards = await self._group_score(request)
        except (TimeoutError, RewardFailed) as error:
            reason = self._reason(task, error)
            self._repeated("group reward failed", f"task={task.id} error={reason}")
            return [failed(sample, f"group reward {self._config.group_reward!r}: {reason}") for sample in samples]
        for sample, reward in zip(samples, group_rewards, strict=True):
            complete(sample, reward=reward, actor=self._actor_id, created_s=time.time())
        return list(samples)

    async def _reward(self, task: Task, made: Made) -> Sample:
        sample = made.sample
        if made.scored or self._score is None:
            return sample
        begin = time.monotonic()
        self.running += 1
        try:
            with self._activity:
                reward = await self._score(_request_of(task, sample))
        except (TimeoutError, RewardFailed) as error:
            reason, cause = self._reason(task, error), error.__cause__ or error
            text = f"task={sample.task} index={sample.index} error={reason}"
            self._repeated("reward failed", text, error=cause if isinstance(error, RewardFailed) else None)
            return failed(sample, f"reward {self._config.reward or 'reward_parts'!r}: {reason}")
        finally:
            self.running -= 1
        spent, reward_s = sample.timings, time.monotonic() - begin
        timings = Timings(
            queued_s=spent.queued_s, generating_s=spent.generating_s, tools_s=spent.tools_s, reward_s=reward_s
        )
        return complete(sample, reward=reward, timings=timings, actor=self._actor_id, created_s=time.time())

    async def _teach(self, teachers: Teachers, task: Task, sample: Sample) -> Sample:
        try:
            with self._activity:
                return await teachers.score(sample, task.metadata)
        except TeacherFailed as error:
            if error.outside:
                self._note_outage(task)
            self._activity.counters.teacher_failures += 1
            self._repeated("teacher failed", f"task={sample.task} index={sample.index} error={error}")
            return failed(sample, str(error))

    def _reason(self, task: Task, error: TimeoutError | RewardFailed) -> str:
        """Return why there is no reward, and note a cause outside of the row."""
        if isinstance(error, TimeoutError):
            return f"no result within {self._config.reward_timeout_s:g} s"
        if error.outside:
            self._note_outage(task)
        return error.reason


def complete(sample: Sample, **fields: Any) -> Sample:
    """Set the last fields of a sample that only its maker has, and return it."""
    # In place: a copy costs as much as the encoding of a sample.
    for name, value in fields.items():
        object.__setattr__(sample, name, value)
    return sample


def _request_of(task: Task, sample: Sample) -> RewardRequest:
    return RewardRequest(
        prompt=task.prompt,
        response=sample.response,
        label=task.label,
        status=sample.status,
        tokens=sample.tokens,
        metadata=task.metadata,
        response_length=sample.response_length,
        sampled_length=sample.sampled_length,
        num_turns=1 if sample.turns is None else len(sample.turns.tokens),
        transcript=sample.transcript,
    )


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
        self.pool = pool

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
                async with self.pool.acquire(min_version=-1, timeout_s=math.inf, avoid=avoid) as (scorer, client):
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
        calling, _ = await first_of(client.post(path, body), self.pool.gone(client))
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
