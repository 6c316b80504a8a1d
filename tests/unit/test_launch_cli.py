"""The command line answers at once, and says what is wrong."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST_S = 0.7
"""Of a processor, for all there is to do; the clock says more where others are at work."""


def tidemill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "launch", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def processor_s() -> float:
    """What the children that have ended have had."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("up", "launch/configs/digits.yaml", "--print-config"), 0),
        (("config", "launch/configs/digits.yaml"), 0),
        (("up", "launch/configs/digits.yaml", "--set", "learner.stepz=3"), 2),
        (("up", "no/such/file.yaml"), 2),
    ],
    ids=["help", "print-config", "config", "config-error", "no-file"],
)
def test_answers_in_a_fraction_of_a_second(arguments: tuple[str, ...], code: int) -> None:
    """The best of five: the machine is shared, the imports are not."""
    times = []
    for _ in range(5):
        before = processor_s()
        result = tidemill(*arguments)
        times.append(processor_s() - before)
        assert result.returncode == code, result.stderr
    assert min(times) < FAST_S, times


@pytest.mark.parametrize(
    "arguments", [["--help"], ["config", "launch/configs/digits.yaml", "--print-config"]], ids=["help", "print-config"]
)
def test_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom launch.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'nats', 'numpy.linalg', 'aiohttp', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_errors_go_to_stderr_with_path_and_cure() -> None:
    result = tidemill("up", "launch/configs/digits.yaml", "--set", "staleness.maxlag=3")
    assert result.returncode == 2
    assert "staleness.maxlag: no such setting; did you mean staleness.max_lag?" in result.stderr
    assert "Traceback" not in result.stderr


def test_looking_needs_a_run() -> None:
    result = tidemill("tail")
    assert result.returncode == 2
    assert "--run-dir" in result.stderr
    result = tidemill("status", "--run-dir", "/nowhere")
    assert result.returncode == 2
    assert "want the directory of a run" in result.stderr
