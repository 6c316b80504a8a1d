"""The sdist and the wheel of this working tree, built from a copy: a build writes into its source."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = "9.8.7"
"""Version of what is built: the tag of the copy."""
IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def build(directory: Path) -> Path:
    """Return a directory with an sdist, and the wheel that was built of it."""
    source, dist = directory / "source", directory / "dist"
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository: the version is that of its tag")
    files = _run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run("git", "-C", source, "init", "--quiet")
    _run("git", "-C", source, "add", "--all")
    _run("git", "-C", source, *IDENTITY, "commit", "--quiet", "--message", "Copy")
    _run("git", "-C", source, "tag", f"v{VERSION}")
    _run(sys.executable, "-m", "build", "--outdir", dist, source)
    return dist


def wheel(dist: Path) -> Path:
    """Return the wheel in a directory."""
    (file,) = dist.glob("*.whl")
    return file


def environment() -> dict[str, str]:
    """Return this process's environment, without the path to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(*words: str | Path) -> str:
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
