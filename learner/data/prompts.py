"""Prompts of files in a deterministic order: (seed, epoch, offset) -> prompt, tokens, label, metadata. Knows files, no bus."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.wire.json_object import JsonMapping, JsonObject
from bus.wire.messages import Prompt
from learner.data.columns import REWARD, TOOLS, RowSampling, refuse_limits, reward_in, rollout_in, sampling_in, tools_in
from learner.data.formats import data_files, kind_of, messages_in, read_values, refuse_unsendable, value_at, where_of
from learner.data.mixing import Share, order_of
from learner.data.responses import RecordedRow, RecordedSequence, Recordings, Response, in_conversation, responses_in
from learner.data.row_functions import add_rows, is_function
from learner.data.saved_tokenizer import saved_tokenizer
from learner.data.source import Source, rollout_named
from learner.errors import PromptError
from rewards.message_template import MessageTemplate

log = logging.getLogger(__name__)

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


class PromptFile:
    """The rows of one or several sources, drawn in an order that depends on the seed and the epoch alone."""

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
    ) -> None:
        """``path``: one file, with the defaults of ``Source``; or sources.
        ``recordings``: makes the sequences of recorded responses; None = no row has any. ``chat_template_args``: for the chats of rollouts.

        Raises PromptError, which names file and line, for an unreadable or empty file, a missing key, or a prompt that is neither text
        nor messages.
        """
        self._sources = [Source(path=path)] if isinstance(path, Path) else list(path)
        self._tokenize, self._max_tokens, self._shuffle, self.seed = tokenize, max_tokens, shuffle, seed
        self._recordings, self.chat_template_args = recordings, dict(chat_template_args or {})
        self._place = " + ".join(map(str, self._sources))
        # Before the rows are read: a file that changes while it is read then differs from the one that later starts find.
        self.digest = prompts_digest(self._sources, shuffle=shuffle, seed=seed)
        self._rows: list[Row] = []
        self._shares = [self._read(source, number) for number, source in enumerate(self._sources)]
        self._too_long: set[str] = set()
        # Two passes: at the end of one, reissued prompts of it and new prompts of the next are drawn in turn.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _read(self, source: Source, number: int) -> Share:
        """Append the rows of a source. Raises PromptError."""
        refuse_template(source.template)
        first = len(self._rows)
        rows = read_rows(source)
        self._rows += rows if self._recordings is None else (with_responses(row, self._recordings.rollouts) for row in rows)
        share = Share(first=first, size=len(self._rows) - first, weight=source.weight, name=f"{number}")
        if not share.size:
            raise PromptError(str(source), "at least one prompt", "none")
        if not share.in_pass:
            want = f"a weight with at least one of its {share.size} prompts in a pass"
            raise PromptError(str(source), want, f"{source.weight}; raise it, or remove the source")
        return share

    def __len__(self) -> int:
        """Return the number of prompts in a pass, which is that of the rows unless sources have weights."""
        return sum(share.in_pass for share in self._shares)

    @property
    def rows(self) -> Sequence[Row]:
        """All rows of all sources, used or not."""
        return self._rows

    @property
    def num_too_long(self) -> int:
        """Number of distinct rows skipped so far because they have more than ``max_tokens`` tokens."""
        return len(self._too_long)

    @property
    def trouble(self) -> str:
        """Description of the rows skipped so far, for status; empty while there are none."""
        if not self._too_long:
            return ""
        return (
            f"{self.num_too_long} of {len(self._rows)} prompts left out so far: "
            f"longer than {self._max_tokens} tokens (data.max_prompt_tokens)"
        )

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of one pass, [len]; those of further sources begin behind those of the ones before."""
        return self._order(epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return order_of(self._shares, shuffle=self._shuffle, seed=self.seed, epoch=epoch)

    def at(self, epoch: int, offset: int) -> Drawn:
        """Return the prompt at a position. Raises PromptError when it is too long."""
        drawn = self._look(epoch, offset)
        if self._excess(drawn):
            raise PromptError(drawn.row.where, f"<= {self._most(drawn)} tokens", self._most(drawn) + self._excess(drawn))
        return drawn

    def _most(self, drawn: Drawn) -> int:
        """Return the most tokens of a prompt, or of a recorded sequence."""
        return self._recordings.max_tokens if drawn.recorded and self._recordings is not None else self._max_tokens

    def _excess(self, drawn: Drawn) -> int:
        """Return the tokens that a row has too many; 0 or less if it is used."""
        return max(0, max((len(one.tokens) for one in drawn.recorded), default=len(drawn.tokens)) - self._most(drawn))

    def after(self, epoch: int, offset: int) -> Drawn:
        """Return the first prompt at or after a position that is not too long. Each skipped row is logged once.

        Raises PromptError when all prompts are too long.
        """
        # The rest of this pass and all of the next, which has another order; more where a pass has only some of the rows.
        for _ in range((1 + max(share.passes for share in self._shares)) * len(self)):
            if offset >= len(self):
                epoch, offset = epoch + 1, 0
            drawn = self._look(epoch, offset)
            if not self._excess(drawn):
                return drawn
            self._skipped(drawn)
            offset += 1
        raise PromptError(self._place, f"a prompt of <= {self._max_tokens} tokens", f"{len(self._rows)} longer ones")

    def _look(self, epoch: int, offset: int) -> Drawn:
        row = self._rows[int(self.order(epoch)[offset])]
        if row.responses and self._recordings is not None:
            recorded = self._recordings.sequences(recorded_row(row))
            return Drawn(epoch=epoch, offset=offset, row=row, tokens=recorded[0].prompt_tokens, recorded=recorded)
        tokens = np.asarray(row_tokens(row, self._tokenize), np.int32)
        if not len(tokens):
            raise PromptError(row.where, "a prompt of at least one token", repr(row.prompt))
        return Drawn(epoch=epoch, offset=offset, row=row, tokens=tokens, chat_template_args=self.chat_template_args if row.rollout else {})

    def _skipped(self, drawn: Drawn) -> None:
        if drawn.row.where not in self._too_long:
            self._too_long.add(drawn.row.where)
            log.warning(
                "prompt skipped where=%s tokens=%d max=%d skipped=%d",
                drawn.row.where,
                self._most(drawn) + self._excess(drawn),
                self._most(drawn),
                self.num_too_long,
            )


def row_tokens(row: Row, tokenize: Tokenize) -> Sequence[int]:
    """Return the input ids of a row's prompt and tools."""
    return tokenize(row.prompt, tools=row.tools) if row.tools else tokenize(row.prompt)


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


def prompts_digest(sources: Sequence[Source], *, shuffle: bool, seed: int) -> str:
    """Return a digest of the files' content and of all settings that determine the order of prompts. Raises PromptError.

    That of one whole file is as in the releases that had nothing else: checkpoints have it.
    """
    files = [data_files(source.path) for source in sources]
    if len(sources) == 1 and sources[0].plain and not sources[0].path.is_dir() and len(files[0]) == 1:
        digest = hashlib.sha256(repr((sources[0].template, shuffle, seed)).encode())
        _add_content(digest, files[0][0])
        return digest.hexdigest()[:16]
    told: list[tuple[object, ...]] = [(one.template, one.system_prompt, one.start, one.stop, one.weight) for one in sources]
    own = [(one.reward, one.reward_key, one.sampling_key, one.tools_key) for one in sources]
    if any(map(any, own)):
        told += own  # only then: checkpoints of earlier releases have the digest without
    if any(one.responses_key for one in sources):
        told += [(one.responses_key,) for one in sources]
    if any(one.rollout_key for one in sources) or len({one.rollout for one in sources}) > 1:
        told += [(one.rollout, one.rollout_key) for one in sources]
    digest = hashlib.sha256(repr((told, shuffle, seed)).encode())
    for file in (file for of_source in files for file in [*of_source, None]):
        content = hashlib.sha256()
        if file is not None:
            _add_content(content, file)
        digest.update(content.digest())
    return digest.hexdigest()[:16]


def _add_content(digest: "hashlib._Hash", path: Path) -> None:
    if is_function(path):
        add_rows(digest, path)
        return
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


def read_rows(source: Source) -> Iterator[Row]:
    """Iterate over the rows of a source in the order of its file, reading lazily. Raises PromptError for the first bad row."""
    for row in scan_rows(source):
        if isinstance(row, PromptError):
            raise row
        yield row


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


def model_tokenizer(model: str, *, apply_chat_template: bool = False, template_args: JsonMapping | None = None) -> Tokenize:
    """Return the tokenize function of a Hugging Face model directory; chat messages always go through its template.

    ``template_args``: further variables of the template, such as ``enable_thinking``.
    """
    tokenizer, template = saved_tokenizer(Path(model)), MessageTemplate.read(Path(model))
    return prompt_tokenizer(
        lambda text, add_special: list(tokenizer.encode(text, add_special_tokens=add_special)),
        template,
        chat=apply_chat_template,
        template_args=template_args or {},
    )


def prompt_tokenizer(
    encode: Callable[[str, bool], Sequence[int]], template: MessageTemplate | None, *, chat: bool, template_args: JsonMapping
) -> Tokenize:
    """Return the tokenize function for a tokenizer and a chat template. It raises ValueError for prompts that the template refuses.

    ``encode``: from a text, and whether it gets the tokens that begin every text, to ids. ``chat``: prompts of text are chats, too.
    """

    def tokenize(prompt: Prompt, tools: Sequence[JsonObject] = (), *, whole: bool = False) -> Sequence[int]:
        """Return the input ids of a prompt: text as it is, unless the chat template is wanted for it, or renders its tools."""
        if isinstance(prompt, str) and (whole or not (chat or tools)):
            return encode(prompt, not whole)
        if template is None:
            raise ValueError(f"{'tools' if tools else 'chat messages'}, and the model has no chat template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return encode(template.render(messages, tools=list(tools), add_generation_prompt=not whole, **template_args), False)

    return tokenize


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
