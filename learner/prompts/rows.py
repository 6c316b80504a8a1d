"""Rows of prompts: their columns as values of the run, their text, their tokens and their digests. Knows no order.

Rows that cannot be used are skipped, counted and named, or refused (``data.bad_rows``).
"""

import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.errors import WireError
from tidemill.bus.system.functions import described, errors_as
from tidemill.bus.wire.chat_messages import chat_tools
from tidemill.bus.wire.json_object import JsonMapping, JsonObject, is_integer, is_number
from tidemill.bus.wire.messages import Prompt, Sampling
from tidemill.bus.wire.task_settings import RUN_NAME
from tidemill.learner.buffer.rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from tidemill.learner.data import MAX_LETTERS, MAX_STOPS, REFUSE, SKIP, Source, rollout_named
from tidemill.learner.errors import CannotRender, PromptError, TemplateLacks, TextTooLong
from tidemill.learner.prompts.formats import kind_of, messages_in, read_values, refuse_unsendable, value_at, where_of
from tidemill.learner.prompts.responses import (
    RecordedResponse,
    RecordedRow,
    RecordedSequence,
    Recordings,
    in_conversation,
    prompt_tokens,
    responses_in,
)
from tidemill.learner.prompts.tokenizer import Tokenize

log = logging.getLogger(__name__)

MAX_LOGGED = 1000
"""Maximum number of rows that are named in the log."""


class RowTooLong(PromptError):
    """A prompt, or a recorded sequence, has more tokens than fit."""


class BadRows:
    """The bad rows of one set of prompts that were met so far."""

    def __init__(self, policy: str = SKIP) -> None:
        self.policy = policy
        self._numbers: set[int] = set()
        self._first: PromptError | None = None

    def __len__(self) -> int:
        """Return their number; a row that is met in several passes counts once."""
        return len(self._numbers)

    def add(self, number: int, error: PromptError) -> None:
        """Count and log the row ``number``. Raises its error where bad rows are refused."""
        if self.policy == REFUSE:
            raise error
        if number in self._numbers:
            return
        self._numbers.add(number)
        self._first = self._first or error
        if len(self) <= MAX_LOGGED:
            log.warning("row skipped count=%d %s", len(self), error)
        elif len(self) == MAX_LOGGED + 1:
            log.warning("further bad rows are counted alone; tidemill data check names all of them")

    def trouble(self, total: int) -> str:
        """Return their number and the first one, for status; empty while there are none. ``total``: number of rows."""
        if not self._numbers:
            return ""
        return f"{len(self)} of {total} rows left out so far (data.bad_rows), the first: {self._first}"


def all_bad(first: PromptError, place: str, count: int) -> PromptError:
    """Return the error for ``place`` if none of its ``count`` rows can be used, which is an error with any policy."""
    return PromptError(first.where, first.want, f"{first.got}; none of the {count} rows of {place} can be used")


@contextmanager
def rejections(where: str) -> Iterator[None]:
    """Raise PromptError for any error of the tokenizer or of the chat template, which is a program."""

    def refused(error: BaseException) -> PromptError:
        if isinstance(error, TextTooLong):
            return RowTooLong(where, f"<= {error.max_tokens} tokens", f"a text of {error.num_bytes} bytes")
        reason = str(error) if isinstance(error, CannotRender) else described(error)
        return PromptError(where, "a prompt that tokenizer and chat template accept", reason)

    with errors_as(refused, but=(PromptError, TemplateLacks, MemoryError)):
        yield


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt of a file."""

    number: int
    """Index in the file, from 0."""
    prompt: Prompt
    label: object = None
    metadata: JsonObject = field(default_factory=dict)
    sampling: RowSampling = field(default_factory=RowSampling)
    tools: Sequence[JsonObject] = ()
    rollout: str = ""
    """Rollout of its samples; empty = single turns."""
    responses: tuple[RecordedResponse, ...] = ()
    """Recorded responses."""
    where: str = ""
    """File and line of the row, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """The rules for using rows, beyond their columns."""

    policy: str = SKIP
    """``data.bad_rows``."""
    unfit: Callable[[PromptRow], None] | None = None
    """Raises PromptError for a row that contradicts settings of the run; None = none does."""

    def applied(self, row: PromptRow | PromptError, recorded: Collection[str] | None) -> PromptRow | PromptError:
        """Return the row as it is used, or its error. ``recorded``: rollouts with recorded responses; None = any."""
        if isinstance(row, PromptError):
            return row
        try:
            row = row if recorded is None else with_responses(row, recorded)
            if self.unfit is not None:
                self.unfit(row)
        except PromptError as error:
            return error
        return row


class RowTokens:
    """The tokens of rows: of a prompt, or of recorded responses."""

    def __init__(self, tokenize: Tokenize, *, max_tokens: int, recordings: Recordings | None = None) -> None:
        """``max_tokens``: the longest prompt. ``recordings``: of recorded responses; None = no row has any."""
        self.recordings = recordings
        self._tokenize, self._max_tokens = tokenize, max_tokens

    def of(self, row: PromptRow) -> tuple[NDArray[np.int32], tuple[RecordedSequence, ...]]:
        """Return the tokens of the prompt, and the recorded sequences of a rollout that has them.

        Raises PromptError for a row that cannot be used: the chat template rejects it, it has no token, or too many
        (RowTooLong).
        """
        recorded: tuple[RecordedSequence, ...] = ()
        max_tokens = self._max_tokens
        with rejections(row.where):
            if row.responses and self.recordings is not None:
                parts = RecordedRow(prompt=row.prompt, responses=row.responses, tools=row.tools, where=row.where)
                recorded, max_tokens = self.recordings.sequences(parts), self.recordings.max_tokens
                tokens = recorded[0].prompt_tokens
            else:
                tokens = np.asarray(prompt_tokens(self._tokenize, row.prompt, row.tools), np.int32)
        if not len(tokens):
            raise PromptError(row.where, "a prompt of at least one token", repr(row.prompt))
        if (num_tokens := max((len(sequence.tokens) for sequence in recorded), default=len(tokens))) > max_tokens:
            limit = "the context" if recorded else "data.max_prompt_tokens"
            raise RowTooLong(row.where, f"<= {max_tokens} tokens ({limit})", num_tokens)
        return tokens, recorded


def row_digest(row: PromptRow | PromptError) -> int:
    """Return a digest of 32 bits of a row's content, wherever it is; for a bad row, of its error."""
    if isinstance(row, PromptError):
        parts: list[object] = [row.want, str(row.got)]
    else:
        parts = [row.prompt, row.label, row.metadata, row.rollout]
        parts += [] if row.sampling == RowSampling() and not row.responses else [row.sampling, row.responses]
    return zlib.crc32(json.dumps(parts, sort_keys=True, default=repr).encode())


def with_responses(row: PromptRow, rollouts: Collection[str]) -> PromptRow:
    """Return the row with its recorded responses, if its rollout is one of ``rollouts``. Raises PromptError."""
    if row.rollout not in rollouts:
        return replace(row, responses=())
    if row.responses:
        return row
    prompt, response = in_conversation(row.prompt, where=row.where)
    return replace(row, prompt=prompt, responses=(response,))


def scan_rows(source: Source) -> Iterator[PromptRow | PromptError]:
    """Iterate over the rows of a source as they are used, with the error in the place of each bad one.

    Raises PromptError when the rest of the file cannot be read.
    """
    numbered = enumerate(read_values(source.path))
    if (source.start or 0) < 0 or (source.stop or 0) < 0:  # from the end, which is not known before
        chosen: Iterator[tuple[int, tuple[str, JsonMapping | PromptError]]] = iter(
            list(numbered)[source.start : source.stop]
        )
    else:
        chosen = islice(numbered, source.start, source.stop)
    for number, (where, values) in chosen:
        try:
            row = values if isinstance(values, PromptError) else row_in(source, number, values, where=where)
        except PromptError as error:
            row = error
        yield row


def row_in(source: Source, number: int, values: Mapping[str, object], *, where: str = "") -> PromptRow:
    """Return the row of a source for one line's values, as it is used. Raises PromptError.

    ``where``: its place in messages; empty = that in a source of one file.
    """
    row = row_of(where or where_of(source.path, number), number, values, source.keys)
    reward = reward_in(values, source.reward_key, where=row.where) or source.reward
    tools = tools_in(values, source.tools_key, where=row.where)
    columns: JsonObject = ({REWARD: reward} if reward else {}) | ({TOOLS: tools} if tools else {})
    if tools and TOOLS in row.metadata:  # in the notation of the column, perhaps
        row = replace(row, metadata={**row.metadata, TOOLS: tools_in(row.metadata, TOOLS, where=row.where)})
    for key, value in columns.items():
        if row.metadata.get(key, value) != value:
            got = f"{row.metadata[key]!r:.80} in its metadata"
            raise PromptError(row.where, f"one value of {key!r}, {value!r:.80}", got)
    sampling = sampling_in(values, source.sampling_key, where=row.where)
    rollout = rollout_in(values, source.rollout_key, where=row.where)
    rollout = rollout_named(source.rollout) if rollout is None else rollout
    refuse_limits(sampling, rollout, where=row.where, key=source.sampling_key)
    responses = responses_in(values, source.responses_key, where=row.where)
    row = replace(
        row, metadata={**row.metadata, **columns}, sampling=sampling, tools=tools, rollout=rollout, responses=responses
    )
    return _worded(row, source)


def _worded(row: PromptRow, source: Source) -> PromptRow:
    """Return the row with the template and the system prompt of its source."""
    if source.template and isinstance(row.prompt, str):
        row = replace(row, prompt=source.template.replace("{prompt}", row.prompt))
    if not source.system_prompt:
        return row
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if messages[0]["role"] == "system":
        return row
    return replace(row, prompt=[{"role": "system", "content": source.system_prompt}, *messages])


def refuse_template(template: str) -> None:
    """Raise PromptError for a template without ``{prompt}``."""
    if template and "{prompt}" not in template:
        raise PromptError("data.template", "text with {prompt} in it", repr(template))


def row_of(where: str, number: int, values: Mapping[str, object], keys: tuple[str, str, str]) -> PromptRow:
    """Return the row for one line's values. Raises PromptError."""
    prompt, label, metadata = (
        value_at(values, key, where=where, setting=f"data.{name}_key") if key or name == "prompt" else None
        for name, key in zip(("prompt", "label", "metadata"), keys, strict=True)
    )
    if keys[2] and not isinstance(metadata, dict):
        raise PromptError(where, f"a map in {keys[2]!r}", kind_of(metadata))
    row = PromptRow(
        number=number, prompt=_prompt(where, keys[0], prompt), label=label, metadata=metadata or {}, where=where
    )
    for key, value in zip(keys, (row.prompt, label, metadata), strict=True):
        refuse_unsendable(value, where=where, key=key)
    return row


def _prompt(where: str, key: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise PromptError(where, f"text or chat messages with role and content in {key!r}", repr(value)[:80])
    return messages_in(value, where=where, key=key)
