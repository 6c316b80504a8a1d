"""Filters of samples: conditions on header fields, on payload fields, and on the text. Knows no bus."""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from tidemill.bus.client.jetstream import Message
from tidemill.bus.streams.samples import header_fields, headers_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Sample, Task

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?"
_COMPARED = re.compile(rf"(<=|>=|<|>|=)?\s*({_NUMBER})")
_TASK = re.compile(r"([1-9]\d*)(?:\.(\d+))?")
_LARGEST = 3.4e38  # Largest absolute reward: the largest number of float32
_BETWEEN = re.compile(rf"({_NUMBER})?\.\.({_NUMBER})?")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, each end included or not."""

    low: float = float("-inf")
    high: float = float("inf")
    with_low: bool = True
    with_high: bool = True

    @classmethod
    def parse(cls, where: str, text: str) -> Self:
        """Return the range of ``<0.5``, ``1``, ``0.2..0.8`` (with both ends), ``..3``. Raises ValueError."""
        if (between := _BETWEEN.fullmatch(text.strip())) and any(between.groups()):
            low, high = between.groups()
            return cls(float(low or "-inf"), float(high or "inf"))
        compared = _COMPARED.fullmatch(text.strip())
        if compared is None:
            raise ValueError(f"{where}: want a number, <, <=, >, >= and a number, or LOW..HIGH, got {text!r}")
        sign, number = compared[1] or "=", float(compared[2])
        if sign == "=":
            return cls(number, number)
        return cls(high=number, with_high=sign == "<=") if sign[0] == "<" else cls(low=number, with_low=sign == ">=")

    def __contains__(self, number: float) -> bool:
        above = number >= self.low if self.with_low else number > self.low
        return above and (number <= self.high if self.with_high else number < self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Metadata of a sample without its payload; None = not in its headers."""

    seq: int
    stored_s: float
    kind: str
    actor: str  # Actor as its subject has it: see `subjects.token`
    task: int | None = None
    index: int | None = None
    versions: tuple[int, int] | None = None  # Oldest and newest version; (-1, -1) for an empty response
    reward: float | None = None
    status: str | None = None
    tokens: int | None = None  # Number of tokens of the response
    engine: str | None = None
    lag: int | None = None  # Lag in steps when it was stored: see `tidemill.launch.samples.search`


def headline_of(seq: int, stored_s: float, subject: str, sample: Sample) -> Headline:
    """Return the metadata from the payload, which has all fields but the lag."""
    return replace(_headline(seq, stored_s, subject, headers_of(sample)), engine=sample.engine)


def headline(glimpse: Message) -> Headline:
    """Return the metadata from subject and headers."""
    return _headline(glimpse.seq, glimpse.stored_s, glimpse.subject, glimpse.headers)


def _headline(seq: int, stored_s: float, subject: str, headers: dict[str, str]) -> Headline:
    words, fields = [*subject.split("."), "", "", ""], header_fields(headers)
    return Headline(
        seq=seq,
        stored_s=stored_s,
        kind=words[3],
        actor=words[5],
        task=_int(fields.get("task")),
        index=_int(fields.get("index")),
        versions=_versions(fields.get("versions", "")),
        reward=_float(fields.get("reward")),
        status=fields.get("status"),
        tokens=_int(fields.get("tokens")),
        engine=fields.get("engine"),
    )


def _int(word: str | None) -> int | None:
    return None if word is None else subjects.natural(word)


def _float(word: str | None) -> float | None:
    """Return the number; None if it is missing, unreadable, NaN or infinite."""
    try:
        number = math.nan if word is None else float(word)
    except ValueError:
        return None
    return number if abs(number) <= _LARGEST else None


def _versions(word: str) -> tuple[int, int] | None:
    if word == "none":
        return -1, -1
    oldest, _, newest = word.partition("-")
    versions = subjects.natural(oldest), subjects.natural(newest)
    return None if versions[0] is None or versions[1] is None else (versions[0], versions[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """All conditions must hold; None = no condition."""

    reward: Range | None = None
    lag: Range | None = None
    tokens: Range | None = None
    status: tuple[str, ...] = ()
    kind: str | None = None
    task: int | None = None
    index: int | None = None
    actor: str | None = None
    engine: str | None = None
    text: re.Pattern[str] | None = None  # Pattern that must be found in the prompt or in the response

    @property
    def of_headers(self) -> bool:
        """True if headers alone can exclude a sample."""
        return replace(self, text=None) != Filter()

    def of(self, line: Headline) -> bool | None:
        """Return whether the metadata fits; None if fields are missing for it. The text is not matched here."""
        conditions: list[tuple[Any, object]] = [
            (self.reward, line.reward),
            (self.tokens, line.tokens),
            (self.status or None, line.status),
            *((None if own is None else (own,), value) for own, value in self._equal(line)),
        ]
        fits = [None if value is None else value in allowed for allowed, value in conditions if allowed is not None]
        if self.lag is not None:  # no header has it, so it is never missing
            fits.append(line.lag is not None and line.lag in self.lag)
        return False if False in fits else None if None in fits else True

    def _equal(self, line: Headline) -> Iterator[tuple[object, object]]:
        """Yield (wanted, present) of the fields that must be equal."""
        for name in ("kind", "task", "index", "engine"):
            yield getattr(self, name), getattr(line, name)
        yield None if self.actor is None else subjects.token(self.actor), line.actor

    def matches_text(self, sample: Sample) -> bool:
        """Return whether the text fits."""
        return self.text is None or any(self.text.search(text) for text in (prompt_text(sample), sample.response))


def prompt_text(sample: Sample | Task) -> str:
    """Return the prompt as one text, chat messages with their roles."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in sample.prompt)


def filter_of(args: argparse.Namespace) -> Filter:
    """Return the filter of the arguments. Raises ValueError naming the argument."""
    task, index = task_of("--task", args.task) if args.task else (None, None)
    texts = {name: getattr(args, name) for name in ("reward", "lag", "tokens")}
    ranges: dict[str, Any] = {name: Range.parse(f"--{name}", text) for name, text in texts.items() if text}
    same: dict[str, Any] = {name: getattr(args, name) for name in ("kind", "actor", "engine")}
    try:
        pattern = re.compile(args.text) if args.text else None
    except re.error as error:
        raise ValueError(f"--text: want a regular expression, got {args.text!r}: {error}") from None
    return Filter(**ranges, **same, status=tuple(args.status), task=task, index=index, text=pattern)


def task_of(where: str, text: str) -> tuple[int, int | None]:
    """Return (task, index) of ``57`` or ``57.3``; index None without one. Raises ValueError naming ``where``."""
    match = _TASK.fullmatch(text)
    if match is None:
        raise ValueError(f"{where}: want TASK or TASK.INDEX, got {text!r}")
    return int(match[1]), None if match[2] is None else int(match[2])


def positive(where: str, number: int | None) -> None:
    """Raise ValueError naming ``where`` for a number below 0; None is accepted."""
    if number is not None and number < 0:
        raise ValueError(f"{where}: want >= 0, got {number}")
