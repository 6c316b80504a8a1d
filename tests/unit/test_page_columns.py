"""Columns of a page's metrics and their reduction, texts made safe, and the lanes of processes."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.page.columns import MetricColumns, all_rounded, reduced
from tidemill.launch.page.lanes import DOWN, UPDATING, WORKING, Lanes
from tidemill.launch.page.texts import cut, made_safe, safe, to_json

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)), max_size=400)


@given(values=VALUES, buckets=st.integers(1, 40), first=st.integers(1, 9))
def test_a_reduced_column_keeps_extremes_order_and_gaps(values: list[float | None], buckets: int, first: int) -> None:
    column = np.array([math.nan if value is None else value for value in values], np.float32)
    points = reduced(column, first, buckets)
    steps = [int(step or 0) for step, _ in points]
    assert steps == sorted(set(steps))
    known = column[~np.isnan(column)]
    assert bool(points) == bool(len(known))
    for step, value in points:
        stored = column[int(step or 0) - first]
        assert (value is None) == bool(np.isnan(stored))
        assert value is None or math.isclose(value, float(stored), rel_tol=1e-6, abs_tol=1e-6)
    if len(known):
        kept = [value for _, value in points if value is not None]
        assert math.isclose(max(kept), float(known.max()), rel_tol=1e-6, abs_tol=1e-6)
        assert math.isclose(min(kept), float(known.min()), rel_tol=1e-6, abs_tol=1e-6)
        assert len(points) <= max(2 * buckets, 1)


def test_a_spike_survives_and_a_bucket_without_values_breaks_the_line() -> None:
    column = np.zeros(10_000, np.float32)
    column[4321], column[6000:6500] = 9.0, math.nan
    points = dict(map(tuple, reduced(column, 1, 100)))  # type: ignore[arg-type]
    assert points[4322] == 9.0 and None in points.values() and len(points) <= 200


@given(st.lists(st.floats(width=32), max_size=9))
def test_numbers_of_a_column_have_the_digits_of_float32(values: list[float]) -> None:
    numbers = all_rounded(np.array(values, np.float32))
    assert [number is None for number in numbers] == [not math.isfinite(value) for value in values]
    for value, number in zip(values, numbers, strict=True):
        if number is not None:
            assert math.isclose(number, value, rel_tol=5.1e-7)
            assert number == float(f"{number:.7g}") or not 1e-15 < abs(number) < 1e7


def test_names_with_an_asterisk_are_beginnings() -> None:
    columns = MetricColumns()
    columns.add(1, {"eval/a": 1.0, "eval/b": 1.0, "evaluated": 1.0, "loss": 1.0}, 1.0)
    assert columns.choose(["loss", "eval/*", "none", "loss", "none/*"]) == ["loss", "eval/a", "eval/b", "none"]


def test_a_step_recorded_again_replaces_all_its_values() -> None:
    columns = MetricColumns()
    columns.add(3, {"a": 1.0, "b": math.inf}, 10.0)
    columns.add(200, {"a": 2.0}, 11.0)
    columns.add(3, {"b": 5.0}, 12.0)
    columns.add(1, {"a": 7.0}, 13.0)
    columns.add(1 << 40, {"a": 7.0}, 13.0)
    assert (columns.first, columns.last) == (3, 200), "neither before the first, nor where no run has a step"
    assert columns.at(3) == {"b": 5.0}
    assert columns.points("a") == [[200, 2.0]]
    assert columns.times_s(3, 3)[0] == 12.0


UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"


@given(st.text(st.characters(codec=None), max_size=200), st.integers(0, 50), st.integers(1, 50))
def test_safe_text_has_no_control_and_pieces_join(text: str, start: int, size: int) -> None:
    assert not re.search(UNSAFE, safe(text))
    assert safe(safe(text)) == safe(text)
    piece, left = cut(text, start, size)
    assert piece + cut(text, start + size, max(1, left))[0] == safe(text[start:])
    to_json(made_safe({text: [text, {"a": text}]}))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_has_no_number_that_is_not_finite(number: float) -> None:
    assert to_json({"a": [number]}) == b'{"a":[null]}'


def row(**changes: object) -> LiveRow:
    values = {"role": "engine", "id": "e1", "host": "h", "pid": 1, "phase": "serving", "version": 1}
    return LiveRow(**(values | changes))  # type: ignore[arg-type]


def test_lanes_have_a_segment_for_each_phase_and_version_and_a_gap_when_a_process_is_gone() -> None:
    lanes = Lanes()
    lanes.note([(row(load={"tokens_generated": 0.0}), 0.0)], 100.0)
    lanes.note([(row(load={"tokens_generated": 500.0}), 0.0)], 105.0)
    lanes.note([(row(version=2), 0.0)], 106.0)
    lanes.note([(row(version=2, phase="catching up", pid=2), 0.0)], 107.0)
    lanes.note([(row(version=2, phase="catching up", pid=2), 30.0)], 140.0)
    lanes.note([], 150.0)
    segments = lanes.segments()
    assert [(each["phase"], each["version"]) for each in segments] == [
        (WORKING, 1),
        (WORKING, 2),
        (UPDATING, 2),
        (DOWN, 2),
    ]
    assert [each["end_s"] for each in segments] == [106.0, 107.0, 110.0, None], "down since its last heartbeat"
    assert lanes.lanes["engine e1"].restarts == 1
    assert len(lanes.segments(begin_s=108.0)) == 2 and lanes.changed() and not lanes.changed()
    lanes.note([], 100.0 + 2 * 3600)
    assert lanes.segments() == []
