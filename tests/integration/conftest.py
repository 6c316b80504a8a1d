"""Fixtures of the tests that train in their own process. Their modules are imported on use: most tests here start
children instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidemill.learner.layout.parallel import Parallel


@pytest.fixture(scope="module")
def here() -> "Iterator[Parallel]":
    """Yield a world of one rank in this process."""
    from tests.megatron_world import one_rank

    with one_rank() as joined:
        yield joined


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model with a vocabulary of ``megatron_ranks.VOCAB`` tokens."""
    from tests.integration.megatron_ranks import VOCAB
    from tests.tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)
