"""Reward functions written for slime, verl and TRL, as they are: ``slime:MODULE:NAME``, ``verl:MODULE:NAME``,
``trl:MODULE:NAME``.

    RewardRequest -> the arguments of the system -> its function -> a number, or named numbers

Their modules may also be written with a dot (``verl:my_rewards.compute_score``), as those systems name them. An async
function is awaited.
"""

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Parts, Reward, RewardRequest

Call = tuple[tuple[object, ...], dict[str, object]]


class SampleStatus(enum.Enum):
    """The names and values of slime's ``Sample.Status`` that a finished response can have."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


class SlimeArgs(SimpleNamespace):
    """The options of the reward, in the place of slime's command-line arguments."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name}: there are only the options of the reward; want it in reward_options")


def _slime(request: RewardRequest, options: Mapping[str, object]) -> Call:
    """Return ``(args, sample)`` of ``--custom-rm-path``. Source: slime at 624b824a8, ``slime/rollout/rm_hub``."""
    sample = SimpleNamespace(
        prompt=request.prompt,
        response=request.response,
        response_length=request.response_length,
        tokens=request.tokens.tolist(),
        label=request.label,
        status=SampleStatus.TRUNCATED if request.status is Status.TRUNCATED else SampleStatus.COMPLETED,
        metadata=dict(request.metadata),
        reward=None,
        index=None,
        group_index=None,
        train_metadata=None,
        remove_sample=False,
    )
    return (SlimeArgs(**options), sample), {}


def _verl(request: RewardRequest, options: Mapping[str, object]) -> Call:
    """Return the arguments of ``custom_reward_function``; ``data_source`` is taken from the metadata.

    Source: verl at 904e7bf3, ``docs/preparation/reward_function.rst``.
    """
    extra = dict(request.metadata)
    named = {"solution_str": request.response, "ground_truth": request.label, "extra_info": extra}
    return (), {"data_source": extra.get("data_source", ""), **named, **options}


def _trl(request: RewardRequest, options: Mapping[str, object]) -> Call:
    """Return the arguments of ``reward_funcs``: ``(prompts, completions, **columns)``, lists of one element each.

    Columns are the metadata, and the label under the option ``label_column`` (default ``label``). With messages as the
    prompt the completion is a message, too. Source: documentation of TRL 1.12, "Reward Functions".
    """
    conversational = not isinstance(request.prompt, str)
    completion: object = [{"role": "assistant", "content": request.response}] if conversational else request.response
    keywords = {name: value for name, value in options.items() if name != "label_column"}
    columns = {**request.metadata, str(options.get("label_column", "label")): request.label}
    ids = request.tokens[len(request.tokens) - request.response_length :].tolist()
    named = {"prompts": request.prompt, "completions": completion, "completion_ids": ids}
    return (), {**{name: [value] for name, value in {**columns, **named}.items()}, **keywords}


# Systems by the first word of a name, each with the function that returns the arguments
SYSTEMS: Mapping[str, Callable[[RewardRequest, Mapping[str, object]], Call]] = {
    "slime": _slime,
    "verl": _verl,
    "trl": _trl,
}
# First parameters by which a function of a system is known
SIGNATURES: Mapping[tuple[str, ...], str] = {
    ("args", "sample"): "slime",
    ("args", "samples"): "slime",
    ("data_source", "solution_str"): "verl",
    ("prompts", "completions"): "trl",
    ("completions",): "trl",
}


def peer_reward(name: str, function: Callable[..., Any], options: Mapping[str, object], *, is_async: bool) -> Reward:
    """Return a function of another system, SYSTEM:MODULE:NAME, as a reward. It raises RewardFailed for no reward."""
    system = name.partition(":")[0]

    def called(request: RewardRequest) -> Any:
        positional, named = SYSTEMS[system](request, options)
        return function(*positional, **named)

    async def score_async(request: RewardRequest) -> Parts:
        return _parts(name, system, await called(request))

    return score_async if is_async else lambda request: _parts(name, system, called(request))


def _parts(name: str, system: str, result: object) -> Parts:
    if system == "trl":
        if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
            raise RewardFailed(name, f"want a list with one reward, got {result!r}"[:300])
        result = result[0]
    if not isinstance(result, Mapping):
        return result  # type: ignore[return-value]  # the caller checks it
    parts = {str(part): number for part, value in result.items() if (number := _number(value)) is not None}
    if "score" not in parts:
        raise RewardFailed(name, f"want a number, or a map with a number under score, got {result!r}"[:300])
    return parts


def path_in(name: str) -> str:
    """Return the import path MODULE:NAME in the name of another system's function; empty for any other name."""
    system, _, path = name.partition(":")
    if system not in SYSTEMS or not (":" in path or "." in path):
        return ""
    return path if ":" in path else ":".join(path.rsplit(".", 1))


def system_of(function: Callable[..., object]) -> str:
    """Return the system that calls rewards with such parameters; empty for any other function."""
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some functions in C
        return ""
    return next((system for first_names, system in SIGNATURES.items() if names[: len(first_names)] == first_names), "")


def _number(value: object) -> float | None:
    """Return a number, or a tensor with one, as a float; None for anything else: texts say how it was found."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None
