"""The turns and the transcript of an episode, for a terminal and as maps for JSON. Knows no bus."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Turns
from tidemill.launch.samples.text import plain, to_json

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
"""Colours of a message's role."""
_TEXTS = ("reasoning_content", "content")
"""Fields of a message that are shown as text; the others are shown as JSON."""


def turns_in(turns: Turns) -> list[JsonObject]:
    """Return one map for each turn, with the fields that its sample has. Columns of an invalid sample may have any length."""
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
    found: list[JsonObject] = [
        {name: values[turn] for name, values in columns.items() if turn < len(values)} for turn in range(len(columns["at"]))
    ]
    for turn, reward in turns.rewards:
        if 0 <= turn < len(found):
            found[turn]["reward"] = reward
    return found


def turns_table(turns: Turns) -> Table:
    """Return the turns as a table: sampled tokens, seconds of the model call and of tools behind it, agent, reward and finish reason."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    columns = {"tokens": "tokens", "begin_s": "begins at s", "seconds": "model s", "tools_s": "tools s", "reward": "reward"}
    for name in ("turn", *columns.values()):
        table.add_column(name, justify="right")
    for name in ("finish", "agent"):
        table.add_column(name)
    for number, turn in enumerate(turns_in(turns)):
        numbers = [f"{turn[name]:.3f}" if isinstance(turn.get(name), float) else str(turn.get(name, "")) for name in columns]
        table.add_row(str(number), *numbers, *(Text(plain(str(turn.get(name, "")))) for name in ("finish", "agent")))
    return table


def conversation(messages: Sequence[JsonMapping]) -> Text:
    """Return the messages as text, each behind its role; calls of tools and further fields as JSON."""
    text = Text()
    for message in messages:
        role = str(message.get("role", "?"))
        text.append(f"{plain(role)}\n", style=f"bold {_ROLES.get(role, '')}".strip())
        more = {name: value for name, value in message.items() if name not in (*_TEXTS, "role") and value is not None}
        for name in _TEXTS:
            for row in _text_of(message.get(name)).splitlines():
                text.append(f"  {plain(row)}\n", style="dim" if name != "content" else "")
        if more:
            text.append(f"  {plain(to_json(more))}\n", style="dim")
    return text


def _text_of(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else to_json(content)
