"""``make tools`` and ``make walk``: their files pass the checks of ``tidemill check``, and the page shows runs of as
many steps.
"""

import importlib
import re
from pathlib import Path

import pytest

from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/rollouts.md").read_text()


@pytest.mark.parametrize("name", ["tools", "walk"])
def test_a_shipped_run_passes_every_check(tmp_path: Path, name: str) -> None:
    loaded = load([ROOT / f"launch/configs/{name}.yaml"], [f"directory={tmp_path}/run"])
    report = check(loaded, Purpose(fresh=True, call_reward=True))
    assert not report.errors, [finding.text for finding in report.errors]
    [rollout] = loaded.config.rollouts.values()
    module, _, program = rollout.program.partition(":")
    getattr(importlib.import_module(module), program)(**rollout.arguments(""))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tools", "walk"])
def test_the_curve_on_the_page_is_one_of_the_file(name: str) -> None:
    """The curve behind ``make NAME`` ends with the last step of the file, at the reward that the run has to reach."""
    config = load([ROOT / f"launch/configs/{name}.yaml"], []).config
    [paragraph] = re.findall(rf"^`make {name}` .*$", PAGE, re.MULTILINE)
    *_, (reward, step) = re.findall(r"(0\.\d+) at (?:step )?(\d+)", paragraph)
    assert int(step) == config.learner.steps
    assert float(reward) >= config.up.require_reward > 0
