"""Columns of a row besides prompt, label and metadata: its sampling, its reward, its rollout, its tools."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeGuard

from tidemill.bus.config import RUN_NAME, SINGLE_TURN
from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_tools
from tidemill.bus.wire.json_object import JsonObject, is_integer, is_number
from tidemill.bus.wire.messages import Sampling
from tidemill.learner.buffer.rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from tidemill.learner.data.config import MAX_LETTERS, MAX_STOPS
from tidemill.learner.data.source import rollout_named
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.formats import kind_of, refuse_unsendable, value_at

REWARD = "reward"
"""Key in a task's metadata with the name of its reward, which ``when`` of ``actor.reward_parts`` compares with."""
TOOLS = "tools"
"""Key in a task's metadata with the tools of its row, as the chat template has rendered them."""
MAX_TOOLS = 128
OF_THE_RUN = ("top_p", "top_k", "seed")
OF_A_ROW = "temperature, max_new_tokens, stop or stop_token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """The temperature of responses to a row, and when they end. A field that is None is as in the run."""

    temperature: float | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None

    def of(self, run: Sampling) -> Sampling:
        """Return the run's sampling with these settings."""
        return replace(run, **{name: value for name, value in asdict(self).items() if value is not None})


def sampling_in(values: Mapping[str, object], key: str, *, where: str) -> RowSampling:
    """Return the settings in column ``key``; null stands for none. Raises PromptError."""
    column = value_at(values, key, where=where, setting="data.sampling_key") if key else None
    if column is None:
        return RowSampling()
    if not isinstance(column, Mapping):
        raise PromptError(where, f"a map or null in {key!r}", kind_of(column))
    refuse_unsendable(column, where=where, key=key)
    # Columns of Parquet and Arrow have the same keys in every row; a key that a row does not set is null.
    settings = {name: value for name, value in column.items() if value is not None}
    for name in settings:
        if name in OF_THE_RUN:
            raise PromptError(where, f"{OF_A_ROW} in {key!r}; {name} is the same for all rows of a run", name)
        if name not in ("temperature", "max_new_tokens", "stop", "stop_token_ids"):
            raise PromptError(where, f"{OF_A_ROW} in {key!r}", repr(name)[:80])
    temperature = settings.get("temperature")
    if temperature is not None and not _is_temperature(temperature):
        numbers = f"a number from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        want = f"{numbers} in '{key}.temperature' (of 0 there is no distribution to correct for)"
        raise PromptError(where, want, repr(temperature)[:80])
    max_new_tokens = settings.get("max_new_tokens")
    if max_new_tokens is not None and not _whole(max_new_tokens, at_least=1):
        raise PromptError(where, f"a whole number >= 1 in '{key}.max_new_tokens'", repr(max_new_tokens)[:80])
    stop, ids = _listed(settings.get("stop")), _listed(settings.get("stop_token_ids"))
    if stop is not None and not (
        len(stop) <= MAX_STOPS and all(isinstance(text, str) and 0 < len(text) <= MAX_LETTERS for text in stop)
    ):
        want = f"at most {MAX_STOPS} texts of 1 to {MAX_LETTERS} letters in '{key}.stop'"
        raise PromptError(where, want, repr(stop)[:80])
    if ids is not None and not (len(ids) <= MAX_STOPS and all(_whole(entry, at_least=0) for entry in ids)):
        raise PromptError(where, f"at most {MAX_STOPS} token ids in '{key}.stop_token_ids'", repr(ids)[:80])
    return RowSampling(
        temperature=None if temperature is None else float(temperature),
        max_new_tokens=max_new_tokens,
        stop=stop,
        stop_token_ids=ids,
    )


def _is_temperature(value: object) -> TypeGuard[int | float]:
    return is_number(value) and LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE


def refuse_limits(sampling: RowSampling, rollout: str, *, where: str, key: str) -> None:
    """Raise PromptError for a row with limits and a rollout, which has limits, too."""
    limits = (sampling.max_new_tokens, sampling.stop, sampling.stop_token_ids)
    if rollout and limits != (None, None, None):
        want = f"temperature alone in {key!r}: the row is answered by rollout {rollout}, which has its own limits"
        raise PromptError(where, want, "max_new_tokens, stop or stop_token_ids")


def reward_in(values: Mapping[str, object], key: str, *, where: str) -> str:
    """Return the name of a reward in column ``key``; empty for null. Raises PromptError."""
    name = value_at(values, key, where=where, setting="data.reward_key") if key else None
    if name is None:
        return ""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LETTERS:
        raise PromptError(where, f"the name of a reward, or null, in {key!r}", repr(name)[:80])
    refuse_unsendable(name, where=where, key=key)
    return name


def rollout_in(values: Mapping[str, object], key: str, *, where: str) -> str | None:
    """Return the name of a rollout in column ``key``, empty for single turns; None for null. Raises PromptError."""
    name = value_at(values, key, where=where, setting="data.rollout_key") if key else None
    if name is None:
        return None
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise PromptError(where, f"the name of a rollout, {SINGLE_TURN}, or null, in {key!r}", repr(name)[:80])
    return rollout_named(name)


def tools_in(values: Mapping[str, object], key: str, *, where: str) -> list[JsonObject]:
    """Return the tools in column ``key``, a list or JSON text of one, as templates read them. Raises PromptError."""
    tools = value_at(values, key, where=where, setting="data.tools_key") if key else None
    if tools is None:
        return []
    if isinstance(tools, str):  # the usual form in Parquet and Arrow, where a map has the keys of all rows
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            want = f"a list of tools, or one as JSON text, in {key!r}"
            raise PromptError(where, want, f"{tools!r:.80} ({error})") from None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        got = f"{len(tools)} tools" if isinstance(tools, list) else kind_of(tools)
        raise PromptError(where, f"a list of at most {MAX_TOOLS} tools, or one as JSON text, in {key!r}", got)
    refuse_unsendable(tools, where=where, key=key)
    try:
        return chat_tools(tools, key)
    except WireError as error:
        want = f"tools with a name, or with function.name, in {key!r}"
        raise PromptError(where, want, f"{error.got!r:.80}") from None


def _listed(value: Any) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, list) else (value,)


def _whole(value: object, *, at_least: int) -> bool:
    return is_integer(value) and at_least <= value < 2**31
