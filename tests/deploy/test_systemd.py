"""Units for bare machines: systemd itself finds nothing to complain of, and their commands make a run."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.units import UNITS, unit
from tests.waits import LIMIT_S
from tidemill.bus import exit_codes

FILES = sorted(UNITS.glob("*.service"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_systemd_says_nothing_about_a_unit(file: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("want systemd-analyze (make programs)")
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_unit_restarts_nothing_that_no_restart_cures(file: Path) -> None:
    service = unit(file)["Service"]
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == exit_codes.FINAL
    assert service["Restart"] == "on-failure"
