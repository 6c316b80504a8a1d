"""The model calls of one request of a program: from a body of /generate to responses, and from those to turns and
SGLang's JSON.

    program -> gateway -> TokenHistory (text to the very ids that were sampled) -> ModelCalls -> engines
                       <-                                                       <-

The sampling is the task's: other values in a program's request are overridden, and counted. A request to change the
distribution in a way that no task has (grammars, biases) is refused, because the recorded log-probs would not be the
model's.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.responses import EngineResponse, Prompt, Responses
from tidemill.actors.episodes.calls import CUT, AnsweredCall, StreamedCalls, StreamedTurn, answer_of
from tidemill.actors.episodes.episode import LENGTH, Episode, ReservedCall
from tidemill.actors.episodes.recorder import TurnOutput
from tidemill.actors.errors import BadRequest
from tidemill.actors.generate_body import sampling_params
from tidemill.actors.openai import openai_api
from tidemill.actors.router.exchange import Answer, Request
from tidemill.bus.errors import WireError
from tidemill.bus.system.coroutines import all_of
from tidemill.bus.wire.invariants import LOG_PROB_SLACK, MIN_LOG_PROB
from tidemill.bus.wire.json_object import JsonMapping, JsonObject, is_integer, is_number
from tidemill.bus.wire.messages import Kind, Sampling

Number = TypeVar("Number", int, float)

MAX_CALLS = 64
"""Maximum number of responses to one request of a program."""
OF_TASK = ("temperature", "top_p", "top_k")
"""Sampling parameters that are the task's."""
PENALTIES = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Parameters that no task has, with the value at which they do nothing: another one is overridden."""
REFUSED = (
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "stop_regex",
    "logit_bias",
    "custom_params",
    "min_new_tokens",
    "ignore_eos",
)
"""Parameters that change the distribution, or when a response ends by the model's own word, in a way that no task has.
"""


class ModelCalls:
    """The calls of one request: a ``Handler``. Close ``room`` when the outputs are recorded, or will never be."""

    def __init__(
        self,
        episode: Episode,
        responses: Responses,
        *,
        max_context: int,
        name: str,
        model: str,
        agent: str,
        trained: bool,
        streams: bool,
    ) -> None:
        """``name``: id of the answer, as the program sees it. ``agent``: name of the agent within the episode.

        ``streams``: whether a stream is sent as its tokens are made; ``stream`` must then be ended. False = it is sent
        when it is whole.
        """
        self.episode, self._responses, self._max_context = episode, responses, max_context
        self._name, self._model, self._agent, self._trained, self._streams = name, model, agent, trained, streams
        self.room = ExitStack()
        """Room of the calls in the episode's budget."""
        self.outputs: list[AnsweredCall] = []
        """Each call, by place; none of a stream."""
        self.stream: StreamedCalls | None = None
        """The calls of a request that is streamed; they record their turns themselves."""

    def answers_for(self, episode: Episode) -> bool:
        """Return whether these calls, which are recorded, gave the episode's answer."""
        return self._trained or not episode.answered

    async def __call__(self, request: Request) -> Answer:
        """Answer /generate with token ids, and /v1/models. Raises BadRequest, GenerationFailed, Interrupted."""
        if request.path == "/v1/models":
            limit = self.episode.budget.context or self._max_context
            return Answer.of(HTTPStatus.OK, openai_api.models([self._model], min(self._max_context, limit)))
        if request.path != "/generate":
            raise BadRequest(f"{request.path}: not a path of this gateway")
        body = request.json()
        calls, many = _read_calls(body)
        streamed = body.get("stream") is True
        if streamed and self._streams:
            streams = [partial(self._stream_call, *call) for call in calls]
            self.stream = StreamedCalls(streams, self._record, request.id)
            await self.stream.begin()
            return Answer.of_states(HTTPStatus.OK, self.stream.states())
        self.outputs = await all_of(self._call(*call, place) for place, call in enumerate(calls))
        answers = [answer_of(call, request.id, place) for place, call in enumerate(self.outputs)]
        if streamed:
            return Answer.of_states(HTTPStatus.OK, _states_of(answers))
        return Answer.of(HTTPStatus.OK, answers if many else answers[0])

    async def _call(self, prompt: NDArray[np.int32], parameters: JsonMapping, place: int) -> AnsweredCall:
        episode = self.episode
        reserved, sampling = self._reserve(prompt, parameters, self.room)
        stored = episode.log.take_stored(prompt, at_most=reserved.max_new_tokens, trained=self._trained)
        if stored is not None:
            # The times of this attempt, as its tools have them.
            output = replace(stored.output(self._turn_id(place)), begin_s=reserved.begin_s, seconds=0.0)
            answered = AnsweredCall(prompt, output, stored.response(), stored)
        else:
            response = await self._generate(prompt, sampling, place)
            answered = self._answered(reserved, prompt, place, response)
        self._note_spent(reserved, answered)
        return answered

    async def _stream_call(
        self, prompt: NDArray[np.int32], parameters: JsonMapping, turn: StreamedTurn
    ) -> AnsweredCall:
        reserved, sampling = self._reserve(prompt, parameters, turn.room)
        turn.cut = partial(self._cut, reserved, prompt, turn.place)
        response = await self._generate(prompt, sampling, turn.place, turn.grow)
        answered = self._answered(reserved, prompt, turn.place, response)
        self._note_spent(reserved, answered)
        return answered

    def _reserve(
        self, prompt: NDArray[np.int32], parameters: JsonMapping, room: ExitStack
    ) -> tuple[ReservedCall, Sampling]:
        """Return the room of a call, which is kept until ``room`` is closed, and its sampling. Raises BadRequest."""
        sampling = _sampling(self.episode.sampling, parameters, self._note_overridden if self._trained else None)
        call = room.enter_context(self.episode.call(prompt, sampling.max_new_tokens, max_context=self._max_context))
        return call, replace(sampling, max_new_tokens=call.max_new_tokens, seed=call.seed)

    async def _generate(
        self,
        prompt: NDArray[np.int32],
        sampling: Sampling,
        place: int,
        grown: Callable[[EngineResponse], None] | None = None,
    ) -> EngineResponse:
        episode = self.episode
        request = Prompt(
            name=f"{episode.name}.{self._name}.{place}",
            tokens=prompt,
            sampling=sampling,
            min_version=episode.task.min_version,
            prefer=episode.engine,
        )
        return await self._responses.generate(request, _accept, episode.clock.stopped, grown)

    def _note_spent(self, reserved: ReservedCall, answered: AnsweredCall) -> None:
        """Note a budget that has cut a response short."""
        if reserved.limit and answered.response.generation.finish == LENGTH:
            self.episode.spent = self.episode.spent or reserved.limit

    def _note_overridden(self, parameter: str) -> None:
        self.episode.overridden[parameter] += 1

    async def _record(self, call: AnsweredCall) -> None:
        await self.episode.record(call.prompt, call.output, call.response)

    def _cut(
        self, reserved: ReservedCall, prompt: NDArray[np.int32], place: int, response: EngineResponse
    ) -> AnsweredCall:
        """Return an unfinished response as a turn."""
        seconds = response.timings.queued_s + response.timings.generating_s  # up to the last token that was sent
        return self._answered(reserved, prompt, place, response, finish=CUT, seconds=seconds)

    def _turn_id(self, place: int) -> str:
        return self._name if not place else f"{self._name}.{place}"

    def _answered(
        self,
        reserved: ReservedCall,
        prompt: NDArray[np.int32],
        place: int,
        response: EngineResponse,
        *,
        finish: str = "",
        seconds: float | None = None,
    ) -> AnsweredCall:
        """Return a response as a turn. ``seconds``: of its call; None = it ends now."""
        generation = response.generation
        # Nothing replays the experts of an evaluation.
        output = TurnOutput(
            tokens=generation.tokens,
            log_probs=generation.log_probs,
            spans=generation.spans,
            id=self._turn_id(place),
            finish=finish or generation.finish or "",
            agent=self._agent,
            begin_s=reserved.begin_s,
            seconds=time.monotonic() - self.episode.began_s - reserved.begin_s if seconds is None else seconds,
            trained=self._trained,
            routed_experts=generation.routed_experts if self.episode.task.kind is Kind.TRAIN else None,
        )
        return AnsweredCall(prompt, output, response, None)


async def _states_of(answers: list[JsonObject]) -> AsyncGenerator[JsonMapping, None]:
    """Yield the states of a stream that is sent when it is whole."""
    for answer in answers:
        yield answer


def _accept(response: EngineResponse) -> None:
    """Refuse log-probs that are no log-probs, as the rules of a sample do: another engine may do better."""
    log_probs = response.generation.log_probs
    wrong = np.flatnonzero(~((log_probs >= MIN_LOG_PROB) & (log_probs <= LOG_PROB_SLACK)))  # NaN fails both
    if len(wrong):
        raise WireError(f"rollout_log_probs[{wrong[0]}]", f"{MIN_LOG_PROB:g} to 0", float(log_probs[wrong[0]]))


def _read_calls(body: JsonMapping) -> tuple[list[tuple[NDArray[np.int32], JsonMapping]], bool]:
    """Return prompt and sampling parameters of each call, and whether the answer is a list. Raises BadRequest."""
    input_ids = body.get("input_ids")
    many = isinstance(input_ids, list) and bool(input_ids) and isinstance(input_ids[0], list)
    prompts = [_prompt(ids) for ids in (input_ids if many else [input_ids])]  # type: ignore[union-attr]
    sampling = body.get("sampling_params")
    params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    if len(params) != len(prompts):
        raise BadRequest(f"sampling_params: want one for each of {len(prompts)} prompts, got {len(params)}")
    calls: list[tuple[NDArray[np.int32], JsonMapping]] = []
    for prompt, parameters in zip(prompts, params, strict=True):
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(f"sampling_params: want a map, got {parameters!r}")
        count = (parameters or {}).get("n") or 1
        if not is_integer(count) or not 1 <= count <= MAX_CALLS:
            raise BadRequest(f"sampling_params.n: want 1 .. {MAX_CALLS}, got {count!r}")
        calls += [(prompt, parameters or {})] * count
    if len(calls) > MAX_CALLS:
        raise BadRequest(f"want at most {MAX_CALLS} responses to a request, got {len(calls)}")
    return calls, many or len(calls) > 1


def _prompt(ids: object) -> NDArray[np.int32]:
    if not isinstance(ids, list) or not ids:
        raise BadRequest(f"input_ids: want a list of token ids, at least one, got {str(ids)[:80]}")
    if not _whole_numbers(ids):
        raise BadRequest("input_ids: want whole numbers >= 0")
    return np.array(ids, np.int32)


def _whole_numbers(ids: list[object]) -> bool:
    """Return whether all are numbers >= 0 of int32, and no bool. One pass in C each: prompts are long."""
    return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31  # type: ignore[type-var, operator]


def _sampling(task: Sampling, parameters: JsonMapping, overridden: Callable[[str], None] | None) -> Sampling:
    """Return the task's sampling with the limits that a program may set. ``overridden``: None = all as asked."""
    for name in REFUSED:
        if parameters.get(name) not in (None, False, 0, [], {}, ""):
            reason = "it would change the distribution that is trained on"
            raise BadRequest(f"sampling_params.{name}: not supported in an episode: {reason}; leave it out")
    for name, neutral in PENALTIES.items():
        if parameters.get(name) not in (None, neutral):
            if overridden is None:
                raise BadRequest(f"sampling_params.{name}: not supported; want {neutral}, got {parameters[name]!r}")
            overridden(name)
    limits = replace(
        task,
        max_new_tokens=min(task.max_new_tokens, _number(parameters, "max_new_tokens", int, 1, task.max_new_tokens)),
        stop=_stops(parameters.get("stop"), task.stop),
        stop_token_ids=_ids(parameters.get("stop_token_ids"), task.stop_token_ids),
    )
    if overridden is None:
        return replace(
            limits,
            temperature=sampling_params({"temperature": parameters.get("temperature")}).temperature,
            top_p=_number(parameters, "top_p", float, 0, 1.0),
            top_k=_number(parameters, "top_k", int, -1, -1),
        )
    for name in OF_TASK:
        if parameters.get(name) not in (None, getattr(task, name)):
            overridden(name)
    return limits


def _number(parameters: JsonMapping, name: str, kind: type[Number], least: Number, default: Number) -> Number:
    value = parameters.get(name)
    if value is None:
        return default
    is_kind = is_integer(value) if kind is int else is_number(value)
    if not is_kind or not least <= value <= 1e9:
        raise BadRequest(f"sampling_params.{name}: want a number >= {least}, got {value!r}")
    return kind(value)


def _stops(stop: object, default: tuple[str, ...]) -> tuple[str, ...]:
    listed = [stop] if isinstance(stop, str) else stop
    if not listed:
        return default
    if not isinstance(listed, list) or not all(isinstance(text, str) and text for text in listed):
        raise BadRequest(f"sampling_params.stop: want texts that are not empty, got {stop!r}")
    return tuple(listed)


def _ids(ids: object, default: tuple[int, ...]) -> tuple[int, ...]:
    if not ids:
        return default
    if not isinstance(ids, list) or not _whole_numbers(ids):
        raise BadRequest(f"sampling_params.stop_token_ids: want token ids, got {ids!r}")
    return tuple(ids)
