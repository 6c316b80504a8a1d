"""Families beside the table of ``docs/models.md``, as a user would take one: what the learner's self-test says, and the
engine's. ``make test-families`` runs them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.families import OTHERS, one_place, page_rows, write_family
from tests.integration.fsdp_family_ranks import measured
from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.engine import open_model as open_engine
from tidemill.learner.backends.fsdp.family import FAMILIES
from tidemill.learner.errors import ConfigRefused

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEADER = ("`model_type`", "learner", "built-in engine", "reason")


@pytest.fixture(scope="module")
def place() -> Iterator[None]:
    with one_place():
        yield


def learner_cell(directory: Path) -> str:
    """Return the way in which the learner computes rows, of which each result is compared with transformers."""
    try:
        model, result = measured(directory)
    except ConfigRefused:
        return "refused"
    assert (result["log_probs"] < 5e-5, result["gradients"] < 2e-5, result["export"]) == (True, True, [])
    rows = "packed" if model.findings.packed else "padded"
    return f"{rows}, by own rules" if model.config.model_type in FAMILIES else rows


def engine_cell(directory: Path) -> str:
    """Return whether the engine opens a model, for which it compares decoded rows with forward passes."""
    try:
        open_engine(directory, EngineConfig(device="cpu", runner="transformers", kv_tokens=640))
    except UnsupportedModel:
        return "refused"
    return "yes"


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("place")
def test_a_family_is_computed_as_the_page_says(name: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, name)
    cells = page_rows(PAGE.read_text(), HEADER)[f"`{name}`"]
    assert cells[1:3] == [learner_cell(directory), engine_cell(directory)]


def test_the_page_has_these_families() -> None:
    rows = page_rows(PAGE.read_text(), HEADER)
    assert list(rows) == [f"`{name}`" for name in sorted(OTHERS)]
    assert all((cells[1] == "packed" and cells[2] == "yes") or cells[3] for cells in rows.values())
