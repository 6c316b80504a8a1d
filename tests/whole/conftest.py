"""Preparation of the smoke run's files before the first test: its seconds count for no async test, and it blocks no
test's loop.
"""

import pytest

from tests.whole.prepared import made
from tests.whole.running import SMOKE


@pytest.fixture(scope="session", autouse=True)
def smoke_files(fork_server: None) -> None:
    made(SMOKE)
