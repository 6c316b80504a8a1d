"""The file of SkyPilot, by its own parser."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.template import ROOT

pytestmark = pytest.mark.slow
FILE = ROOT / "launch/deploy/skypilot/workers.yaml"
PARSER = Path(__file__).with_name("sky_task.py")


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    path = request.config.getoption("--sky-python")
    if not path:
        pytest.skip("want --sky-python PYTHON, an interpreter that has skypilot (make test-sky)")
    return str(path)


def parse(python: str, file: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    """Parse a file, with a home directory of the test's: SkyPilot writes there."""
    return subprocess.run(
        [python, PARSER, file],
        capture_output=True,
        text=True,
        timeout=120,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
    )


def test_skypilot_reads_the_file(python: str, tmp_path: Path) -> None:
    done = parse(python, FILE, tmp_path)
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert all(task["spot"]) and len(task["devices"]) == 3
    assert task["envs"] == ["BUS", "POOL", "WORKERS"]


def test_skypilot_refuses_a_word_that_it_does_not_know(python: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(FILE.read_text().replace("use_spot:", "use_spots:"))
    done = parse(python, file, tmp_path)
    assert done.returncode != 0 and "use_spots" in done.stderr
