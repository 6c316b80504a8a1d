"""The teachers of a run, as an actor asks them: each sequence of a sample is scored at the sampling temperature.

A teacher is fixed, so its scores never get stale: they are made once, where the sample is made, and travel with it.
Waits for the teacher's answers, each with a time limit, and between two attempts for a pause.

Shape letters: R = tokens of the response, K = listed tokens.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.config import ActorConfig, TeacherConfig, chosen
from tidemill.actors.engines.engine_client import error_of_call
from tidemill.actors.errors import BadRequest, EngineError, EngineFailed, EngineUnavailable
from tidemill.bus.errors import DetailedError
from tidemill.bus.http.client import ApiClient
from tidemill.bus.wire.invariants import LOG_PROB_SLACK, MIN_LOG_PROB
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.messages import Sample

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 2.0
"""Seconds before the second attempt, doubled before each further one, and their bound."""
MIN_TIMEOUT_S = 0.1
"""Shortest time limit of an attempt in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs (nats) under a teacher at the sampling temperature."""

    log_probs: NDArray[np.float32]
    """Log-probs of the response's tokens, [R]."""
    top_ids: NDArray[np.int32]
    """The most probable tokens of each place, [R x K] in one dimension."""
    top_log_probs: NDArray[np.float32]
    """Their log-probs, [R x K] in one dimension."""


def request_of(
    tokens: NDArray[np.int32], response_length: int, *, temperature: float, top_k: int, rid: str
) -> dict[str, object]:
    """Return the body of /generate for scores of the last ``response_length`` tokens, all with a token before them."""
    return {
        "rid": rid,
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
        "return_logprob": True,
        # The entry of this place has no log-prob, neither in SGLang's answer: the tokens behind it have.
        "logprob_start_len": len(tokens) - response_length - 1,
        "top_logprobs_num": top_k,
    }


def scores_in(answer: object, response: NDArray[np.int32], *, temperature: float, top_k: int, url: str) -> Scores:
    """Return the scores in an answer. Raises EngineFailed for another answer, or scores at another temperature."""
    try:
        meta = answer["meta_info"]  # type: ignore[index]
        _require_temperature(meta, temperature, url)
        entries = meta["input_token_logprobs"][-len(response) :]
        ids = [entry[1] for entry in entries]
        log_probs = np.array([entry[0] for entry in entries], np.float32)
        places = meta["input_top_logprobs"][-len(response) :] if top_k else []
        shape = (len(places), top_k)
        top_ids = np.array([[token[1] for token in place[:top_k]] for place in places], np.int32).reshape(shape)
        top = np.array([[token[0] for token in place[:top_k]] for place in places], np.float32).reshape(shape)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineFailed(url, f"its scores cannot be parsed: {error!r}") from error
    if ids != response.tolist():
        raise EngineFailed(
            url,
            f"want scores of the {len(response)} tokens of the response, got {len(ids)} for other tokens: {ids[:8]}",
        )
    if top_k and len(top) != len(response):
        raise EngineFailed(url, f"want {top_k} listed tokens at each of {len(response)} places, got {len(top)} places")
    for values in (log_probs, top):
        if not (np.isfinite(values) & (values <= LOG_PROB_SLACK)).all():
            raise EngineFailed(url, "want finite log-probs of at most 0, got others")
    # A teacher may exclude a token further than any sampler draws one: the bounds are those of samples.
    log_probs, top = (np.clip(values, MIN_LOG_PROB, 0.0).astype(np.float32) for values in (log_probs, top))
    return Scores(log_probs=log_probs, top_ids=top_ids.ravel(), top_log_probs=top.ravel())


def _require_temperature(meta: JsonMapping, temperature: float, url: str) -> None:
    """Raise EngineFailed for scores at another temperature. SGLang names none, and scores input at 1 (0.5.23)."""
    # A KL between distributions at two temperatures is none between the models (decision 042).
    scored_at = float(meta.get("input_logprobs_temperature", 1.0))
    if scored_at != temperature:
        raise EngineFailed(
            url,
            f"its scores are at temperature {scored_at:g}, the samples at {temperature:g}; want a teacher that scores "
            "at the sampling temperature (tidemill teacher), or temperature 1 in the run and in its rows",
        )


class TeacherFailed(DetailedError):
    """No teacher has scored a sample."""

    teacher: str
    """Its name; empty = no teacher applies."""
    reason: str
    outside: bool = False
    """True if the cause lies outside of the row, so that samples of other rows fail, too."""
    template = "{named_teacher}: {reason}"

    @property
    def named_teacher(self) -> str:
        """The teacher as the message shows it."""
        return f"teacher {self.teacher!r}" if self.teacher else "teacher"


class Teachers:
    """The teachers of a run. ``score`` any number of samples at once; ``close`` at the end."""

    def __init__(self, config: ActorConfig) -> None:
        self._config, self._teachers = config, list(config.teachers.values())
        self._servers = {url: ApiClient(url, error_of_call) for teacher in self._teachers for url in teacher.servers}
        self._in_flight = dict.fromkeys(self._servers, 0)
        self._numbers = count(1)

    async def score(self, sample: Sample, metadata: Mapping[str, object]) -> Sample:
        """Return the sample with the scores of its teacher, chosen by the metadata of its row. Raises TeacherFailed."""
        teacher = chosen(self._teachers, metadata)
        if teacher is None:
            reason = f"none applies to a row with metadata {dict(metadata)!r:.200}; add one without when"
            raise TeacherFailed("", reason)
        if not teacher.servers:
            cure = f"start `tidemill teacher {teacher.model}`, and set its address"
            raise TeacherFailed(
                teacher.name, f"it has no urls, because `tidemill up` alone serves its model; {cure}", outside=True
            )
        begin, scorings = 0, []
        for size in sample.sizes if sample.response_length else ():
            tokens, begin = sample.tokens[begin : begin + size.num_tokens], begin + size.num_tokens
            scorings.append(self._score_sequence(teacher, tokens, size.response_length, sample.sampling.temperature))
        return _with_scores(sample, await asyncio.gather(*scorings), self._config.teacher_top_k)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def _score_sequence(
        self, teacher: TeacherConfig, tokens: NDArray[np.int32], response_length: int, temperature: float
    ) -> Scores:
        """Score one sequence on the server with the fewest requests in flight. Raises TeacherFailed.

        Servers that cannot be reached or do not serve are asked again until the time is over, those that fail a few
        times.
        """
        timeout_s = self._config.teacher_timeout_s
        deadline, pause_s, failures = time.monotonic() + timeout_s, FIRST_PAUSE_S, 0
        failed_s: dict[str, float] = {}
        while True:
            url = min(teacher.servers, key=lambda url: (failed_s.get(url, 0.0), self._in_flight[url]))
            try:
                rest_s = max(deadline - time.monotonic(), MIN_TIMEOUT_S)
                # A server that hangs leaves time for another one.
                attempt_s = min(rest_s, timeout_s / min(2, len(teacher.servers)))
                return await self._ask(url, tokens, response_length, temperature, timeout_s=attempt_s)
            except EngineError as error:
                outside = not isinstance(error, BadRequest)
                failures += not isinstance(error, EngineUnavailable)
                failed_s[url] = time.monotonic()
                is_late = time.monotonic() + pause_s > deadline
                if not outside or failures >= self._config.teacher_attempts or is_late:
                    raise TeacherFailed(teacher.name, str(error), outside=outside) from None
                logger.info("teacher failed, asked again teacher=%s error=%s", teacher.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _ask(
        self, url: str, tokens: NDArray[np.int32], response_length: int, temperature: float, *, timeout_s: float
    ) -> Scores:
        rid, top_k = f"teacher-{id(self):x}-{next(self._numbers)}", self._config.teacher_top_k
        body = request_of(tokens, response_length, temperature=temperature, top_k=top_k, rid=rid)
        self._in_flight[url] += 1
        try:
            answer = await self._servers[url].call("POST", "/generate", body, timeout_s=timeout_s)
        finally:
            self._in_flight[url] -= 1
        response = tokens[len(tokens) - response_length :]
        return scores_in(answer, response, temperature=temperature, top_k=top_k, url=url)


def _with_scores(sample: Sample, scores: Sequence[Scores], top_k: int) -> Sample:
    """Return the sample with the scores of its sequences, one after the other; 0 where its tokens are not trainable."""
    trainable_R = sample.loss_mask != 0
    log_probs = np.concatenate([np.zeros(0, np.float32), *(sequence.log_probs for sequence in scores)])
    sample = replace(sample, teacher_log_probs=np.where(trainable_R, log_probs, np.float32(0)))
    if not top_k:
        return sample
    return replace(
        sample,
        teacher_top_ids=np.concatenate([np.zeros(0, np.int32), *(sequence.top_ids for sequence in scores)]),
        teacher_top_log_probs=np.concatenate([np.zeros(0, np.float32), *(part.top_log_probs for part in scores)]),
    )
