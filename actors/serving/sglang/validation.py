"""Rejects requests that would end or corrupt an SGLang server. Other invalid requests are left to SGLang, which refuses them itself.

The rejected ones were found by sending SGLang every field with invalid values, one by one (``tests/sglang/test_sglang_proxy.py``).
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from tidemill.actors.errors import BadRequest
from tidemill.actors.request import Limits, check_temperature, token_ids
from tidemill.bus.wire.json_object import JsonMapping

REFUSED = ("positional_embed_overrides",)
"""Fields that no request may have."""
INTEGERS = ("n", "max_new_tokens", "min_new_tokens", "top_k", "sampling_seed", "stream_interval")
NUMBERS = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
BOOLEANS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
KINDS: dict[str, type] = {
    "stream": bool,
    "return_logprob": bool,
    "logprob_start_len": int,
    "top_logprobs_num": int,
    "priority": int,
    "extra_key": str,
    "lora_path": str,
}
_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
STRINGS = ("json_schema", "regex", "ebnf", "structural_tag")


def responses_in(body: JsonMapping, limits: Limits, *, most: int) -> int:
    """Validate a body of /generate. Returns the number of responses that it requests, at most ``most``. Raises BadRequest."""
    lengths, batch = _prompts(body, limits)
    count = len(lengths)
    for name in REFUSED:
        if body.get(name) is not None:
            raise BadRequest(f"{name}: not supported by this engine; remove the field")
    rid = body.get("rid")
    named = rid if isinstance(rid, list) and batch and len(rid) == count else [rid]
    if rid is not None and not all(isinstance(one, str) and one for one in named):
        raise BadRequest(f"rid: want a string that is not empty, or one for each of {count} prompts in a list, got {str(rid)[:80]}")
    params = body.get("sampling_params")
    each = params if isinstance(params, list) and batch else [{} if params is None else params] * count
    if len(each) != count or not all(isinstance(one, Mapping) for one in each):
        raise BadRequest(f"sampling_params: want a map, or one for each of {count} prompts in a list, got {str(params)[:200]}")
    _check_kinds(body, limits, count, batch=batch)
    starts = body.get("logprob_start_len")
    for start, length in zip(starts if isinstance(starts, list) else [starts] * count, lengths, strict=True):
        if start is not None and not -1 <= start < length:
            raise BadRequest(f"logprob_start_len: want a place in the prompt, 0 .. {length - 1}, or -1, got {start}")
    total = sum(_sampling(one, limits) for one in each)
    if total > most:
        raise BadRequest(f"sampling_params.n: want at most {most} responses to a request (engine.max_waiting), got {total}")
    return total


def _prompts(body: JsonMapping, limits: Limits) -> tuple[list[int], bool]:
    """Return the lengths of the prompts in tokens, and whether they came as a list."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("body: want exactly one of input_ids and text, got " + ("none" if text is None else "both"))
    if ids is None:
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(one, str) for one in texts):
            raise BadRequest(f"text: want a string, or a list of them, got {str(text)[:80]}")
        lengths = [len(limits.encode(one)) if limits.encode is not None else len(one) and 1 for one in texts]
        if not all(lengths):
            raise BadRequest("text: want at least one token, got none")
        return lengths, isinstance(text, list)
    batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    return [token_ids(one, f"input_ids[{at}]" if batch else "input_ids", limits).size for at, one in enumerate(prompts)], batch


def _check_kinds(body: JsonMapping, limits: Limits, count: int, *, batch: bool) -> None:
    """Check the other fields: one value, or in a batch one for each prompt."""
    for name, kind in KINDS.items():
        value = body.get(name)
        if batch and isinstance(value, list) and len(value) != count:
            raise BadRequest(f"{name}: want one, or one for each of {count} prompts, got {len(value)}")
        for one in value if batch and isinstance(value, list) else [value]:
            if one is not None and (not isinstance(one, kind) or (isinstance(one, bool) and kind is int)):
                raise BadRequest(f"{name}: want {kind.__name__}, got {str(one)[:80]}")
    tops = body.get("top_logprobs_num")
    if not all(0 <= (one or 0) <= limits.vocab_size for one in (tops if isinstance(tops, list) else [tops])):
        raise BadRequest(f"top_logprobs_num: want 0 .. {limits.vocab_size}, got {tops}")
    ids = body.get("token_ids_logprob") or []
    for one in ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]:
        if not isinstance(one, list) or not all(_is_id(id, limits) for id in one):
            raise BadRequest(f"token_ids_logprob: want token ids in 0 .. {limits.vocab_size - 1}, got {str(one)[:80]}")


def _is_id(given: object, limits: Limits) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < limits.vocab_size


def _is_number(given: object) -> bool:
    """Return whether a value is a number that a float of 32 bits can hold: divided by a smaller one, scores are infinite."""
    return isinstance(given, int | float) and not isinstance(given, bool) and (given == 0 or _TINY <= abs(given) <= _LARGEST)


def _sampling(params: JsonMapping, limits: Limits) -> int:
    """Check the sampling parameters of one prompt. Returns its ``n``."""
    for name, value in params.items():
        if value is not None and (want := _want(name, value)):
            raise BadRequest(f"sampling_params.{name}: want {want}, got {str(value)[:80]}")
    if params.get("temperature") is not None:
        check_temperature(params["temperature"], "sampling_params.temperature")
    n = params.get("n")
    stops, biases = params.get("stop_token_ids") or [], params.get("logit_bias") or {}
    if not isinstance(stops, list) or not isinstance(biases, Mapping):
        raise BadRequest("sampling_params: want a list of stop_token_ids, and a map of logit_bias")
    for named in (*stops, *biases):
        id = int(named) if isinstance(named, str) and re.fullmatch(r"-?\d+", named) else named
        if not _is_id(id, limits):
            raise BadRequest(f"sampling_params: want token ids in 0 .. {limits.vocab_size - 1}, got {named!r}")
    for bias in biases.values():
        if not _is_number(bias):
            raise BadRequest(f"sampling_params.logit_bias: want finite numbers of 32 bits, got {str(bias)[:80]}")
    given = params.get("stop_regex") or []
    for pattern in given if isinstance(given, list) else [given]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that a later Python may read otherwise
                re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise BadRequest(f"sampling_params.stop_regex: want regular expressions, got {str(pattern)[:80]!r}: {error}") from error
    return int(n or 1)


def _want(name: str, value: object) -> str:
    """Return the value that a parameter requires, in words; "" = its value is valid, or the parameter is not known here."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if name in INTEGERS and not integer:
        return "an integer"
    if name == "n" and isinstance(value, int) and value < 1:
        return "an integer >= 1"
    if name in NUMBERS and not _is_number(value):
        return "a finite number of 32 bits"
    if name in BOOLEANS and not isinstance(value, bool):
        return "true or false"
    if name in STRINGS and not isinstance(value, str):
        return "a string"
    if name == "stop" and not all(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
        return "a string, or a list of them"
    return ""
