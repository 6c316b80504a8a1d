"""Every family of ``tests.families`` under fully_shard: a row of sequences is what transformers computes for each one
alone, gradients included, and the export is the files bit for bit.

``make test-families`` tries all of them, ``make test`` one of each kind.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import THOROUGH
from tests.families import FAMILIES, HEADER, KINDS, config_of, one_place, sequences, table_row, write_family
from tests.integration import fsdp_family_ranks
from tests.integration.fsdp_family_ranks import measured
from tests.learner_steps import run_ranks
from tidemill.learner.backends.fsdp.model import Place
from tidemill.learner.backends.fsdp.opening import Transformer, build, without_noise
from tidemill.learner.backends.fsdp.self_test import TOLERANCE, Alone, randomize

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TRIED = list(FAMILIES) if THOROUGH else list(KINDS)
LOG_PROBS, GRADIENTS = 5e-5, 2e-5
"""Largest differences in float32: of a log-prob, in nats, and of a gradient relative to the largest."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the families by their names."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, name) for name in TRIED}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with one_place() as here:
        yield here


@pytest.fixture(scope="module")
def ranks(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of two ranks, which compute the layers again in the backward pass."""
    arguments = (list(directories.values()),)
    return run_ranks(fsdp_family_ranks.main, arguments, world=2, out=tmp_path_factory.mktemp("ranks"))


def assert_close(result: dict[str, Any]) -> None:
    assert result["log_probs"] < LOG_PROBS
    assert result["gradients"] < GRADIENTS
    assert result["export"] == []


@pytest.mark.parametrize("name", TRIED)
def test_a_row_is_what_each_sequence_is_alone(name: str, directories: dict[str, Path], place: Place) -> None:
    model, result = measured(directories[name])
    assert_close(result)
    assert table_row(name, model) in PAGE.read_text().splitlines()


@pytest.mark.parametrize("name", TRIED)
def test_two_ranks_sum_the_gradients_of_their_rows(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_close(rank[name])


@pytest.mark.parametrize("name", TRIED)
def test_every_exported_tensor_has_one_sender(name: str, ranks: list[dict[str, Any]]) -> None:
    senders = Counter(tensor for rank in ranks for tensor in rank[name]["sent"])
    assert set(senders.values()) == {1}
    assert all(rank[name]["sent"] for rank in ranks)


def test_the_page_has_every_family() -> None:
    lines = PAGE.read_text().splitlines()
    first = lines.index("| " + " | ".join(HEADER) + " |") + 2
    rows = lines[first : first + len(FAMILIES) + 1]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[:-1]] == list(FAMILIES)
    assert not rows[-1].startswith("|")


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoehybrid", "qwen3_next", "lfm2", "kimi_linear"])
def test_rows_that_transformers_packs_by_position_ids_leak(name: str) -> None:
    """The reason for packed attention and for mixers by bucket: without them the sequences of a row read each other,
    and nothing says so.
    """
    torch.manual_seed(0)
    config = without_noise(config_of(name))
    plain = build(config, packed=False)
    randomize(plain.model)
    leaking = Transformer(plain.model, plain.row, plain.mixers, packed=True)
    alone = Alone.of(plain, sequences())
    assert alone.difference(plain) < TOLERANCE["cpu"] / 10
    assert alone.difference(leaking) > 100 * TOLERANCE["cpu"]
