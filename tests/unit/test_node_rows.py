"""Rows of node agents: round trip and refusals; silences; the agreement of nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.row_reader import read_row
from tidemill.bus.wire.rows import Attempt, NodeRow, Phase, State
from tidemill.learner.errors import NodeRefused
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.nodes.rendezvous import refuse_public, refuse_unlike
from tidemill.learner.nodes.rows import GRACE_S, Silences, attempt_of, cut, node_of, row_value

KEY = FeedKeys.new().feeder_public
ROW = NodeRow(
    node=1,
    nodes=2,
    nonce="0123456789ab",
    phase=Phase.RUNNING,
    agent="a" * 12,
    host="h",
    address="10.0.0.2",
    place="boot pid",
    key=KEY,
    versions={"torch": "2"},
    devices=("GPU-1", "GPU-2"),
    reason="r",
    probe_port=4321,
    reached={"1" * 12: "refused", "2" * 12: ""},
)
ATTEMPT = Attempt(
    epoch=3,
    nonces=("0" * 12, "1" * 12),
    ranks=(2, 2),
    master="10.0.0.1:4000",
    feeder="tcp://10.0.0.1:4001",
    feeder_key=KEY,
    state=State.ENDING,
    reason="r",
)


def stored(key: str, value: JsonObject) -> JsonObject:
    """Return a row as it is read from the bus."""
    import json

    return read_row("run", key, json.dumps(value).encode())


def test_rows_come_back_as_they_were_written() -> None:
    assert node_of("node.1", stored("node.1", row_value(ROW))) == ROW
    assert attempt_of(stored("attempt", row_value(ATTEMPT))) == ATTEMPT
    assert node_of("node.1", stored("node.1", row_value(ROW) | {"a field of tomorrow": {"x": 1}})) == ROW
    assert ATTEMPT.first_rank(1) == 2 and ATTEMPT.first_rank(0) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"node": 0},
        {"node": -1},
        {"nodes": 1},
        {"nodes": 10**9},
        {"node": True},
        {"nonce": "x"},
        {"nonce": None},
        {"phase": "asleep"},
        {"key": "short"},
        {"versions": {"torch": 2}},
        {"devices": "GPU-1"},
        {"pid": -1},
        {"probe_port": 65_536},
        {"reached": {"1" * 12: 7}},
        {"reached": {"1" * 12: "x" * 5_000}},
        {"reached": {str(number): "" for number in range(2_000)}},
        {"reason": "x" * 5_000},
    ],
)
def test_a_node_row_that_does_not_fit_is_refused(change: JsonObject) -> None:
    with pytest.raises(WireError):
        node_of("node.1", stored("node.1", row_value(ROW) | change))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"nonces": []},
        {"nonces": ["0" * 12, "0" * 12]},
        {"nonces": ["0" * 12, "../../../etc"]},
        {"ranks": [2]},
        {"ranks": [2, 0]},
        {"ranks": [2, 10**9]},
        {"ranks": [True, 2]},
        {"master": "4000"},
        {"master": "h:70000"},
        {"master": ":1"},
        {"feeder": "ipc:///tmp/x"},
        {"feeder_key": ""},
        {"state": "happy"},
        {"exit_code": "78"},
    ],
)
def test_an_attempt_that_does_not_fit_is_refused(change: JsonObject) -> None:
    with pytest.raises(WireError):
        attempt_of(stored("attempt", row_value(ATTEMPT) | change))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=50),
    lambda one: st.lists(one, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(row_value(ATTEMPT))), st.sampled_from(sorted(row_value(ROW))), _json)
def test_any_value_of_a_field_is_read_or_refused(of_attempt: str, of_node: str, value: object) -> None:
    for read in (
        lambda: attempt_of(stored("attempt", row_value(ATTEMPT) | {of_attempt: value})),
        lambda: node_of("node.1", stored("node.1", row_value(ROW) | {of_node: value})),
    ):
        try:
            read()
        except WireError:
            continue


def test_a_reason_is_bounded_and_printable() -> None:
    assert cut("a\x1b[31m\nb" + "x" * 9_000).startswith("a?[31m\nb") and len(cut("x" * 9_000)) == 2_000


def test_silence_counts_between_readings_and_not_while_the_bus_is_away() -> None:
    silences = Silences()
    assert silences.read({0: 1, 1: 1}, 0.0) == {0: 0.0, 1: 0.0}
    assert silences.read({0: 2, 1: 1}, 10.0) == {0: 0.0, 1: 10.0}
    silences.lost(11.0)
    assert silences.read({0: 2, 1: 1}, 500.0) == {0: 0.0, 1: 10.0}
    assert silences.read({0: 2, 1: 1}, 500.0 + GRACE_S) == {0: 0.0, 1: 10.0}
    assert silences.read({0: 2, 1: 1}, 510.0) == {0: 5.0, 1: 15.0}
    assert silences.read({0: 2, 1: 9}, 520.0) == {0: 15.0, 1: 0.0}
    assert silences.read({1: 9}, 530.0) == {1: 10.0}


LEADER = replace(ROW, node=0, nonce="f" * 12, address="10.0.0.1", place="other boot")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"versions": {"torch": "3"}}, r"node 1 \(h\): want torch 2, as node 0 \(h\), got 3"),
        ({"versions": {}}, "want torch 2"),
        (
            {"versions": {"torch": "2", "NCCL": "2.29.7"}},
            r"node 1 \(h\): want NCCL none, as node 0 \(h\), got 2\.29\.7; cure: install the same",
        ),
        ({"nodes": 3}, "--nodes 2, as node 0"),
        ({"devices": ()}, "devices, as node 0"),
        ({"devices": (), "versions": {}}, "devices, as node 0"),
        ({"address": "127.0.0.1"}, "an address that the other nodes reach, got 127.0.0.1"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(change: dict[str, object], why: str) -> None:
    refuse_unlike([LEADER, ROW])
    with pytest.raises(NodeRefused, match=why):
        refuse_unlike([LEADER, replace(ROW, **change)])  # type: ignore[arg-type]


def test_two_agents_of_one_machine_may_use_its_loopback() -> None:
    refuse_unlike([replace(LEADER, address="127.0.0.1", place="p"), replace(ROW, address="127.0.0.1", place="p")])


def test_public_addresses_are_refused_unless_allowed() -> None:
    for private in ("10.1.2.3", "192.168.0.1", "127.0.0.1", "fd00::1", "[fe80::1]", "learner-0.pods"):
        refuse_public(private, insecure=False)
    for public in ("8.8.8.8", "2001:4860:4860::8888", "[2001:4860:4860::8888]"):
        with refusal(NodeRefused, where="learner: address of this node"):
            refuse_public(public, insecure=False)
        refuse_public(public, insecure=True)
