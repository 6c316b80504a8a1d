"""The teachers of a run, as an actor asks them: each sequence of a sample is scored at the sampling temperature.

A teacher is fixed, so its scores never get stale: they are made once, where the sample is made, and travel with it. Waits for the teacher's
answers, each with a time limit, and between two attempts for a pause.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.engine_client import error_of_call
from tidemill.actors.errors import BadRequest, EngineError, EngineUnavailable
from tidemill.actors.teacher_settings import TeacherConfig, chosen, parse_teachers
from tidemill.actors.teachers.scores import Scores, request_of, scores_in
from tidemill.bus.http.client import ApiClient
from tidemill.bus.wire.messages import Sample

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 2.0
"""Seconds before the second attempt, doubled before each further one, and their bound."""
LAST_S = 0.1
"""Shortest time limit of an attempt in seconds."""


class TeacherFailed(Exception):
    """No teacher has scored a sample."""

    def __init__(self, teacher: str, reason: str) -> None:
        super().__init__(teacher, reason)
        self.teacher, self.reason = teacher, reason

    def __str__(self) -> str:
        return f"teacher {self.teacher!r}: {self.reason}" if self.teacher else f"teacher: {self.reason}"


class Teachers:
    """The teachers of a run. ``score`` any number of samples at once; ``close`` at the end."""

    def __init__(self, config: ActorConfig) -> None:
        self._teachers = parse_teachers(config.teachers)
        self._timeout_s, self._attempts, self._top_k = config.teacher_timeout_s, config.teacher_attempts, config.teacher_top_k
        self._servers = {url: ApiClient(url, error_of_call) for one in self._teachers for url in one.urls}
        self._in_flight = dict.fromkeys(self._servers, 0)
        self._numbers = count(1)

    async def score(self, sample: Sample, metadata: Mapping[str, object]) -> Sample:
        """Return the sample with the scores of its teacher, chosen by the metadata of its row. Raises TeacherFailed."""
        teacher = chosen(self._teachers, metadata)
        if teacher is None:
            raise TeacherFailed("", f"none applies to a row with metadata {dict(metadata)!r:.200}; add one without when")
        if not teacher.urls:
            cure = f"start `tidemill teacher {teacher.model}`, and set its address"
            raise TeacherFailed(teacher.name, f"it has no urls, because `tidemill up` alone serves its model; {cure}")
        left = 0
        asked = []
        for size in sample.sizes if sample.response_length else ():
            tokens = sample.tokens[left : left + size.num_tokens]
            asked.append((tokens, size.response_length))
            left += size.num_tokens
        found = await asyncio.gather(*(self._sequence(teacher, *each, sample.sampling.temperature) for each in asked))
        return _with_scores(sample, found, self._top_k)

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.close()

    async def _sequence(self, teacher: TeacherConfig, tokens: NDArray[np.int32], response_length: int, temperature: float) -> Scores:
        """Score one sequence on the server with the fewest requests in flight. Raises TeacherFailed.

        Servers that cannot be reached or do not serve are asked again until the time is over, those that fail a few times.
        """
        deadline, pause_s, failures = time.monotonic() + self._timeout_s, FIRST_PAUSE_S, 0
        last: dict[str, float] = {}
        while True:
            url = min(teacher.urls, key=lambda one: (last.get(one, 0.0), self._in_flight[one]))
            try:
                left_s = max(deadline - time.monotonic(), LAST_S)
                each_s = min(left_s, self._timeout_s / min(2, len(teacher.urls)))  # one that hangs leaves time for another
                return await self._ask(url, tokens, response_length, temperature, timeout_s=each_s)
            except EngineError as error:
                failures += not isinstance(error, EngineUnavailable)
                last[url] = time.monotonic()
                over = isinstance(error, BadRequest) or failures >= self._attempts or time.monotonic() + pause_s > deadline
                if over:
                    raise TeacherFailed(teacher.name, str(error)) from None
                logger.info("teacher failed, asked again teacher=%s error=%s", teacher.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _ask(self, url: str, tokens: NDArray[np.int32], response_length: int, temperature: float, *, timeout_s: float) -> Scores:
        rid = f"teacher-{id(self):x}-{next(self._numbers)}"
        body = request_of(tokens, response_length, temperature=temperature, top_k=self._top_k, rid=rid)
        self._in_flight[url] += 1
        try:
            answer = await self._servers[url].call("POST", "/generate", body, timeout_s=timeout_s)
        finally:
            self._in_flight[url] -= 1
        return scores_in(answer, tokens[len(tokens) - response_length :], temperature=temperature, top_k=self._top_k, url=url)


def _with_scores(sample: Sample, found: Sequence[Scores], top_k: int) -> Sample:
    """Return the sample with the scores of its sequences, one after the other; 0 where its tokens are not trainable."""
    trainable_R = sample.loss_mask != 0
    log_probs = np.concatenate([np.zeros(0, np.float32), *(each.log_probs for each in found)])
    sample = replace(sample, teacher_log_probs=np.where(trainable_R, log_probs, np.float32(0)))
    if not top_k:
        return sample
    return replace(
        sample,
        teacher_top_ids=np.concatenate([np.zeros(0, np.int32), *(each.top_ids for each in found)]),
        teacher_top_log_probs=np.concatenate([np.zeros(0, np.float32), *(each.top_log_probs for each in found)]),
    )
