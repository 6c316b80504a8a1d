"""The steps that get a checkpoint, while others wait for their copies."""

from types import SimpleNamespace

import pytest

from tidemill.learner.feed.feeder_loops import Feeder
from tidemill.learner.settings.config import MOST_PENDING


@pytest.mark.parametrize(("every", "evaluated"), [(4, False), (0, True)])
def test_a_checkpoint_that_is_left_out_is_logged(every: int, evaluated: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that is wanted for its evaluation alone."""
    parts = SimpleNamespace(
        _settings=SimpleNamespace(learner=SimpleNamespace(checkpoint_every=every)),
        _source=SimpleNamespace(rules=SimpleNamespace(steps=100)),
        _outcomes=SimpleNamespace(pending=MOST_PENDING),
        _row=SimpleNamespace(copies_waited_for="an upload"),
        _best=SimpleNamespace(wanted=True),
        _is_evaluated=lambda step: evaluated,
    )
    assert not Feeder._wants_checkpoint(parts, 8, False)  # type: ignore[arg-type]  # the parts that it reads
    assert caplog.messages == ["no checkpoint of step 8, because 2 wait: an upload"]
