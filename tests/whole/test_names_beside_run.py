"""A run started in a directory whose files have the names of our rooms and of a module of Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole.running import SMOKE

RAISES = "raise RuntimeError('a file of the working directory was imported in place of ' + __name__)\n"
REWARD = "def longest(request):\n    return float(len(request.response))\n"


SCRIPT, MODULE = [str(Path(sys.executable).with_name("tidemill"))], [sys.executable, "-m", "tidemill"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(SCRIPT, ["up", "--fresh"], id="script", marks=pytest.mark.slow),
        pytest.param(SCRIPT, ["check"], id="check by the script"),
        pytest.param(MODULE, ["check"], id="check by the module"),
    ],
)
def test_a_run_beside_files_named_like_ours_and_pythons_own(
    command: list[str], words: list[str], tmp_path: Path
) -> None:
    """``rewards.py`` is the user's own, and found; the others would raise."""
    for name in ("actors", "bus", "learner", "types", "queue", "json"):
        (tmp_path / f"{name}.py").write_text(RAISES)
    for name in ("launch", "tests", "weightstore"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(RAISES)
    (tmp_path / "rewards.py").write_text(REWARD)
    settings = ("actor.reward=rewards:longest", "learner.steps=2", "directory=run")
    line = [*command, *words, str(SMOKE), *(word for setting in settings for word in ("--set", setting))]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "RuntimeError" not in ended.stdout + ended.stderr
    assert words == ["check"] or (tmp_path / "run/summary.json").exists()
