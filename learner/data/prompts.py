"""A file of prompts in a deterministic order: (seed, epoch, offset) -> prompt, tokens, label, metadata. Knows files, no bus."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.wire.json_object import JsonMapping, JsonObject
from bus.wire.messages import Prompt
from learner.errors import PromptError

log = logging.getLogger(__name__)

Tokenize = Callable[[Prompt], Sequence[int]]
"""Function from a prompt to the model's input ids, template and special tokens included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of the file."""

    number: int
    """Index in the file, from 0."""
    prompt: Prompt
    label: object = None
    metadata: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt at a position of the order."""

    epoch: int
    offset: int
    row: Row
    tokens: NDArray[np.int32]


class PromptFile:
    """The rows of one .jsonl or .parquet file, drawn in an order that depends on the seed and the epoch alone."""

    def __init__(
        self,
        path: Path,
        *,
        tokenize: Tokenize,
        max_tokens: int,
        keys: tuple[str, str, str] = ("prompt", "label", ""),
        template: str = "",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """``keys``: those of prompt, label and metadata, in the form of ``value_at``; an empty label or metadata key is not read.

        Raises PromptError, which names file and line, for an unreadable or empty file, a missing key, or a prompt that is neither text
        nor messages.
        """
        refuse_template(template)
        self._path, self._tokenize, self._max_tokens, self._template = path, tokenize, max_tokens, template
        self._shuffle, self.seed = shuffle, seed
        self._rows = list(read_rows(path, keys))
        if not self._rows:
            raise PromptError(str(path), "at least one prompt", "none")
        self._too_long: set[int] = set()
        # Two passes: at the end of one, reissued prompts of it and new prompts of the next are drawn in turn.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def digest(self) -> str:
        """Digest of the file's content and of all settings that determine the order of prompts."""
        return prompts_digest(self._path, template=self._template, shuffle=self._shuffle, seed=self.seed)

    @property
    def num_too_long(self) -> int:
        """Number of distinct rows skipped so far because they have more than ``max_tokens`` tokens."""
        return len(self._too_long)

    @property
    def trouble(self) -> str:
        """Description of the rows skipped so far, for status; empty while there are none."""
        if not self._too_long:
            return ""
        return f"{self.num_too_long} of {len(self)} prompts left out so far: longer than {self._max_tokens} tokens (data.max_prompt_tokens)"

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of one pass, [len]: sorted by the raw output of Philox with key (seed, epoch), which is stable."""
        return self._order(epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int64)
        key = np.array([self.seed & (2**64 - 1), epoch], np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(len(self)), kind="stable")

    def at(self, epoch: int, offset: int) -> Drawn:
        """Return the prompt at a position. Raises PromptError when it is too long."""
        drawn = self._look(epoch, offset)
        if len(drawn.tokens) > self._max_tokens:
            raise PromptError(_where(self._path, drawn.row.number), f"<= {self._max_tokens} tokens", len(drawn.tokens))
        return drawn

    def after(self, epoch: int, offset: int) -> Drawn:
        """Return the first prompt at or after a position that is not too long. Each skipped row is logged once.

        Raises PromptError when all prompts are too long.
        """
        for _ in range(2 * len(self)):  # the rest of this pass and all of the next, whose order is another
            if offset >= len(self):
                epoch, offset = epoch + 1, 0
            drawn = self._look(epoch, offset)
            if len(drawn.tokens) <= self._max_tokens:
                return drawn
            self._skipped(drawn)
            offset += 1
        raise PromptError(str(self._path), f"a prompt of <= {self._max_tokens} tokens", f"{len(self)} longer ones")

    def _look(self, epoch: int, offset: int) -> Drawn:
        row = templated(self._rows[int(self.order(epoch)[offset])], self._template)
        tokens = np.asarray(self._tokenize(row.prompt), np.int32)
        if not len(tokens):
            raise PromptError(_where(self._path, row.number), "a prompt of at least one token", repr(row.prompt))
        return Drawn(epoch=epoch, offset=offset, row=row, tokens=tokens)

    def _skipped(self, drawn: Drawn) -> None:
        if drawn.row.number not in self._too_long:
            self._too_long.add(drawn.row.number)
            where = _where(self._path, drawn.row.number)
            log.warning(
                "prompt skipped where=%s tokens=%d max=%d skipped=%d", where, len(drawn.tokens), self._max_tokens, self.num_too_long
            )


def prompts_digest(path: Path, *, template: str, shuffle: bool, seed: int) -> str:
    """Return a digest of a file's content and of all settings that determine the order of prompts."""
    digest = hashlib.sha256(repr((template, shuffle, seed)).encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def read_rows(path: Path, keys: tuple[str, str, str]) -> Iterator[Row]:
    """Iterate over the rows of a prompt file in its order, reading lazily. Raises PromptError."""
    return (row_of(path, number, values, keys) for number, values in enumerate(_read(path)))


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


def model_tokenizer(model: str, *, apply_chat_template: bool = False) -> Tokenize:
    """Return the tokenize function of a Hugging Face model directory; chat messages always go through its template."""
    from transformers import AutoTokenizer  # slow to import, and used only here

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(prompt: Prompt) -> Sequence[int]:
        """Return the input ids of a prompt: text as it is, unless the chat template is wanted for it."""
        if isinstance(prompt, str) and not apply_chat_template:
            return list(tokenizer.encode(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    return tokenize


def _where(path: Path, number: int) -> str:
    return f"{path}:{number + 1}"


def _read(path: Path) -> Iterator[JsonMapping]:
    """Yield the rows of the file in its order. Raises PromptError."""
    if not path.is_file():
        raise PromptError(str(path), "a file of prompts", "no such file")
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        raise PromptError(str(path), "a .jsonl or .parquet file", f"suffix {path.suffix!r}")


def _read_jsonl(path: Path) -> Iterator[JsonMapping]:
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(_where(path, number), "a JSON map", f"{error.doc.strip()[:80]!r} ({error.msg})") from error
            except (UnicodeDecodeError, RecursionError) as error:
                raise PromptError(_where(path, number), "a JSON map in UTF-8", f"{line.strip()[:80]!r} ({error})") from error
            if not isinstance(values, dict):
                raise PromptError(_where(path, number), "a JSON map", _kind(values))
            yield values


def _read_parquet(path: Path) -> Iterator[JsonMapping]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise PromptError(str(path), "a parquet file", str(error)) from error


def value_at(values: Mapping[str, object], key: str, *, where: str, setting: str) -> Any:
    """Return the value under ``key``, or that under its parts in nested maps (``reward_model.ground_truth``).

    A key that exists unsplit takes precedence on every level. Raises PromptError with the keys of the level at which the lookup fails.
    """
    level, rest, path = values, key, ""
    while rest not in level:
        head, _, rest = rest.partition(".")
        below = level.get(head)
        if not rest or not isinstance(below, Mapping):
            inside = f" in {path!r}" if path else ""
            got = f"keys {sorted(level)}{inside}" if head not in level or not rest else f"{_kind(below)} in {_joined(path, head)!r}"
            raise PromptError(where, f"key {key!r} ({setting})", got)
        level, path = below, _joined(path, head)
    return level[rest]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind(value: object) -> str:
    """Return the name of a value's type in JSON and YAML."""
    names = {dict: "a map", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def row_of(path: Path, number: int, values: Mapping[str, object], keys: tuple[str, str, str]) -> Row:
    """Return the row for one line's values. Raises PromptError."""
    where = _where(path, number)
    prompt, label, metadata = (
        value_at(values, key, where=where, setting=f"data.{name}_key") if key or name == "prompt" else None
        for name, key in zip(("prompt", "label", "metadata"), keys, strict=True)
    )
    if keys[2] and not isinstance(metadata, dict):
        raise PromptError(where, f"a map in {keys[2]!r}", _kind(metadata))
    return Row(number=number, prompt=_prompt(where, keys[0], prompt), label=label, metadata=metadata or {})


def _prompt(where: str, key: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    is_chat = isinstance(value, list) and value and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value)
    if not is_chat:
        raise PromptError(where, f"text or chat messages with role and content in {key!r}", repr(value)[:80])
    return list(value)
