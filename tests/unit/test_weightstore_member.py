"""What is believed of an engine's live row."""

import pytest

from bus.messages import LiveRow
from weightstore.member import MOST_RANKS, ranks_of


@pytest.mark.parametrize(("said", "ranks"), [(2.0, 2), (0, 1), (-3, 1), (1e308, MOST_RANKS), (2**62, MOST_RANKS), (True, 1)])
def test_an_engine_has_a_number_of_ranks_that_a_group_can_have(said: float, ranks: int) -> None:
    assert ranks_of(LiveRow(role="engine", id="e", host="h", pid=1, phase="serving", load={"ranks": said})) == ranks
