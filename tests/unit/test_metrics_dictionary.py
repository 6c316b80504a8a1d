"""The dictionary of metrics is complete, and what is made of it: the page, HELP texts, rules, the board."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import yaml

from tests.metric_names import METRICS
from tidemill.actors.engines.activity import RolloutCounters
from tidemill.actors.serving.builtin.sequence import Counters
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.metrics import monitoring
from tidemill.launch.metrics.dictionary import as_json, described, groups, metrics, page
from tidemill.launch.metrics.prometheus import MOST_MEMBERS, RunState, exported_name, help_of
from tidemill.launch.run.run_facts import RunSettings
from tidemill.learner.algorithms.alarms import FLOAT32, THRESHOLDS


def test_the_page_is_made_of_the_dictionary() -> None:
    assert METRICS.read_text() == page(), "run: tidemill metrics --print dictionary > docs/metrics.md"


def test_every_metric_stands_once_with_a_meaning_and_a_source() -> None:
    names = [metric.name for group in groups() for row in group.rows for metric in row]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert all(metric.meaning and metric.source for metric in metrics().values())
    assert len(as_json()) == len(names) and json.dumps(as_json())


def test_every_counter_of_a_live_row_is_described() -> None:
    counted = {f"actor/{field.name}" for field in fields(RolloutCounters)}
    counted |= {f"engine/{field.name}" for field in fields(Counters)}
    assert {name for name in counted if name not in metrics()} == set()
    assert all(metrics()[name].counter for name in counted)


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("train/loss", "train/loss"),
        ("offpolicy/lag_share/3", "offpolicy/lag_share/<lag>"),
        ("eval/val/mean", "eval/mean"),
        ("eval/val/pass_at_4", "eval/pass_at_<k>"),
        ("data/reward/format", "data/reward/<part>"),
        ("train/nonsense", None),
        ("offpolicy/lag_share", None),
    ],
)
def test_a_name_in_a_record_is_found(name: str, known_as: str | None) -> None:
    metric = described(name)
    assert (metric and metric.name) == known_as


def test_the_healthy_band_of_a_metric_with_an_alarm_is_the_alarms() -> None:
    assert metrics()["offpolicy/weight_mean"].low == THRESHOLDS["weight_low"].warn
    assert metrics()["offpolicy/weight_mean"].high == THRESHOLDS["weight_high"].warn
    assert metrics()["offpolicy/lag_max"].high is None, "its bound is a setting"
    assert metrics()["train/truncated_share"].high == 0.05


def test_names_in_prometheus_are_unique_and_follow_its_conventions() -> None:
    names = [exported_name(metric) for metric in metrics().values()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in names if not re.fullmatch(r"tidemill(_[a-z0-9]+)+", name)] == []
    assert all(
        name.endswith("_total") is metric.counter for name, metric in zip(names, metrics().values(), strict=True)
    )
    assert exported_name(metrics()["engine/stall_s"]) == "tidemill_engine_stall_seconds_total"
    assert "`" not in help_of(metrics()["train/mfu"])


def test_hostile_names_are_bounded_and_one_line() -> None:
    row = LiveRow(role="actor", id="a\n" + "x" * 200, host="h", pid=1, phase="working", load={"failures": 1, "new": 2})
    values = {f"data/reward/{number}": 1.0 for number in range(2 * MOST_MEMBERS)} | {"unknown/name": 1.0}
    series = RunState(run="r", values=values, rows=[(row, 0.0), (row, 0.0)]).series().samples
    assert len(series["data/reward/<part>"]) == MOST_MEMBERS
    labels, _ = series["process/up"][0]
    assert len(labels["id"]) == 64 and "\n" not in labels["id"]
    assert len(series["process/up"]) == len(series["actor/failures"]) == 1, "two rows of one id would be one series"
    assert series["exporter/left_out"][0][1] == MOST_MEMBERS + 1 + 2 + 3


def test_the_thresholds_of_a_run_come_with_its_metrics() -> None:
    alarms = {"ignore": ["k3"], "thresholds": {"ess": [0.4, 0.2]}}
    config = {"staleness": {"max_lag": 3}, "learner": {"dtype": "float32", "algorithm": {"alarms": alarms}}}

    def thresholds(config: Mapping[str, Any]) -> dict[tuple[str, str], float]:
        series = RunState(run="r", settings=RunSettings(config)).series().samples.get("run/alarm_threshold", [])
        return {(labels["alarm"], labels["level"]): value for labels, value in series}

    found = thresholds(config)
    assert not [alarm for alarm, _ in found if alarm == "k3"]
    assert (found["ess", "warning"], found["ess", "critical"], found["lag", "critical"]) == (0.4, 0.2, 3)
    assert found["numerics", "critical"] == FLOAT32["numerics"][1]
    assert thresholds({}) == {}
    assert thresholds({"learner": {"algorithm": {"alarms": {"action": "off"}}}}) == {}
    train = {"staleness": {"max_lag": 3, "gate": "train"}}
    assert {alarm for alarm, _ in thresholds(train)} == THRESHOLDS.keys() - {"lag", "long_episodes"}


def test_each_alarm_has_its_rules_and_each_metric_its_panel() -> None:
    alerts = [rule["alert"] for group in yaml.safe_load(monitoring.rules())["groups"] for rule in group["rules"]]
    assert len(alerts) == len(set(alerts))
    for name in THRESHOLDS:
        assert f"Tidemill{''.join(word.capitalize() for word in name.split('_'))}Error" in alerts
    board = json.loads(monitoring.board())
    panels = [panel for row in board["panels"] for panel in (row, *row.get("panels", []))]
    assert {panel["title"] for panel in panels if panel["type"] == "timeseries"} == set(metrics())
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
