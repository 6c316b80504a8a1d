"""Plays an environment with given actions, and prints what it returned: ``python -m tests.contract.played_environment
JSON``.
"""

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


async def awaited(value: Any) -> Any:
    """Return the result of a plain or an async method."""
    return await value if inspect.isawaitable(value) else value


def made(use: str, options: Mapping[str, Any]) -> Any:
    """Return an environment by its import path."""
    module, _, name = use.partition(":")
    return getattr(importlib.import_module(module), name)(**options)


async def played(use: str, options: Mapping[str, Any], row: Mapping[str, Any], actions: Sequence[str]) -> list[Any]:
    """Return the first observation, and what ``step`` returned for each action up to the end."""
    game = made(use, options)
    found: list[Any] = [await awaited(game.reset(dict(row)))]
    try:
        for action in actions:
            found.append(list(await awaited(game.step(action))))
            if found[-1][2]:
                break
    finally:
        if hasattr(game, "close"):
            await awaited(game.close())
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(played(**json.loads(sys.argv[1])))))
