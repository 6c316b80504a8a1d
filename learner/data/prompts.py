"""Prompts of files in a deterministic order: (seed, epoch, offset) -> prompt, tokens, label, metadata. Knows files, no bus."""

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.data.bad_rows import REFUSE, SKIP, BadRows, RowTooLong, all_bad, rejections
from tidemill.learner.data.columns import REWARD, TOOLS, RowSampling, refuse_limits, reward_in, rollout_in, sampling_in, tools_in
from tidemill.learner.data.digests import prompts_digest
from tidemill.learner.data.formats import kind_of, messages_in, read_values, refuse_unsendable, value_at, where_of
from tidemill.learner.data.mixing import Share, order_of
from tidemill.learner.data.responses import RecordedRow, RecordedSequence, Recordings, Response, in_conversation, responses_in
from tidemill.learner.data.saved_tokenizer import saved_tokenizer
from tidemill.learner.data.source import Source, rollout_named
from tidemill.learner.errors import CannotRender, PromptError, TemplateLacks
from tidemill.rewards.message_template import MessageTemplate, ToolsLeftOut

Tokenize = Callable[..., Sequence[int]]
"""Function from a prompt, and ``tools`` for a row that has some, to the model's input ids, template and special tokens included. With
``whole=True`` it gives those of a whole conversation, without a generation prompt, or of the text of a response, without special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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
    responses: tuple[Response, ...] = ()
    """Recorded responses."""
    where: str = ""
    """File and line of the row, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt at a position of the order."""

    epoch: int
    offset: int
    row: Row
    tokens: NDArray[np.int32]
    recorded: tuple[RecordedSequence, ...] = ()
    """Recorded responses of the row, for a rollout that has them."""
    chat_template_args: JsonMapping = field(default_factory=dict)
    """Variables of the chat template in the chats of its rollout."""
    digest: int = 0
    """Digest of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """The rules for using rows, beyond their columns."""

    policy: str = SKIP
    """``data.bad_rows``."""
    unfit: Callable[[Row], None] | None = None
    """Raises PromptError for a row that contradicts settings of the run; None = none does."""

    def applied(self, row: Row | PromptError, recorded: Collection[str] | None) -> Row | PromptError:
        """Return the row as it is used, or its error. ``recorded``: rollouts with recorded responses; None = those of rows stay."""
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
        """``max_tokens``: the longest prompt. ``recordings``: makes the sequences of recorded responses; None = no row has any."""
        self.recordings = recordings
        self._tokenize, self._max_tokens = tokenize, max_tokens

    def of(self, row: Row) -> tuple[NDArray[np.int32], tuple[RecordedSequence, ...]]:
        """Return the tokens of the prompt, and the recorded sequences of a rollout that has them.

        Raises PromptError for a row that cannot be used: the chat template rejects it, it has no token, or too many.
        """
        recorded: tuple[RecordedSequence, ...] = ()
        most = self._max_tokens
        with rejections(row.where):
            if row.responses and self.recordings is not None:
                recorded, most = self.recordings.sequences(recorded_row(row)), self.recordings.max_tokens
                tokens = recorded[0].prompt_tokens
            else:
                tokens = np.asarray(row_tokens(row, self._tokenize), np.int32)
        if not len(tokens):
            raise PromptError(row.where, "a prompt of at least one token", repr(row.prompt))
        if (longest := max((len(one.tokens) for one in recorded), default=len(tokens))) > most:
            raise RowTooLong(row.where, f"<= {most} tokens ({'the context' if recorded else 'data.max_prompt_tokens'})", longest)
        return tokens, recorded


class PromptFile:
    """The rows of one or several sources, drawn in an order that depends on the seed and the epoch alone.

    A row that cannot be used keeps its place in the order and is skipped there (``bad_rows``). Whether it can be used depends on the row
    and the settings alone, so a later start skips the same rows.
    """

    def __init__(
        self,
        path: Path | Sequence[Source],
        *,
        tokenize: Tokenize,
        max_tokens: int,
        shuffle: bool = True,
        seed: int = 0,
        recordings: Recordings | None = None,
        chat_template_args: JsonMapping | None = None,
        rules: RowRules | None = None,
    ) -> None:
        """``path``: one file, with the defaults of ``Source``; or sources.
        ``recordings``: makes the sequences of recorded responses; None = no row has any. ``chat_template_args``: for the chats of rollouts.

        Raises PromptError, which names file and line, for a source that cannot be read, or of which no row can be used; with the policy
        refuse for any bad row.
        """
        self.sources = [Source(path=path)] if isinstance(path, Path) else list(path)
        self.shuffle, self.seed, self._rules = shuffle, seed, rules or RowRules()
        self._row_tokens = RowTokens(tokenize, max_tokens=max_tokens, recordings=recordings)
        self.chat_template_args = dict(chat_template_args or {})
        # Before the rows are read: a file that changes while it is read then differs from the one that later starts find.
        self.digest = prompts_digest(self.sources, shuffle=shuffle, seed=seed)
        self.bad_rows = BadRows(self._rules.policy)
        self._rows: list[Row | PromptError] = []
        digests: list[int] = []
        self.shares = [self._read(source, number, digests) for number, source in enumerate(self.sources)]
        self.digests = np.array(digests, np.uint32)
        """Digest of each row as it is used, before it has tokens."""
        # Two passes: at the end of one, reissued prompts of it and new prompts of the next are drawn in turn.
        self._order = lru_cache(maxsize=2)(self._permutation)
        if self._rules.policy == REFUSE:
            for number in range(len(self._rows)):
                self._row_tokens.of(self.row(number))

    def _read(self, source: Source, number: int, digests: list[int]) -> Share:
        """Append the rows of a source, and their digests. Raises PromptError."""
        refuse_template(source.template)
        first = len(self._rows)
        recordings = self._row_tokens.recordings
        for row in scan_rows(source):
            digests.append(row_digest(row))
            self._rows.append(self._rules.applied(row, None if recordings is None else recordings.rollouts))
        rows = self._rows[first:]
        share = Share(first=first, size=len(rows), weight=source.weight, name=f"{number}")
        if not rows:
            raise PromptError(str(source), "at least one prompt", "none")
        if isinstance(rows[0], PromptError) and not any(isinstance(row, Row) for row in rows):
            raise all_bad(rows[0], str(source), len(rows))
        if not share.in_pass:
            want = f"a weight with at least one of its {share.size} prompts in a pass"
            raise PromptError(str(source), want, f"{source.weight}; raise it, or remove the source")
        return share

    def __len__(self) -> int:
        """Return the number of prompts in a pass, which is that of the rows unless sources have weights."""
        return sum(share.in_pass for share in self.shares)

    @property
    def trouble(self) -> str:
        """Description of the rows skipped so far, for status; empty while there are none."""
        return self.bad_rows.trouble(len(self._rows))

    def row(self, number: int) -> Row:
        """Return the row of a number; those of further sources begin behind those of the ones before. Raises PromptError for a bad one."""
        row = self._rows[number]
        if isinstance(row, PromptError):
            raise row
        return row

    def place(self, number: int) -> str:
        """Return the file and line of a row, as in messages."""
        return self._rows[number].where

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of one pass, [len]; those of further sources begin behind those of the ones before."""
        return self._order(epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return order_of(self.shares, shuffle=self.shuffle, seed=self.seed, epoch=epoch)

    def at(self, epoch: int, offset: int) -> Drawn:
        """Return the prompt at a position. Raises PromptError for a row that cannot be used."""
        number = int(self.order(epoch)[offset])
        row = self.row(number)
        tokens, recorded = self._row_tokens.of(row)
        args = self.chat_template_args if row.rollout and not recorded else {}
        digest = int(self.digests[number])
        return Drawn(epoch=epoch, offset=offset, row=row, tokens=tokens, recorded=recorded, chat_template_args=args, digest=digest)

    def after(self, epoch: int, offset: int) -> Drawn:
        """Return the first prompt at or after a position that can be used. Skipped rows are added to ``bad_rows``.

        Raises PromptError when no row can be used, and with the policy refuse for any bad row.
        """
        first: PromptError | None = None
        # The rest of this pass and all of the next, which has another order; more where a pass has only some of the rows.
        for _ in range((1 + max(share.passes for share in self.shares)) * len(self)):
            if offset >= len(self):
                epoch, offset = epoch + 1, 0
            try:
                return self.at(epoch, offset)
            except PromptError as error:
                self.bad_rows.add(int(self.order(epoch)[offset]), error)
                first = first or error
            offset += 1
        assert first is not None
        raise all_bad(first, " + ".join(map(str, self.sources)), len(self._rows))

    def leave_out(self, epoch: int, offset: int, error: WireError) -> None:
        """Make the row at a position bad, because no task can carry it. Raises PromptError with the policy refuse."""
        number = int(self.order(epoch)[offset])
        self._rows[number] = bad = PromptError(self.place(number), f"a task with {error.field} of {error.want}", error.got)
        self.bad_rows.add(number, bad)


def row_tokens(row: Row, tokenize: Tokenize) -> Sequence[int]:
    """Return the input ids of a row's prompt and tools."""
    return tokenize(row.prompt, tools=row.tools) if row.tools else tokenize(row.prompt)


def row_digest(row: Row | PromptError) -> int:
    """Return a digest of 32 bits of a row's content, wherever it is; for a bad row, of its error."""
    if isinstance(row, PromptError):
        parts: list[object] = [row.want, str(row.got)]
    else:
        parts = [row.prompt, row.label, row.metadata, row.rollout]
        parts += [] if row.sampling == RowSampling() and not row.responses else [row.sampling, row.responses]
    return zlib.crc32(json.dumps(parts, sort_keys=True, default=repr).encode())


def recorded_row(row: Row) -> RecordedRow:
    """Return the parts of a row that its recorded sequences are made of."""
    return RecordedRow(prompt=row.prompt, responses=row.responses, tools=row.tools, where=row.where)


def with_responses(row: Row, rollouts: Collection[str]) -> Row:
    """Return the row with its recorded responses, if its rollout is one of ``rollouts``, else without any. Raises PromptError."""
    if row.rollout not in rollouts:
        return replace(row, responses=())
    if row.responses:
        return row
    prompt, response = in_conversation(row.prompt, where=row.where)
    return replace(row, prompt=prompt, responses=(response,))


def scan_rows(source: Source) -> Iterator[Row | PromptError]:
    """Iterate over the rows of a source as they are used, with the error in the place of each bad one.

    Raises PromptError when the rest of the file cannot be read.
    """
    found = enumerate(read_values(source.path))
    if (source.start or 0) < 0 or (source.stop or 0) < 0:  # from the end, which is not known before
        chosen: Iterator[tuple[int, tuple[str, JsonMapping | PromptError]]] = iter(list(found)[source.start : source.stop])
    else:
        chosen = islice(found, source.start, source.stop)
    for number, (where, values) in chosen:
        yield values if isinstance(values, PromptError) else _scanned(source, number, values, where)


def _scanned(source: Source, number: int, values: JsonMapping, where: str) -> Row | PromptError:
    try:
        return row_in(source, number, values, where=where)
    except PromptError as error:
        return error


def row_in(source: Source, number: int, values: Mapping[str, object], *, where: str = "") -> Row:
    """Return the row of a source for one line's values, as it is used. Raises PromptError.

    ``where``: its place in messages; empty = that in a source of one file.
    """
    row = row_of(where or where_of(source.path, number), number, values, source.keys)
    reward = reward_in(values, source.reward_key, where=row.where) or source.reward
    tools = tools_in(values, source.tools_key, where=row.where)
    own: JsonObject = ({REWARD: reward} if reward else {}) | ({TOOLS: tools} if tools else {})
    for key, value in own.items():
        if row.metadata.get(key, value) != value:
            raise PromptError(row.where, f"one value of {key!r}, {value!r:.80}", f"{row.metadata[key]!r:.80} in its metadata")
    sampling = sampling_in(values, source.sampling_key, where=row.where)
    rollout = rollout_in(values, source.rollout_key, where=row.where)
    rollout = rollout_named(source.rollout) if rollout is None else rollout
    refuse_limits(sampling, rollout, where=row.where, key=source.sampling_key)
    responses = responses_in(values, source.responses_key, where=row.where)
    row = replace(row, metadata={**row.metadata, **own}, sampling=sampling, tools=tools, rollout=rollout, responses=responses)
    return _worded(row, source)


def _worded(row: Row, source: Source) -> Row:
    """Return the row with the template and the system prompt of its source."""
    row = templated(row, source.template)
    if not source.system_prompt:
        return row
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if messages[0]["role"] == "system":
        return row
    return replace(row, prompt=[{"role": "system", "content": source.system_prompt}, *messages])


def templated(row: Row, template: str) -> Row:
    """Return the row with ``template`` around a text prompt; unchanged for chat messages, and for an empty template."""
    if not template or not isinstance(row.prompt, str):
        return row
    return replace(row, prompt=template.replace("{prompt}", row.prompt))


def refuse_template(template: str) -> None:
    """Raise PromptError for a template without ``{prompt}``."""
    if template and "{prompt}" not in template:
        raise PromptError("data.template", "text with {prompt} in it", repr(template))


def sampler_seed(seed: int, epoch: int, offset: int, reissues: int) -> int:
    """Return the sampler seed of a group (its samples add their index): 0 <= seed < 2**31 - 2**16, by SHA-256 of the arguments."""
    digest = hashlib.sha256(f"{seed}.{epoch}.{offset}.{reissues}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**31 - 2**16)  # room for 2**16 indices below 2**31


class PromptTokenizer:
    """Tokenizer and chat template of a model. A ``Tokenize`` and ``ChatTexts``."""

    def __init__(
        self,
        encode: Callable[[str, bool], Sequence[int]],
        decode: Callable[[list[int]], str],
        template: MessageTemplate | None,
        *,
        chat: bool,
        template_args: JsonMapping,
    ) -> None:
        """``encode``: from a text, and whether it gets the tokens that begin every text, to ids. ``decode``: back, special tokens included.

        ``chat``: prompts of text go through the chat template, too.
        """
        self._encode, self._decode, self._template = encode, decode, template
        self._chat, self._template_args = chat, dict(template_args)

    def __call__(self, prompt: Prompt, tools: Sequence[JsonObject] = (), *, whole: bool = False) -> Sequence[int]:
        """Return the input ids of a prompt: text as it is, unless the chat template is wanted for it, or renders its tools.

        Raises CannotRender, TemplateLacks.
        """
        if isinstance(prompt, str) and whole:
            return self.encode(prompt)
        if isinstance(prompt, str) and not self._chat and not tools:
            return self._encoded(prompt, add_special=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode(self.render(messages, tools, whole=whole))

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), *, whole: bool = False) -> str:
        """Return the text of a conversation, with a generation prompt unless it is ``whole``. Raises CannotRender, TemplateLacks."""
        if self._template is None:
            raise TemplateLacks(f"{'tools' if tools else 'chat messages'}, and the model has no chat template")
        try:
            return self._template.render(messages, tools=list(tools), add_generation_prompt=not whole, **self._template_args)
        except ToolsLeftOut as error:
            raise TemplateLacks(str(error)) from None
        except ValueError as error:
            raise CannotRender(str(error)) from None

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special tokens before or behind it. Raises CannotRender."""
        return self._encoded(text, add_special=False)

    def _encoded(self, text: str, *, add_special: bool) -> Sequence[int]:
        try:
            return self._encode(text, add_special)
        except ValueError as error:
            raise CannotRender(f"rejected by the tokenizer: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._decode(list(ids))


def model_tokenizer(model: str, *, apply_chat_template: bool = False, template_args: JsonMapping | None = None) -> PromptTokenizer:
    """Return the tokenizer of a Hugging Face model directory; chat messages always go through its template.

    ``template_args``: further variables of the template, such as ``enable_thinking``.
    """
    tokenizer = saved_tokenizer(Path(model))
    return PromptTokenizer(
        lambda text, add_special: list(tokenizer.encode(text, add_special_tokens=add_special)),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        MessageTemplate.read(Path(model)),
        chat=apply_chat_template,
        template_args=template_args or {},
    )


def row_of(where: str, number: int, values: Mapping[str, object], keys: tuple[str, str, str]) -> Row:
    """Return the row for one line's values. Raises PromptError."""
    prompt, label, metadata = (
        value_at(values, key, where=where, setting=f"data.{name}_key") if key or name == "prompt" else None
        for name, key in zip(("prompt", "label", "metadata"), keys, strict=True)
    )
    if keys[2] and not isinstance(metadata, dict):
        raise PromptError(where, f"a map in {keys[2]!r}", kind_of(metadata))
    found = Row(number=number, prompt=_prompt(where, keys[0], prompt), label=label, metadata=metadata or {}, where=where)
    for key, value in zip(keys, (found.prompt, label, metadata), strict=True):
        refuse_unsendable(value, where=where, key=key)
    return found


def _prompt(where: str, key: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise PromptError(where, f"text or chat messages with role and content in {key!r}", repr(value)[:80])
    return messages_in(value, where=where, key=key)
