"""The time at which SGLang's scheduler must have a request, so that it can be aborted."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.actors.serving.sglang.aborts import BEFORE_PAUSE_S, SETTLE_S, RequestIds, Watch

NEVER = float("inf")


@pytest.mark.parametrize(
    ("asked", "last_pause", "paused_since", "scheduled"),
    [
        (10.0, (NEVER, 0.0), NEVER, 10.0 + SETTLE_S),
        (10.0, (8.9, 9.0), NEVER, 10.0 + SETTLE_S),
        (10.0, (9.0, 12.0), NEVER, 12.0 + SETTLE_S),  # it arrived during a pause
        (10.0, (10.05, 12.0), NEVER, 12.0 + SETTLE_S),  # the pause may have come first
        (10.0, (10.1 + BEFORE_PAUSE_S, 14.0), NEVER, 10.0 + SETTLE_S),
        (10.0, (9.0, 12.0), 13.0, 12.0 + SETTLE_S),
        (10.0, (9.0, 12.0), 12.05, NEVER),  # another pause began before it can have reached the scheduler
        (10.0, (8.0, 9.0), 9.5, NEVER),
        (10.0, (8.0, 9.0), 10.05, NEVER),
        (10.0, (8.0, 9.0), 10.1 + BEFORE_PAUSE_S, 10.0 + SETTLE_S),
        (10.0, (19.9, 20.0), 20.05, 10.0 + SETTLE_S),  # repeated pauses: it reached the scheduler long ago
        (NEVER, (NEVER, 0.0), NEVER, NEVER),
    ],
)
def test_when_it_must_be_there(
    asked: float, last_pause: tuple[float, float], paused_since: float, scheduled: float
) -> None:
    updates: Any = SimpleNamespace(completed=0, pauses=SimpleNamespace(since_s=paused_since, last_s=last_pause))
    watch = Watch(RequestIds({"input_ids": [5]}, 1), updates)
    watch.sent_s = asked
    assert watch.scheduled_s() == scheduled
