"""A tool and environments for tests of ``multi_turn``. Child processes import this module, so it imports little."""

import asyncio
import threading
from typing import Any

NO_CLASS = 0
"""A name of this module that is no environment."""


def told(text: str) -> str:
    """Say something."""
    return "the tool says so"


def halved(text: str) -> str:
    """Cut a text within an emoji."""
    return "\ud83d the tool"


def halved_error(text: str) -> None:
    raise ValueError("\udc80 no such file")


class HalvedGame:
    """Observes halves of characters."""

    def reset(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "\ud83d Play."}]}]

    def step(self, action: str) -> tuple[list[dict[str, Any]], float, bool]:
        return [{"role": "user", "content": "\udc80 Go on."}], 1.0, False


def hangs(text: str) -> None:
    """Never return."""
    threading.Event().wait()


class Game:
    """Ends after three actions; each earns its number."""

    def __init__(self, actions: int = 3) -> None:
        self.actions, self.number = actions, 0

    def reset(self, data: dict[str, Any]) -> str:
        return f"Play {data['prompt']}."

    async def step(self, action: str) -> tuple[str, float, bool]:
        self.number += 1
        return f" You said {len(action)} letters.", float(self.number), self.number == self.actions


class SlowToClose(Game):
    """A game of one action, whose end waits."""

    def __init__(self, closing: asyncio.Event, go_on: asyncio.Event, closed: asyncio.Event) -> None:
        super().__init__(actions=1)
        self.closing, self.go_on, self.closed = closing, go_on, closed

    async def close(self) -> None:
        self.closing.set()
        await self.go_on.wait()
        self.closed.set()


class SavedGame(Game):
    """A game that gives its state, and can end its process."""

    def state(self) -> dict[str, int]:
        return {"number": self.number}

    def restore(self, state: dict[str, int]) -> None:
        self.number = state["number"]
