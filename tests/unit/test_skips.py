"""Skipped tests: an error under CI unless they do not apply, and a run that only skips fails everywhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.examples import rarely

ROOT = Path(__file__).parents[2]
MISSING = "import pytest\ndef test_it(): pytest.skip('want nftables')\n"
MARKED = "import pytest\npytestmark = pytest.mark.skipif(True, reason='want nftables')\ndef test_it(): pass\n"
MODULE = "import pytest\npytest.skip('want nftables', allow_module_level=True)\n"
FIXTURE = "import pytest\n@pytest.fixture\ndef lab(): pytest.skip('want nftables')\ndef test_it(lab): pass\n"
INAPPLICABLE = "from tests.skips import inapplicable\ndef test_it(): inapplicable('of CUDA only')\n"
PASSED = "def test_passed(): pass\n"
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n"


def outcome(directory: Path, source: str, *, ci: bool, workers: int = 0) -> tuple[int, str]:
    """Return exit code and output of pytest on a file with this source."""
    (directory / "test_one.py").write_text(source)
    environment = {name: text for name, text in os.environ.items() if name != "CI" and not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **({"CI": "true"} if ci else {})}
    words = ["-p", "tests.skips", "-c", os.devnull, "--rootdir", str(directory), "-p", "no:cacheprovider", "-ra"]
    words += ["-p", "xdist", "-n", str(workers)] if workers else []
    command = [sys.executable, "-m", "pytest", *words, str(directory / "test_one.py")]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(MISSING + PASSED, id="call"),
        pytest.param(MODULE, id="module"),
        *rarely([pytest.param(MARKED, id="mark"), pytest.param(FIXTURE + PASSED, id="fixture")]),
    ],
)
def test_a_skip_for_want_of_something_is_an_error_under_ci(tmp_path: Path, source: str) -> None:
    code, output = outcome(tmp_path, source, ci=True)
    assert code not in (0, 5) and "skipped, which is an error under CI: want nftables" in output, output


@pytest.mark.parametrize("source", [INAPPLICABLE + PASSED, EXPECTED_FAILURE], ids=["inapplicable", "xfail"])
def test_a_test_that_does_not_apply_is_skipped_under_ci(tmp_path: Path, source: str) -> None:
    code, output = outcome(tmp_path, source, ci=True)
    assert code == 0, output


@pytest.mark.parametrize(("source", "workers"), [(MISSING, 2), (INAPPLICABLE, 0), *rarely([(MISSING, 0), (MARKED, 0)])])
def test_a_run_that_only_skips_fails_with_the_reasons(tmp_path: Path, source: str, workers: int) -> None:
    code, output = outcome(tmp_path, source, ci=False, workers=workers)
    assert code == 5 and "nothing was tested" in output, output
    assert "want nftables" in output or "of CUDA only" in output, output


def test_a_run_with_a_skip_and_a_passed_test_passes_and_prints_the_reason(tmp_path: Path) -> None:
    code, output = outcome(tmp_path, MISSING + PASSED, ci=False)
    assert code == 0 and "want nftables" in output, output


def test_missing_programs_are_named_by_their_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert programs.missing(["nft", "ip", "tc"]) == ["iproute2", "nftables"]
    assert programs.main([]) == 1
    assert re.search(r"apt-get install [\w ]*iproute2", capsys.readouterr().out)


def test_an_installation_that_fails_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert programs.main(["--install"]) == 1
    assert "apt-get" in capsys.readouterr().out
