"""Names, parts and headers: what needs no server."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import parts, subjects
from bus.errors import WireError
from bus.jetstream import parse_headers, unix_time
from bus.messages import Span
from bus.samples import headers_of, told_by
from tests.bus_kit import make_sample


@pytest.mark.parametrize("run", ["a", "Run_7-b", "x" * 64])
def test_a_good_run_id_passes(run: str) -> None:
    assert subjects.check_run(run) == run


@pytest.mark.parametrize("run", ["", "a.b", "a b", "a*", "a>", "x" * 65, "ä", "a\n"])
def test_a_bad_run_id_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match="run: want 1 to 64 of"):
        subjects.check_run(run)


@given(st.text())
def test_any_text_becomes_one_token(text: str) -> None:
    token = subjects.token(text)
    assert token
    assert not set(token) & set(" .*>\r\n\t")


@given(st.binary(max_size=9000), st.integers(1100, 3000))
def test_parts_join_to_what_was_cut(data: bytes, max_payload: int) -> None:
    pieces = list(parts.cut(data, max_payload))
    assert all(parts.fits(piece, max_payload) for piece in pieces)
    manifest = parts.read_manifest(parts.describe(data, range(1, len(pieces) + 1)))
    assert parts.join(manifest, pieces) == data


def test_parts_of_another_message_are_refused() -> None:
    manifest = parts.read_manifest(parts.describe(b"abcdef", [1, 2]))
    with pytest.raises(WireError, match=r"parts.length"):
        parts.join(manifest, [b"abc", b"de"])
    with pytest.raises(WireError, match=r"parts.sha256"):
        parts.join(manifest, [b"abc", b"deX"])


def test_headers_tell_an_onlooker_what_it_wants() -> None:
    sample = make_sample(task=12, index=3, spans=(Span(version=4, num_tokens=6), Span(version=5, num_tokens=2)), reward={"score": 0.25})
    assert headers_of(sample) == {
        "Nats-Msg-Id": "12.3.a0",
        "Tm-Sample": "group=8 versions=4-5 reward=0.25 status=completed tokens=8",
    }
    told = told_by(headers_of(make_sample(task=12, index=3, length=0, engine="http://e?a=b")))
    assert (told["task"], told["index"], told["versions"], told["engine"]) == ("12", "3", "none", "http://e?a=b")
    assert told_by({"Nats-Msg-Id": "odd", "Tm-Sample": "what group=2"}) == {"task": "odd", "index": "", "group": "2"}


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
        ("bus.messages", ("nats", "torch")),
        ("bus.config", ("nats", "torch", "numpy", "msgpack")),
        ("bus.errors", ("nats", "torch", "numpy", "msgpack")),
        ("bus.codec", ("nats", "torch")),
        ("bus.connection", ("torch",)),
        ("bus.live", ("torch",)),
        ("bus.server", ("nats", "torch")),
    ],
)
def test_what_an_import_brings_along(module: str, banned: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {banned!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
