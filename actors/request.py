"""What a client may ask for: bodies of /generate checked and turned into parts the scheduler understands. Knows no HTTP and no model.

Every refusal is a BadRequest that says where, what was wanted and what came.
"""

import difflib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """SGLang's names and defaults."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 = the whole vocabulary."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Besides the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Neither end-of-sequence ids nor ``stop_token_ids`` end the response."""
    min_new_tokens: int = 0
    """Until then the ids that would end the response have probability 0."""
    n: int = 1
    """Responses to the same prompt."""
    sampling_seed: int | None = None
    """None = a fresh random one; response i of n uses ``sampling_seed + i``."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keep what ended the response in its text."""

    @classmethod
    def parse(cls, given: object, where: str = "sampling_params") -> "SamplingParams":
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise BadRequest(f"{where}: want a map, got {given!r}")
        known = {field.name for field in fields(cls)}
        _refuse_unknown(given, known, NEUTRAL_SAMPLING, where)
        return cls(**{name: CHECKS[name](given[name], f"{where}.{name}") for name in given if name in known and given[name] is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A checked body of /generate: one entry per response to make."""

    prompts: list[NDArray[np.int32]]
    params: list[SamplingParams]
    rids: list[str]
    """Unique names, by which a response can be aborted."""
    many: bool
    """The answer is a list."""
    stream: bool
    return_logprob: bool
    continued_tokens: int
    """So many at the end of the prompt are the beginning of the response, made by an earlier request."""
    min_version: int
    """Wait until weights of at least this version are served."""
    min_version_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a prompt must fit in."""

    vocab_size: int
    max_context: int
    encode: Callable[[str], list[int]] | None
    """Text to token ids; None = there is no tokenizer."""
    max_responses: int = 4096
    """To one request."""


def parse_generate(body: object, limits: Limits) -> Generate:
    """Check a body; prompts repeated ``n`` times, seeds spread."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"body: want a JSON map, got {type(body).__name__}")
    _refuse_unknown(body, GENERATE_FIELDS, NEUTRAL_GENERATE, "body")
    prompts, batched = _prompts(body, limits)
    given = body.get("sampling_params")
    if isinstance(given, list):
        if len(given) != len(prompts):
            raise BadRequest(f"sampling_params: want one for each of {len(prompts)} prompts, got {len(given)}")
        params = [SamplingParams.parse(each, f"sampling_params[{index}]") for index, each in enumerate(given)]
    else:
        params = [SamplingParams.parse(given)] * len(prompts)
    _check_ids(params, limits)
    if (total := sum(each.n for each in params)) > limits.max_responses:
        raise BadRequest(f"sampling_params.n: want at most {limits.max_responses} responses to a request, got {total}")
    continued_tokens = _integer(0)(body.get("continued_tokens") or 0, "continued_tokens")
    if continued_tokens >= (shortest := min(map(len, prompts))):
        raise BadRequest(f"continued_tokens: want fewer than the {shortest} tokens of the prompt, got {continued_tokens}")
    rids = _rids(body.get("rid"), [each.n for each in params])
    return Generate(
        prompts=[prompt for prompt, each in zip(prompts, params, strict=True) for _ in range(each.n)],
        params=[each for each in params for _ in range(each.n)],
        rids=rids,
        many=batched or len(rids) > 1,
        stream=_boolean(body.get("stream") or False, "stream"),
        return_logprob=_boolean(body.get("return_logprob") or False, "return_logprob"),
        continued_tokens=continued_tokens,
        min_version=_integer(0)(body.get("min_version") or 0, "min_version"),
        min_version_timeout_s=_number(0, 1 << 53)(body.get("min_version_timeout_s", 60.0), "min_version_timeout_s"),
    )


def seeds(generate: Generate) -> list[int]:
    """A seed below 2^64 for every response: ``sampling_seed`` + its place among the n of its prompt, or a random one."""
    found, place, before = [], 0, None
    for params in generate.params:
        place = place + 1 if params is before and place + 1 < params.n else 0
        before = params
        found.append(secrets.randbits(64) if params.sampling_seed is None else (params.sampling_seed + place) % 2**64)
    return found


def token_ids(given: object, where: str, limits: Limits) -> NDArray[np.int32]:
    """One prompt as an array; every id inside the vocabulary, at least one, and room left for a token."""
    try:
        ids = np.asarray(given) if isinstance(given, list) else None
    except ValueError:
        ids = None
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind != "i"):
        raise BadRequest(f"{where}: want a list of integers, got {_shorten(given)}")
    if not ids.size:
        raise BadRequest(f"{where}: want at least one token, got none")
    outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if outside.size:
        raise BadRequest(f"{where}: want token ids in 0 .. {limits.vocab_size - 1}, got {int(outside[0])}")
    if ids.size >= limits.max_context:
        raise BadRequest(f"The input ({ids.size} tokens) is longer than the model's context length ({limits.max_context} tokens) allows.")
    return ids.astype(np.int32)


def _prompts(body: Mapping[str, Any], limits: Limits) -> tuple[list[NDArray[np.int32]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("body: want exactly one of input_ids and text, got " + ("none" if text is None else "both"))
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if limits.encode is None:
            raise BadRequest("text: this model directory has no tokenizer.json; send input_ids")
        if not texts or not all(isinstance(each, str) for each in texts):
            raise BadRequest(f"text: want a string or a list of strings, got {_shorten(text)}")
        return [token_ids(limits.encode(each), "text", limits) for each in texts], isinstance(text, list)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return [token_ids(each, f"input_ids[{index}]", limits) for index, each in enumerate(ids)], True
    return [token_ids(ids, "input_ids", limits)], False


def _check_ids(params: Iterable[SamplingParams], limits: Limits) -> None:
    for each in params:
        outside = [token for token in each.stop_token_ids if token >= limits.vocab_size]
        if outside:
            raise BadRequest(f"sampling_params.stop_token_ids: want token ids in 0 .. {limits.vocab_size - 1}, got {outside[0]}")
        if each.stop and limits.encode is None:
            raise BadRequest("sampling_params.stop: this model directory has no tokenizer.json; use stop_token_ids")


def _rids(given: object, counts: list[int]) -> list[str]:
    total = sum(counts)
    if given is None:
        return [secrets.token_hex(16) for _ in range(total)]
    if isinstance(given, str) and given:
        return [given] if total == 1 else [f"{given}_{index}" for index in range(total)]
    if isinstance(given, list) and len(given) == total and all(isinstance(each, str) and each for each in given):
        return given
    raise BadRequest(f"rid: want a string, or {total} of them, got {_shorten(given)}")


def _refuse_unknown(given: Mapping[str, Any], known: Iterable[str], neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for name, value in given.items():
        if name in known:
            continue
        if name not in neutral:
            nearest = difflib.get_close_matches(str(name), [*known, *neutral], n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; known: {', '.join(sorted(known))}"
            raise BadRequest(f"{where}.{name}: unknown parameter{hint}")
        if value not in neutral[name]:
            raise BadRequest(f"{where}.{name}: the built-in engine cannot do this; want {neutral[name][-1]!r}, got {_shorten(value)}")


def _shorten(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _integer(low: int) -> Callable[[object, str], int]:
    def check(value: object, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise BadRequest(f"{where}: want an integer >= {low}, got {_shorten(value)}")
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Callable[[object, str], float]:
    def check(value: object, where: str) -> float:
        fine = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high and not (above and value == low)
        if not fine:
            raise BadRequest(f"{where}: want a number {'>' if above else '>='} {low:g} and <= {high:g}, got {_shorten(value)}")
        return float(value)  # type: ignore[arg-type]

    return check


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{where}: want true or false, got {_shorten(value)}")
    return value


def _top_k(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and not 1 <= value < 1 << 31):
        raise BadRequest(f"{where}: want an integer >= 1 and < 2^31, or -1 for the whole vocabulary, got {_shorten(value)}")
    return value


def _strings(value: object, where: str) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
        raise BadRequest(f"{where}: want a string or a list of strings, none empty, got {_shorten(value)}")
    return tuple(listed)


def _ids(value: object, where: str) -> frozenset[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{where}: want a list of integers, got {_shorten(value)}")
    return frozenset(_integer(0)(each, where) for each in value)


def _seed(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{where}: want an integer, got {_shorten(value)}")
    return value


CHECKS: dict[str, Callable[[object, str], Any]] = {
    "max_new_tokens": _integer(1),
    "temperature": _number(0, 1e6),
    "top_p": _number(0, 1, above=True),
    "top_k": _top_k,
    "stop": _strings,
    "stop_token_ids": _ids,
    "ignore_eos": _boolean,
    "min_new_tokens": _integer(0),
    "n": _integer(1),
    "sampling_seed": _seed,
    "skip_special_tokens": _boolean,
    "no_stop_trim": _boolean,
}
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "stop_regex": (None, []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
}
"""Sampling parameters that SGLang has and this engine has not, with the values at which they do nothing."""

GENERATE_FIELDS = frozenset(
    {
        "input_ids",
        "text",
        "sampling_params",
        "rid",
        "stream",
        "return_logprob",
        "continued_tokens",
        "min_version",
        "min_version_timeout_s",
    }
)
NEUTRAL_GENERATE: dict[str, tuple[Any, ...]] = {
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": (None, False),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "return_entropy": (None, False),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "input_embeds": (None,),
    "image_data": (None,),
    "priority": (None, 0),
    "extra_key": (None,),
}
