"""Node, and the JavaScript actor of docs/examples with its packages, for the tests that run it."""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from tests.npm_kit import node, packages
from tidemill.bus.system.processes import die_with_parent

EXAMPLE = Path(__file__).resolve().parents[1] / "docs/examples/js-actor"


def installed(directory: Path, *more: Path) -> Path:
    """Return a copy of the example in ``directory``, with its packages and the files ``more`` beside it.

    Where these cannot be had, the test is skipped or fails as ``npm_kit.packages`` says.
    """
    fetched = packages(EXAMPLE)
    for file in (*EXAMPLE.glob("*.mjs"), *EXAMPLE.glob("package*.json"), *more):
        shutil.copy(file, directory)
    (directory / "node_modules").symlink_to(fetched / "node_modules")
    return directory


class JsActor:
    """A running actor."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    async def meanwhile(self, event: Awaitable[object]) -> None:
        """Wait for an event that needs this actor; raise an error with its last log lines when it ends before."""
        ended = asyncio.ensure_future(self._process.wait())
        waiting = asyncio.ensure_future(event)
        try:
            await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
            assert waiting.done(), f"the actor ended, code {self._process.returncode}:\n{self._log.read_text()[-3000:]}"
            waiting.result()  # raises the event's own error
        finally:
            for task in (ended, waiting):
                task.cancel()
            await asyncio.gather(ended, waiting, return_exceptions=True)

    async def drain(self) -> int:
        """Send SIGTERM, and return its exit code."""
        self._process.terminate()
        return await self._process.wait()


@contextlib.asynccontextmanager
async def js_actor(directory: Path, url: str, run: str, id: str, *arguments: str) -> AsyncIterator[JsActor]:
    """Start an actor in an ``installed`` directory, with its output in ``<id>.log`` there; it is killed (-9) when the
    block is left.
    """
    log = directory / f"{id}.log"
    command = (node(), "actor.mjs", "--bus", url, "--run", run, "--id", id, *arguments)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=directory, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=die_with_parent()
        )
    try:
        yield JsActor(process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
