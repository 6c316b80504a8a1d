"""Samples as text for a terminal, which must not interpret them, text of token ids, and values of messages as JSON.
Knows no bus.
"""

import json
import math
import re
import time
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.table import Table
from rich.text import Text

from tidemill.actors.text.text import Text as Tokenizer
from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Sample, Turns
from tidemill.launch.samples.filters import Headline, prompt_text

if TYPE_CHECKING:
    from tidemill.launch.samples.search import FoundSample


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}  # Colours of a message's role
_TEXTS = ("reasoning_content", "content")  # Fields of a message that are shown as text; the others are shown as JSON
_PROMPT_SIZE, _RESPONSE_SIZE = (4, 320), (10, 900)  # Lines and characters of a text that is shortened
_LABEL_SIZE = 40
_GOOD = 0.99  # Lowest reward shown in green
_CONTEXT = 8  # Tokens before a token that affect its text: a space at its beginning, the rest of a character


def clock(unix_s: float) -> str:
    """Return a time for display, in local time: the time of day, with the date unless it is today."""
    moment = datetime.fromtimestamp(unix_s)
    today = datetime.fromtimestamp(time.time()).date() == moment.date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def plain(text: str) -> str:
    """Return text that a terminal does not interpret: control characters are shown as ``\\x1b``."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def shortened(text: str, lines: int, characters: int) -> str:
    """Return beginning and end of a long text, and the amount that is missing between them."""
    rows = text.splitlines()
    if len(rows) > lines:
        end = rows[len(rows) - (lines - lines // 2) :]
        text = "\n".join([*rows[: lines // 2], f"… {len(rows) - lines} lines …", *end])
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text


def plain_table(*names: str, right: Collection[str] = ()) -> Table:
    """Return a table without lines. ``right``: columns of numbers."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def to_json(value: object) -> str:
    """Return JSON of any value of a message: bytes in hexadecimal, keys as text, numbers that JSON lacks as text."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | None) else repr(value)


def turns_in(turns: Turns) -> list[JsonObject]:
    """Return one map for each turn. Columns of an invalid sample may have any length."""
    columns = {name: getattr(turns, name).tolist() for name in ("at", "tokens", "begin_s", "seconds", "tools_s")}
    columns |= {name: getattr(turns, name) for name in ("id", "finish", "agent")}
    maps: list[JsonObject] = [
        {name: values[turn] for name, values in columns.items() if turn < len(values)}
        for turn in range(len(columns["at"]))
    ]
    for turn, reward in turns.rewards:
        if 0 <= turn < len(maps):
            maps[turn]["reward"] = reward
    return maps


def turns_table(turns: Turns) -> Table:
    """Return the turns as a table: tokens, seconds of model and tools, agent, reward, finish reason."""
    columns = {"tokens": "tokens", "begin_s": "begins at s", "seconds": "model s", "tools_s": "tools s"}
    columns |= {"reward": "reward"}
    headers = ("turn", *columns.values())
    table = plain_table(*headers, "finish", "agent", right=headers)
    for number, turn in enumerate(turns_in(turns)):
        values = [turn.get(name, "") for name in columns]
        numbers = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in values]
        table.add_row(str(number), *numbers, *(Text(plain(str(turn.get(name, "")))) for name in ("finish", "agent")))
    return table


def conversation(messages: Sequence[JsonMapping]) -> Text:
    """Return the messages as text, each behind its role; calls of tools and further fields as JSON."""
    text = Text()
    for message in messages:
        role = str(message.get("role", "?"))
        text.append(f"{plain(role)}\n", style=f"bold {_ROLES.get(role, '')}".strip())
        fields = {name: value for name, value in message.items() if name not in (*_TEXTS, "role") and value is not None}
        for name in _TEXTS:
            for row in _text_of(message.get(name)).splitlines():
                text.append(f"  {plain(row)}\n", style="dim" if name != "content" else "")
        if fields:
            text.append(f"  {plain(to_json(fields))}\n", style="dim")
    return text


def _text_of(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else to_json(content)


def block(match: "FoundSample", *, full: bool = False) -> Text:
    """Return a sample as text: facts, prompt, response. ``full``: nothing is shortened, messages for episodes."""
    line, sample = match.line, match.sample
    if isinstance(sample, WireError):
        return Text(f"#{line.seq} broken: {sample}\n", style="red")
    text = facts(line, sample)
    if error := sample.metadata.get("error"):
        text.append(f"  {plain(str(error))}", style="red")
    text.append("\n" if sample.label is None else f"  label {_one_line(str(sample.label))}\n", style="dim")
    if full and sample.transcript:
        return text.append_text(conversation(sample.transcript))
    for body, size, style in ((prompt_text(sample), _PROMPT_SIZE, "dim"), (sample.response, _RESPONSE_SIZE, "")):
        for row in (body if full else shortened(body, *size)).splitlines() or [""]:
            text.append("  │ " if style else "  ┃ ", style="dim" if style else "cyan")
            text.append(f"{plain(row)}\n", style=style)
    return text


def facts(line: Headline, sample: Sample) -> Text:
    """Return origin, versions, reward, length and status of a sample in one line."""
    text = Text()
    text.append(f"#{line.seq} ", style="bold")
    text.append(f"{clock(line.stored_s)}  ", style="dim")
    text.append(f"task {sample.task}.{sample.index}", style="cyan")
    if sample.kind != "train":
        text.append(f" {sample.kind}", style="magenta")
    text.append(f"  {versions(sample)}", style="blue")
    text.append("" if line.lag is None else f" lag {line.lag}", style="dim" if not line.lag else "yellow")
    text.append(f"  reward {sample.score:.3f}{_parts(sample)}", style=f"bold {reward_colour(sample.score)}")
    text.append(f"  {sample.response_length} tokens  ")
    if sample.turns is not None or len(sample.sequences) > 1:
        turns = "" if sample.turns is None else f"{len(sample.turns.at)} turns in "
        text.append(f"{turns}{len(sample.sizes)} sequence{'s' * (len(sample.sizes) > 1)}  ", style="cyan")
    text.append(sample.status.value, style="green" if sample.status == "completed" else "yellow")
    text.append(f" ({plain(sample.finish_reason)})" if sample.finish_reason else "", style="dim")
    text.append(f"  {plain(sample.actor)}", style="dim")
    return text


def versions(sample: Sample) -> str:
    """Return ``v4``, ``v4-5``, or ``no version`` for an empty response."""
    if not sample.spans:
        return "no version"
    newest = "" if sample.min_version == sample.max_version else f"-{sample.max_version}"
    return f"v{sample.min_version}{newest}"


def reward_colour(score: float) -> str:
    """Return green for a reward of at least ``_GOOD``, red for one of 0 or less, else yellow."""
    return "green" if score >= _GOOD else "red" if score <= 0 else "yellow"


def _one_line(text: str) -> str:
    line = " ".join(plain(text).split())
    return line if len(line) <= _LABEL_SIZE else f"{line[:_LABEL_SIZE]}…"


def _parts(sample: Sample) -> str:
    if not isinstance(sample.reward, dict):
        return ""
    return " (" + ", ".join(f"{plain(name)} {value:.3g}" for name, value in sample.reward.items()) + ")"


class Vocabulary:
    """Text of token ids; without a tokenizer an id is shown as ``⟨17⟩``."""

    def __init__(self, text: Tokenizer | None) -> None:
        self._text = text

    @classmethod
    def read(cls, places: Sequence[Path]) -> Self:
        """Return the vocabulary of the first model directory with a tokenizer; else one that shows ids."""
        return cls(next((text for place in places if (text := Tokenizer.read(place)) is not None), None))

    def pieces(self, ids: Sequence[int], first: int = 0) -> list[str]:
        """Return the text that each token adds, from place ``first`` on."""
        return [self._piece(ids, place) for place in range(first, len(ids))]

    def _piece(self, ids: Sequence[int], place: int) -> str:
        if self._text is None:
            return f"⟨{ids[place]}⟩"
        before = ids[max(0, place - _CONTEXT) : place]
        shorter = self._text.decode(before, skip_special=False)
        longer = self._text.decode([*before, ids[place]], skip_special=False)
        piece = longer[len(shorter) :] if longer.startswith(shorter) else ""
        return piece if piece and "\ufffd" not in piece else f"⟨{ids[place]}⟩"
