"""Rejects requests that would end or corrupt an SGLang server. Other invalid requests are left to SGLang, which refuses
them itself.

The rejected ones were found by sending SGLang every field with invalid values, one by one
(``tests/sglang/test_sglang_proxy.py``).
"""

import re
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from tidemill.actors.errors import BadRequest
from tidemill.actors.generate_body import (
    Natural,
    Positive,
    RequestLimits,
    Temperature,
    Text,
    TimeLimit,
    check_temperature,
    prompt_lists,
    texts_in,
    token_ids,
)
from tidemill.actors.http_api import decode
from tidemill.bus.wire.json_object import JsonMapping

_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
Float32 = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
FLOATS = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
FOR_EACH_PROMPT = (
    *("stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "priority", "extra_key", "lora_path"),
)
"""Fields with one value for a whole batch, or with one for each prompt."""


class ServerParams(Struct, kw_only=True):
    """Sampling parameters of SGLang, without nulls. They are passed on as they came, without these defaults."""

    n: Positive = 1
    temperature: Temperature = 1.0
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    top_k: int = 0
    sampling_seed: int = 0
    stream_interval: int = 0
    top_p: Float32 = 0.0
    min_p: Float32 = 0.0
    frequency_penalty: Float32 = 0.0
    presence_penalty: Float32 = 0.0
    repetition_penalty: Float32 = 0.0
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = False
    no_stop_trim: bool = False
    json_schema: str = ""
    regex: str = ""
    ebnf: str = ""
    structural_tag: str = ""
    stop: str | list[str] = ""
    stop_token_ids: list[int | str] = []
    stop_regex: str | list[str] = []
    logit_bias: dict[str, Float32] = {}

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        floats = [(name, getattr(self, name)) for name in FLOATS]
        for name, value in [*floats, *(("logit_bias", bias) for bias in self.logit_bias.values())]:
            if 0 < abs(value) < _TINY:
                raise ValueError(f"{name}: want 0, or a number of 32 bits, got {value}")
        for pattern in [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex:
            _check_pattern(pattern)


class ServerBody(Struct, kw_only=True):
    """A body of /generate for SGLang, without nulls. Fields that are not listed are passed on."""

    text: str | list[str] | None = None
    input_ids: Any = None
    sampling_params: ServerParams | list[ServerParams]
    rid: Text | list[Text] | None = None
    stream: bool | list[bool | None] = False
    return_logprob: bool | list[bool | None] = False
    logprob_start_len: int | list[int | None] = -1
    top_logprobs_num: Natural | list[Natural | None] = 0
    token_ids_logprob: list[Any] = []
    priority: int | list[int | None] = 0
    extra_key: str | list[str | None] = ""
    lora_path: str | list[str | None] = ""
    min_version: Natural = 0
    min_version_timeout_s: TimeLimit = 60.0
    positional_embed_overrides: Any = None

    def __post_init__(self) -> None:
        if self.positional_embed_overrides is not None:
            raise ValueError("positional_embed_overrides: not supported by this engine; remove the field")


def responses_in(body: JsonMapping, limits: RequestLimits, *, max_responses: int) -> tuple[int, ServerBody]:
    """Validate a body of /generate. Returns the number of responses, at most ``max_responses``, and the fields."""
    params = body.get("sampling_params")
    maps = [_without_nulls(values) for values in params] if isinstance(params, list) else _without_nulls(params)
    fields = decode({**_without_nulls(body), "sampling_params": maps}, ServerBody)
    lengths, batch = _prompts(fields, limits)
    count = len(lengths)
    _check_batch(fields, count, batch=batch)
    starts = fields.logprob_start_len
    for start, length in zip(starts if isinstance(starts, list) else [starts] * count, lengths, strict=True):
        if start is not None and not -1 <= start < length:
            raise BadRequest(f"logprob_start_len: want a place in the prompt, 0 .. {length - 1}, or -1, got {start}")
    tops = fields.top_logprobs_num
    if not all((top or 0) <= limits.vocab_size for top in (tops if isinstance(tops, list) else [tops])):
        raise BadRequest(f"top_logprobs_num: want 0 .. {limits.vocab_size}, got {tops}")
    listed = fields.token_ids_logprob
    for ids in decode(
        listed if listed and isinstance(listed[0], list) else [listed], list[list[int]], "token_ids_logprob"
    ):
        _check_ids("token_ids_logprob", ids, limits)
    samplings = fields.sampling_params if isinstance(fields.sampling_params, list) else [fields.sampling_params] * count
    for sampling in samplings:
        _check_ids("sampling_params.stop_token_ids", sampling.stop_token_ids, limits)
        _check_ids("sampling_params.logit_bias", [*sampling.logit_bias], limits)
    total = sum(sampling.n for sampling in samplings)
    if total > max_responses:
        raise BadRequest(
            f"sampling_params.n: want at most {max_responses} responses to a request (engine.max_waiting), got {total}"
        )
    return total, fields


def _without_nulls(values: Any) -> Any:
    """Return a map without nulls, which are the same as absent fields; any other value but null unchanged."""
    if values is None:
        return {}
    return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


def _prompts(body: ServerBody, limits: RequestLimits) -> tuple[list[int], bool]:
    """Return the lengths of the prompts in tokens, and whether they came as a list."""
    texts = texts_in(body.text, body.input_ids)
    if texts is None:
        prompts, paths, batch = prompt_lists(body.input_ids)
        return [token_ids(prompt, path, limits).size for prompt, path in zip(prompts, paths, strict=True)], batch
    lengths = [len(limits.encode(text)) if limits.encode is not None else len(text) and 1 for text in texts]
    if not all(lengths):
        raise BadRequest("text: want at least one token, got none")
    return lengths, isinstance(body.text, list)


def _check_batch(body: ServerBody, count: int, *, batch: bool) -> None:
    """Raise BadRequest for a field with several values, unless there are several prompts and it has one for each."""
    for name in ("rid", "sampling_params", *FOR_EACH_PROMPT):
        values = getattr(body, name)
        if isinstance(values, list) and not (batch and len(values) == count):
            raise BadRequest(f"{name}: want one value, or one for each of {count} prompts in a list, got {len(values)}")


def _check_ids(where: str, ids: Sequence[int | str], limits: RequestLimits) -> None:
    """Raise BadRequest for an id outside the vocabulary; the keys of a map are ids as texts."""
    for name in ids:
        token = int(name) if isinstance(name, str) and re.fullmatch(r"-?\d+", name) else name
        if isinstance(token, str) or not 0 <= token < limits.vocab_size:
            raise BadRequest(f"{where}: want token ids in 0 .. {limits.vocab_size - 1}, got {name!r:.80}")


def _check_pattern(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that a later Python may read otherwise
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"stop_regex: want regular expressions, got {pattern!r:.80}: {error}") from error
