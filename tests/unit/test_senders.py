"""Rules that refuse actors or slow the learner down: counts only, without a bus."""

import logging

import pytest

from tidemill.learner.buffer.failures import INVALID_IN_A_ROW, MAX_ACTORS, SLOW_S, Senders


def spoil(senders: Senders, actor: str, count: int) -> None:
    for _ in range(count):
        senders.invalid(actor, "reward: want finite, got nan")


def test_an_actor_is_refused_after_so_many_invalid_samples_in_a_row() -> None:
    senders = Senders()
    for _ in range(3):
        spoil(senders, "a", INVALID_IN_A_ROW - 1)
        senders.usable("a")
    assert not senders.refused
    spoil(senders, "a", INVALID_IN_A_ROW)
    assert senders.refused == {"a"}
    senders.usable("b")
    assert senders.refused == {"a"}, "another's samples say nothing of it"
    senders.usable("a")
    assert not senders.refused


def test_tasks_are_issued_slowly_while_no_usable_sample_arrives() -> None:
    senders = Senders()
    for actor in range(INVALID_IN_A_ROW):
        assert senders.pause_s == 0
        spoil(senders, f"a-{actor}", 1)
    assert senders.pause_s == SLOW_S
    senders.usable("b")
    assert senders.pause_s == 0


def test_a_flood_of_names_takes_bounded_memory_and_hides_no_actor(caplog: pytest.LogCaptureFixture) -> None:
    senders = Senders()
    spoil(senders, "broken", INVALID_IN_A_ROW - 1)
    for number in range(10 * MAX_ACTORS):
        spoil(senders, f"nobody-{number}", 1)
    assert len(senders.invalid_streaks) == MAX_ACTORS
    assert len(caplog.records) < 100
    spoil(senders, "broken", 1)
    assert senders.refused == {"broken"}


def test_the_log_has_a_line_for_every_doubling(caplog: pytest.LogCaptureFixture) -> None:
    senders = Senders()
    for _ in range(50):
        spoil(senders, "a", 1)
        senders.usable("a")
    assert [record.args[1] for record in caplog.records if record.levelno == logging.WARNING] == [1, 2, 4, 8, 16, 32]  # type: ignore[index]


def test_the_live_row_has_what_is_not_zero() -> None:
    senders = Senders(("late",))
    assert senders.load({"reward": 2}, {"a": 2}) == {"invalid/reward": 2, "invalid_of/a": 2, "refused/late": 1}
    assert Senders().load({}, {}) == {}
