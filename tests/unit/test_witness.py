"""Verification of an engine's address, without sockets: errors by nonce, which calls count, and the text for them."""

from tidemill.actors.engines.address_checks import (
    CHECK_EVERY_S,
    LOOK_EVERY_S,
    MAX_MISSES,
    _Called,
    unreachable,
    verified,
)
from tidemill.bus.wire.rows import LiveRow


def row(role: str, **reached: str) -> LiveRow:
    return LiveRow(role=role, id=f"{role}-0", host="h", pid=1, phase="working", reached=reached)


def test_an_engine_is_verified_by_one_process_and_unreachable_from_others() -> None:
    rows = [row("learner", abc=""), row("router", abc="no route", other="refused"), row("actor")]
    assert verified("abc", rows)
    assert unreachable("abc", rows) == ["unreachable from router router-0: no route"]
    assert not verified("other", rows)
    assert not verified("new", rows)
    assert unreachable("new", rows) == []
    assert unreachable("", [row("learner", **{"": "no nonce"})]) == [], (
        "of an engine that answers with none, as before this release"
    )


def test_the_first_failure_counts_and_a_busy_engine_may_miss_a_call() -> None:
    called = _Called()
    called.note("refused", 0.0)
    assert (called.error, called.due_s) == ("refused", LOOK_EVERY_S)
    called.note("", 1.0)
    assert (called.error, called.due_s) == ("", 1.0 + CHECK_EVERY_S)
    for _ in range(MAX_MISSES - 1):
        called.note("silent", 2.0)
        assert called.error == ""
    called.note("silent", 3.0)
    assert called.error == "silent"
    called.note("", 4.0)
    assert called.error == ""
