"""Values of messages as text: for a terminal, which must not interpret them, and as JSON; turns and transcripts."""

import json
import math
import re
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Turns

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
"""Colours of a message's role."""
_TEXTS = ("reasoning_content", "content")
"""Fields of a message that are shown as text; the others are shown as JSON."""


def plain(text: str) -> str:
    """Return text that a terminal does not interpret: control characters are shown as ``\\x1b``."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def shortened(text: str, lines: int, characters: int) -> str:
    """Return beginning and end of a long text, and the amount that is missing between them."""
    rows = text.splitlines()
    if len(rows) > lines:
        text = "\n".join(
            [*rows[: lines // 2], f"… {len(rows) - lines} lines …", *rows[len(rows) - (lines - lines // 2) :]]
        )
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return text


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
    columns = {
        "at": turns.at.tolist(),
        "tokens": turns.tokens.tolist(),
        "begin_s": turns.begin_s.tolist(),
        "seconds": turns.seconds.tolist(),
        "tools_s": turns.tools_s.tolist(),
        "id": turns.id,
        "finish": turns.finish,
        "agent": turns.agent,
    }
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
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    columns = {
        "tokens": "tokens",
        "begin_s": "begins at s",
        "seconds": "model s",
        "tools_s": "tools s",
        "reward": "reward",
    }
    for name in ("turn", *columns.values()):
        table.add_column(name, justify="right")
    for name in ("finish", "agent"):
        table.add_column(name)
    for number, turn in enumerate(turns_in(turns)):
        numbers = [
            f"{turn[name]:.3f}" if isinstance(turn.get(name), float) else str(turn.get(name, "")) for name in columns
        ]
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
