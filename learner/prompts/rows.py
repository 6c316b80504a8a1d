"""Rows of prompts: their columns as values of the run, their text, their tokens and their digests. Knows no order."""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.data.config import SKIP
from tidemill.learner.data.source import Source, rollout_named
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.bad_rows import RowTooLong, rejections
from tidemill.learner.prompts.columns import (
    REWARD,
    TOOLS,
    RowSampling,
    refuse_limits,
    reward_in,
    rollout_in,
    sampling_in,
    tools_in,
)
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
