"""Late answers: with this folder in PYTHONPATH, answers of the bus, of HTTP servers and of threads come late at random,
in every process.

``LATE_ANSWERS="SHARE,SECONDS"``: this share of the waits before and after a call takes up to so many seconds more. A
test that fails then has relied on the order of things that happen at once, as it may on a machine that stands still for
a moment. ``make test-late``
"""

import asyncio
import asyncio.threads
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

CALLS = {"nats.aio.client": ("Client", "request"), "aiohttp.client": ("ClientSession", "_request")}
"""Class and method that wait for an answer, by module."""

Call = Callable[..., Coroutine[Any, Any, Any]]


def late(call: Call, share: float, seconds: float) -> Call:
    """Return the call with waits before and after it."""

    async def wait() -> None:
        if random.random() < share:
            await asyncio.sleep(random.random() * seconds)

    async def called(*args: Any, **options: Any) -> Any:
        await wait()
        result = await call(*args, **options)
        await wait()
        return result

    return called


class Finder(MetaPathFinder):
    """Changes the modules of ``CALLS`` when they are imported."""

    def __init__(self, share: float, seconds: float) -> None:
        self._late = (share, seconds)
        self._wanted = dict(CALLS)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (place := self._wanted.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            load(module)
            kind = getattr(module, place[0])
            setattr(kind, place[1], late(getattr(kind, place[1]), *self._late))

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


if wanted := os.environ.get("LATE_ANSWERS"):
    how_late = tuple(map(float, wanted.split(",")))
    asyncio.to_thread = asyncio.threads.to_thread = late(asyncio.to_thread, *how_late)
    sys.meta_path.insert(0, Finder(*how_late))
