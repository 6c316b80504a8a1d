"""Unreadable messages are counted once, logged rarely, and use bounded memory; rows agree with their keys."""

import dataclasses
import json
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.bus.client.jetstream import Refusals
from tidemill.bus.errors import UnreadableRow, WireError
from tidemill.bus.wire.row_reader import MAX_ROW_BYTES, json_map, read_row
from tidemill.bus.wire.rows import LiveRow, VersionRow

LIVE = json.loads(
    json.dumps(
        dataclasses.asdict(
            LiveRow(role="engine", id="e", host="h", pid=1, phase="serving", load={"running": 2, "released": True})
        )
    )
)
"""A live row as JSON has it: a list for every tuple."""
VERSION = VersionRow(version=3, step=2, epoch=1).stored()


def bad() -> int:
    raise WireError("task", "an integer", "x")


def test_each_message_is_counted_once_and_each_place_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    assert str(refusals) == "" and refusals.read("DEAD", 1, lambda: 5) == 5
    with caplog.at_level(logging.WARNING):
        for seq in (17, 18, 17):
            assert refusals.read("DEAD", seq, bad) is None
        refusals.refuse("live", "engine.e (revision 4)", "of \x1b[31mno\nuse")
    assert str(refusals) == "3 unreadable messages (DEAD 2, live 1), newest: live engine.e (revision 4): of ?[31mno?use"
    assert [record.getMessage() for record in caplog.records] == [
        "unreadable in DEAD, passed over: DEAD 17: task: want an integer, got 'x'",
        "unreadable in live, passed over: live engine.e (revision 4): of ?[31mno?use",
    ]


def test_memory_is_bounded() -> None:
    refusals = Refusals()
    for seq in range(20_000):
        refusals.refuse("SAMPLES", seq, "x" * 100_000 if seq % 1000 == 0 else "x")
    assert refusals.counts == {"SAMPLES": 20_000}
    assert len(refusals._known) <= 4096 and len(str(refusals)) < 300


@pytest.mark.parametrize(
    ("bucket", "key", "row"),
    [
        ("live", "engine.e", LIVE),
        ("live", "engine.e", LIVE | {"load": {}, "something": [1]}),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": 1024, "something": [1]}}),
        (
            "live",
            "engine.e",
            {name: item for name, item in LIVE.items() if name not in ("capabilities", "taking_memory")},
        ),
        ("weights", "v.3", VERSION),
        ("weights", "v.3", VERSION | {"delta": "", "base": -1}),  # as earlier releases wrote it
        ("weights", "v.3", VERSION | {"afters": [5, 8]}),  # of a run with two streams of samples
        ("weights", "head", VERSION | {"fence": 1}),
        ("weights", "head", {"fence": 1}),
        ("weights", "turn", {"whose": "learner", "epoch": 1}),
        ("wanted", "all", {"engine": 2}),
        ("run", "cursor.me", {"created": "now", "floor": 3, "policy": "wait", "owner": "me", "given_up": False}),
        ("run", "checkpoint", {"directory": "d", "step": 3, "epoch": 1, "chain": "c", "manifest": "m"}),
        ("run", "checkpoint", {"directory": "d", "step": 3}),  # as earlier releases wrote it
        ("run", "holder.1", {"node": 1, "url": "u", "held": {"step-3-epoch-1": ["f"]}, "host": "h", "trouble": ""}),
        ("run", "config", {"model": {"path": "m"}, "prepare": None}),
        ("run", "another", {"anything": [1]}),
    ],
)
def test_rows_as_they_are_written_are_read(bucket: str, key: str, row: dict[str, Any]) -> None:
    assert read_row(bucket, key, json.dumps(row).encode()) == row


@pytest.mark.parametrize(
    ("bucket", "key", "row", "field"),
    [
        ("live", "engine.e", LIVE | {"load": {"running": "2"}}, "load"),
        ("live", "engine.e", LIVE | {"load": {"running": float("nan")}}, "load"),
        ("live", "engine.e", LIVE | {"load": {"running": 10**400}}, "load"),
        ("live", "engine.e", LIVE | {"load": [1]}, "load"),
        ("live", "engine.e", LIVE | {"capabilities": [1]}, "capabilities"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": 0}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": -3}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": 1025}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": 2**62}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": 2.0}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"ranks": True}}, "capabilities.ranks"),
        ("live", "engine.e", LIVE | {"capabilities": {"colocated": 1.0}}, "capabilities.colocated"),
        ("live", "engine.e", LIVE | {"taking_memory": 1.0}, "taking_memory"),
        ("live", "engine.e", LIVE | {"version": 2**63}, "version"),
        ("live", "engine.e", LIVE | {"version": True}, "version"),
        ("live", "engine.e", LIVE | {"phase": "\ud800"}, "phase"),
        ("live", "engine.e", {"role": "engine"}, "id"),
        ("weights", "v.3", VERSION | {"step": 1.5}, "step"),
        ("weights", "head", {"version": 3}, "step"),
        ("weights", "head", VERSION | {"fence": "1"}, "fence"),
        ("weights", "want", {}, "version"),
        ("run", "epoch", {"epoch": -1}, "epoch"),
        ("run", "epoch", {"epoch": None}, "epoch"),
        ("run", "task_floor", {"floor": "1"}, "floor"),
        ("run", "cursor.me", {"created": "now", "floor": -3}, "floor"),
        ("run", "holder.1", {"node": -1, "url": "u", "held": {}}, "node"),
        ("run", "holder.1", {"node": 1, "url": "u", "held": {"a": "f"}}, "held"),
        ("run", "holder.1", {"node": 1, "url": "u"}, "held"),
        ("run", "config", {"model": "m"}, "model"),
        ("wanted", "host.h", {"actor": []}, "actor"),
    ],
)
def test_rows_of_other_types_are_refused_by_field(bucket: str, key: str, row: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as caught:
        read_row(bucket, key, json.dumps(row).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[1]",
        b"1",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"epoch":' + b"9" * 5000 + b"}",
        b'"%b"' % (b"x" * MAX_ROW_BYTES),
    ],
)
def test_what_is_no_row_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read_row("run", "epoch", data)


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_bytes_are_a_row_or_a_wire_error(data: bytes) -> None:
    try:
        assert isinstance(json_map(data), dict)
    except WireError as error:
        assert len(str(error)) < 500


def test_an_unreadable_row_names_its_place_and_the_cure() -> None:
    error = pickle.loads(pickle.dumps(UnreadableRow("weights.head", "step: an integer >= 0", "nothing", 812)))
    assert isinstance(error, WireError)
    cure = "store a readable row in its place (docs/recovery.md)"
    assert str(error) == f"row weights.head, revision 812: want step: an integer >= 0, got 'nothing'; cure: {cure}"
