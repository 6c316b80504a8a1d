"""`tidemill` commands of tests, forked from a process that has imported their modules (``tests.template``): a start
takes no second.

Knows nothing of the commands' work. A test of a start itself (arguments of the interpreter, time, memory) runs ``python
-m tidemill``.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.forked import Forked
from tests.template import ROOT


def tidemill(*words: str, output: Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Forked:
    """Start ``tidemill WORDS``. ``output``: the file to which stdout and stderr are appended."""
    return Forked.module("tidemill", words, output, environment, cwd=cwd)


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
        command = Forked.module("tidemill", words, out, errors=errors, cwd=cwd)
        try:
            code = command.wait(limit_s)
        finally:
            command.kill()
        return Ended(returncode=code, out=out.read_text(), errors=errors.read_text())
