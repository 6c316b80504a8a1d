"""Scores of samples: the reward of each sample or of a whole group, and the log-probs of a teacher beside it."""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill.actors.actor.single_turn import failed
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.activity import Activity
from tidemill.actors.episodes.port import Made
from tidemill.actors.teachers import TeacherFailed, Teachers
from tidemill.bus.system.coroutines import all_of
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.messages import Kind, Sample, Status, Task, Timings
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest, Scorer, fits
from tidemill.rewards.scorers import GroupScorer

logger = logging.getLogger(__name__)


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
