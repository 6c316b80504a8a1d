"""The benchmark ``mutants``: it knows every module of ``learner/algorithms``, and the tests of each see wrong
formulas.
"""

import re
import subprocess
import sys

import pytest

from tests.bench.mutants import FOLDER, MODULES, ROOT, files_for, mutants

SEEN_LEAST = 0.8
"""Share of the mutants that the tests see; the rest are changes of values under masks, or at bounds where both sides
are equal.
"""


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_mutants_and_tests(module: str) -> None:
    assert (FOLDER / f"{module}.py").is_file()
    assert files_for(module)
    assert list(mutants(module))


@pytest.mark.slow
def test_the_tests_see_wrong_formulas_in_every_module() -> None:
    command = [sys.executable, "-m", "tests.bench", "mutants", "--sample", "3", "--jobs", "2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = {
        name: (int(killed), int(of))
        for name, killed, of in re.findall(r"RATIO (?:of )?(\w+): (\d+) of (\d+)", run.stdout)
    }
    killed, of = found.pop("all")
    assert sorted(found) == MODULES
    assert killed >= SEEN_LEAST * of, run.stdout
