"""Names, parts and headers: the functions that need no server."""

import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bus_kit import join, make_sample
from tests.refusals import refusal
from tidemill.bus.client.jetstream import parse_headers, unix_time
from tidemill.bus.client.outbox import answered
from tidemill.bus.errors import BusUnavailable, WireError
from tidemill.bus.streams.samples import header_fields, headers_of
from tidemill.bus.wire import codec, subjects
from tidemill.bus.wire.messages import Span

ROOT = Path(__file__).parents[2]
ROOMS = ("weightstore", "rewards", "actors", "learner", "launch")
CLIENT = r"""\.nc\b|[a-z_)\]]\.js\b(?![`"])|\.jet\.connection\b"""
"""Attributes that are clients of NATS; ``app.js`` is a file."""


@pytest.mark.parametrize("run", ["a", "Run_7-b", "x" * 64])
def test_a_good_run_id_passes(run: str) -> None:
    assert subjects.check_run(run) == run


@pytest.mark.parametrize("run", ["", "a.b", "a b", "a*", "a>", "x" * 65, "ä", "a\n"])
def test_a_bad_run_id_is_refused(run: str) -> None:
    with refusal(ValueError, place="run"):
        subjects.check_run(run)


def test_no_subject_and_no_client_of_the_bus_is_spelled_elsewhere() -> None:
    own = ROOT / "bus/wire/subjects.py"
    texts = {path: path.read_text() for room in (*ROOMS, "bus") for path in (ROOT / room).rglob("*.py") if path != own}
    assert len(texts) > 100
    assert [str(path) for path, text in texts.items() if re.search(r"""["']tm\.""", text)] == []
    outside = {path: text for path, text in texts.items() if not path.is_relative_to(ROOT / "bus")}
    assert [str(path) for path, text in outside.items() if re.search(CLIENT, text)] == []


def test_the_subjects_of_a_sample_fit_each_other() -> None:
    sample = subjects.sample("r", "train", 3, "a.1")
    manifest = subjects.manifest(sample)
    assert (sample, manifest) == ("tm.r.sample.train.3.a_1", "tm.r.sample.train.3.a_1.parts")
    for subject in (sample, manifest):
        assert subjects.is_sample("r", subject)
        assert not subjects.is_sample("other", subject)
        assert (subjects.kind_of_sample(subject), subjects.version_of_sample(subject)) == ("train", 3)
        assert subjects.sample_in("other", subject) == "tm.other.sample.train.3.a_1"
    assert not subjects.is_sample("r", subjects.part("r", "train", 1))
    assert subjects.version_of_sample(subjects.sample("r", "train", -1, "a")) is None
    assert subjects.version_of_sample("tm.r.sample") is None
    assert (subjects.samples("r"), subjects.samples("r", "train", 3)) == ("tm.r.sample.>", "tm.r.sample.train.3.>")
    assert subjects.manifest(subjects.samples_of("r", "*")) == "tm.r.sample.*.*.*.parts"


@given(st.text())
def test_any_text_becomes_one_token(text: str) -> None:
    token = subjects.token(text)
    assert token
    assert not set(token) & set(" .*>\r\n\t")


@given(st.binary(min_size=1, max_size=9000), st.integers(1100, 3000))
def test_parts_join_to_what_was_cut(data: bytes, max_payload: int) -> None:
    pieces = list(codec.cut(data, max_payload))
    assert all(codec.fits(piece, max_payload) for piece in pieces)
    manifest = codec.read_manifest(
        codec.describe(data, range(1, len(pieces) + 1)), seq=len(pieces) + 1, max_payload=max_payload
    )
    assert join(manifest, pieces) == data


def test_parts_of_another_message_are_refused() -> None:
    manifest = codec.read_manifest(codec.describe(b"abcdef", [1, 2]), seq=3, max_payload=1028)
    with refusal(WireError, field="parts.length"):
        join(manifest, [b"abc", b"de"])
    with refusal(WireError, field="parts.sha256"):
        join(manifest, [b"abc", b"deX"])
    with refusal(WireError, field="parts.length", got="7 or more"):
        join(manifest, [b"abc", b"defg"])


@pytest.mark.parametrize(
    ("length", "seqs", "field"),
    [
        (0, [1], "length"),
        (-1, [1], "length"),
        (codec.MAX_SAMPLE_BYTES + 1, [1, 2, 3, 4, 5, 6, 7, 8, 9], "length"),
        (2**63, [1], "length"),
        (10_000_000, [], "seqs"),
        (10_000_000, [5] * 2, "seqs"),
        (10_000_000, [5, 100], "seqs"),  # not before the manifest in the stream
        (10_000_000, [0, 5], "seqs"),
        (10_000_000, [-5, 2**62], "seqs"),
        (1000, list(range(1, 18)), "seqs"),
        (10_000_000, list(range(1, 80)), "seqs"),
    ],
)
def test_a_manifest_that_no_sample_has_is_refused(length: int, seqs: list[int], field: str) -> None:
    data = msgpack.packb({"schema": 1, "type": "parts", "seqs": seqs, "length": length, "sha256": "0" * 64})
    with refusal(WireError, field=f"parts.{field}"):
        codec.read_manifest(data, seq=100, max_payload=1 << 20)


def test_the_largest_sample_has_room_in_its_manifest() -> None:
    for max_payload in (1 << 20, 8 << 20):
        pieces = list(codec.cut(bytes(codec.MAX_SAMPLE_BYTES), max_payload))
        data = codec.describe(bytes(codec.MAX_SAMPLE_BYTES), range(1, len(pieces) + 1))
        assert len(codec.read_manifest(data, seq=100, max_payload=max_payload).seqs) == len(pieces)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "²", "٣", "9" * 19, "9" * 5000, " 1", "1_000"])
def test_text_that_is_no_number_names_none(text: str) -> None:
    assert subjects.natural(text) is None


def test_numbers_of_tokens_and_headers_are_read() -> None:
    assert [subjects.natural(text) for text in ("0", "007", str(2**63 - 1))] == [0, 7, 2**63 - 1]


ODD_NUMBERS = [
    f"$JS.ACK.s.c.1.{text}.3.4.5" for text in ("", "+2", " 2", "1_0", "\u0662", "-2", str(2**63), "9" * 5000, "2.2")
]


def test_the_place_of_a_message_is_read_from_its_acknowledgement_subject() -> None:
    numbers = subjects.Delivery(deliveries=2, seq=30, consumer_seq=4, stored_ns=50, pending=6)
    assert subjects.delivery("$JS.ACK.TM_r_TASKS.rollout.2.30.4.50.6") == numbers
    assert subjects.delivery("$JS.ACK.hub.acc.TM_r_TASKS.rollout.2.30.4.50.6.tok") == numbers
    for other in ("", "_INBOX.x", "$JS.ACK", "$JS.ACK.s.c.1.2.3.4", "$JS.ACK.s.c.1.x.3.4.5", *ODD_NUMBERS):
        assert subjects.delivery(other) is None


def test_headers_have_the_summary_of_a_sample() -> None:
    sample = make_sample(
        task=12, index=3, spans=(Span(version=4, num_tokens=6), Span(version=5, num_tokens=2)), reward={"score": 0.25}
    )
    assert headers_of(sample) == {
        "Nats-Msg-Id": "12.3.a0",
        "Tm-Sample": "group=8 versions=4-5 reward=0.25 status=completed tokens=8",
    }
    fields = header_fields(headers_of(make_sample(task=12, index=3, length=0, engine="http://e?a=b")))
    assert (fields["task"], fields["index"], fields["versions"], fields["engine"]) == (
        "12",
        "3",
        "none",
        "http://e?a=b",
    )
    assert header_fields({"Nats-Msg-Id": "odd", "Tm-Sample": "what group=2"}) == {
        "task": "odd",
        "index": "",
        "group": "2",
    }


def test_header_lines_are_read() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: 1\r\nB:two: three\r\n\r\n") == {"A": "1", "B": "two: three"}
    assert parse_headers(b"") == {}


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T00:00:01.5Z", 1.5),
        ("1970-01-01T00:00:01.123456789Z", 1.123456789),
        ("1970-01-01T02:00:01.25+02:00", 1.25),
    ],
)
def test_time_stamps_of_the_server(stamp: str, seconds: float) -> None:
    assert unix_time(stamp) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("tidemill.bus.wire.messages", ("nats", "torch")),
        ("tidemill.bus.config", ("nats", "torch", "numpy", "msgpack")),
        ("tidemill.bus.errors", ("nats", "torch", "numpy", "msgpack")),
        ("tidemill.bus.wire.codec", ("nats", "torch")),
        ("tidemill.bus.streams.bus", ("torch",)),
        ("tidemill.bus.liveness", ("torch",)),
        ("tidemill.bus.server.nats_server", ("nats", "torch")),
    ],
)
def test_what_an_import_brings_along(module: str, banned: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {banned!r} if name in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize("data", [b"", b"junk", b"[1]", b"3", b"[" * 100_000, b"\xff"])
def test_an_answer_that_the_server_cannot_have_given_is_no_answer(data: bytes) -> None:
    with refusal(BusUnavailable, where="STREAM.INFO.x"):
        answered("STREAM.INFO.x", data)
