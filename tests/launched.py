"""`tidemill` commands of tests, forked from the process of ``tests.forked`` that has imported their modules: a start takes no second.

Knows nothing of the commands' work. A test of a start itself (arguments of the interpreter, time, memory) runs ``python -m launch``.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[1]


def tidemill(*words: str, output: Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Forked:
    """Start ``tidemill WORDS``. ``output``: the file to which stdout and stderr are appended."""
    return Forked(_command, (words, cwd), environment or {}, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended."""

    returncode: int
    out: str
    errors: str

    @property
    def output(self) -> str:
        return self.out + self.errors


def run_tidemill(*words: str, cwd: Path = ROOT, limit_s: float = 240.0) -> Ended:
    """Run ``tidemill WORDS`` to its end. Raises TimeoutError after ``limit_s`` seconds."""
    with tempfile.TemporaryDirectory(prefix="tidemill-command-") as directory:
        out, errors = Path(directory) / "out", Path(directory) / "errors"
        command = Forked(_command, (words, cwd), {}, out, errors=errors)
        try:
            code = command.wait(limit_s)
        finally:
            command.kill()
        return Ended(returncode=code, out=out.read_text(), errors=errors.read_text() if errors.exists() else "")


def _command(words: tuple[str, ...], cwd: Path) -> int:
    from launch.cli.main import main

    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # as ``python -m`` does
    return main(words)
