"""Files for monitoring, made of the dictionary and of the table of alarms: rules of Prometheus, a board of Grafana."""

import json
from collections.abc import Iterator, Mapping

import yaml

from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.metrics.dictionary import Metric, groups, metrics
from tidemill.launch.metrics.prometheus import exported_name, help_of
from tidemill.learner.algorithms.alarms import MIN_GAP, MIN_SPREAD, MIN_TOKENS, THRESHOLDS, Threshold

FOR = "1m"  # Time for which a condition must hold
_LEVELS = {"warn": "warning", "error": "critical"}
_NO_STATISTICS = ("lag", "skipped", "long_episodes")  # Alarms that are checked in steps of few tokens, too

# A finished run has no processes, and an embedded bus has ended with it.
_NOT_ENDED = " unless on(run) tidemill_run_ended == 1"
# Alarms of a run that no step reports: condition, time, sentence, cure.
_OF_THE_RUN: Mapping[str, tuple[str, str, str, str]] = {
    "exporter_away": ("absent(tidemill_bus_up)", "2m", "no metrics are scraped", "start tidemill metrics prometheus"),
    "bus_away": (
        f"tidemill_bus_up == 0{_NOT_ENDED}",
        "1m",
        "the bus does not answer",
        "tidemill status; docs/recovery.md",
    ),
    "bus_full": ("tidemill_bus_full == 1", "1m", "the bus stores nothing: its disk is full", "free space on its disk"),
    "samples_full": (
        'tidemill_bus_stream_bytes / (tidemill_bus_stream_bytes_limit{stream=~"SAMPLES.*"} > 0) > 0.85',
        "1m",
        "SAMPLES is nearly full: history is given up, then publishers wait",
        "checkpoint more often, or raise bus.samples_max_bytes",
    ),
    "process_silent": (
        f"tidemill_process_up == 0{_NOT_ENDED}",
        "1m",
        "{{ $labels.role }} {{ $labels.id }} sends no heartbeats",
        "tidemill status",
    ),
    "process_trouble": (
        f"tidemill_process_trouble == 1{_NOT_ENDED}",
        "5m",
        "{{ $labels.role }} {{ $labels.id }} reports repeated failures",
        "tidemill status has the words",
    ),
    "no_step": (
        # `changes` of a range of few samples is 0: the series must have begun before the range, and go on.
        "changes(tidemill_run_step[30m]) == 0 and tidemill_run_step offset 30m >= 0 and tidemill_run_step >= 0"
        + _NOT_ENDED,
        "5m",
        "no step was done in 30 minutes",
        "tidemill status names what the processes wait for",
    ),
}


def rules() -> str:
    """Return the rules as YAML: each alarm at both levels, and conditions of the run."""
    alarms = [rule for name, row in THRESHOLDS.items() for rule in _rules_of(name, row)]
    conditions = [
        _rule(name, expression, "critical", summary, cure, wait=wait)
        for name, (expression, wait, summary, cure) in _OF_THE_RUN.items()
    ]
    document = {"groups": [{"name": "tidemill_alarms", "rules": alarms}, {"name": "tidemill_run", "rules": conditions}]}
    head = "# Made by `tidemill metrics --print rules` from the table of alarms (docs/metrics.md).\n"
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=200)


def _rules_of(name: str, row: Threshold) -> Iterator[JsonObject]:
    metric = exported_name(metrics()[row.metric])
    value = f"abs({metric})" if name == "entropy_gap" else metric
    scale = " * on(run) (1 + tidemill_offpolicy_lag_mean)" if row.ages else ""
    for level, severity in _LEVELS.items():
        if level == "warn" and row.warn == row.error:
            continue
        limit = f'tidemill_run_alarm_threshold{{alarm="{name}",level="{severity}"}}'
        expression = f"{value} {'<' if row.below else '>'} on(run) ({limit}{scale})"
        for condition in _conditions(name):
            expression += f" and on(run) {condition}"
        yield _rule(f"{name}_{level}", expression, severity, f"{row.metric} is {{{{ $value }}}}", row.advice)


def _conditions(name: str) -> Iterator[str]:
    if name not in _NO_STATISTICS:
        yield f"tidemill_train_tokens >= {MIN_TOKENS}"
    if name == "entropy_gap":
        yield f"tidemill_offpolicy_entropy_gap_tokens >= {MIN_TOKENS}"
        yield f"abs(tidemill_offpolicy_entropy_gap) >= {MIN_GAP}"
    if name == "pearson":
        yield f"tidemill_offpolicy_prob_std >= {MIN_SPREAD}"


def _rule(name: str, expression: str, severity: str, summary: str, cure: str, *, wait: str = FOR) -> JsonObject:
    return {
        "alert": "Tidemill" + "".join(word.capitalize() for word in name.split("_")),
        "expr": expression,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": f"run {{{{ $labels.run }}}}: {summary}", "description": cure},
    }


_UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "share": "percentunit",
    "GB/s": "GBs",
    "tokens/s": "short",
    "TFLOP/s": "short",
}
_WIDTH, _HEIGHT, _COLUMNS = 6, 6, 24


def board() -> str:
    """Return a board of Grafana as JSON: a row for each group, a panel for each metric; the run is a variable."""
    panels: list[JsonObject] = []
    height = 0
    for group in groups():
        shown = [metric for row in group.rows for metric in row]
        collapsed = group.name != "train"
        inner = [_panel(metric, place, height + 1) for place, metric in enumerate(shown)]
        row = {"type": "row", "title": group.name, "collapsed": collapsed, "gridPos": _at(0, height, _COLUMNS, 1)}
        panels.append({**row, "panels": inner if collapsed else []})
        panels += [] if collapsed else inner
        height += 1 + (0 if collapsed else _HEIGHT * (1 + (len(shown) - 1) // (_COLUMNS // _WIDTH)))
    for number, panel in enumerate([panel for row in panels for panel in (row, *row.get("panels", []))], 1):
        panel["id"] = number
    source = {"type": "prometheus", "uid": "${source}"}
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": source,
            "query": "label_values(tidemill_run_step, run)",
            "refresh": 2,
        },
    ]
    document = {
        "uid": "tidemill",
        "title": "Tidemill",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(document, ensure_ascii=False) + "\n"


def _at(x: int, y: int, width: int, height: int) -> JsonObject:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(metric: Metric, place: int, top: int) -> JsonObject:
    per_row = _COLUMNS // _WIDTH
    query = f'{exported_name(metric)}{{run="$run"}}'
    steps: list[JsonObject] = [{"color": "green", "value": None}]
    if metric.high is not None:
        steps.append({"color": "orange", "value": metric.high})
    elif metric.low is not None:
        steps = [{"color": "orange", "value": None}, {"color": "green", "value": metric.low}]
    custom = {"thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"}, "showPoints": "never"}
    return {
        "type": "timeseries",
        "title": metric.name,
        "description": help_of(metric),
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": _at(place % per_row * _WIDTH, top + place // per_row * _HEIGHT, _WIDTH, _HEIGHT),
        "targets": [
            {
                "refId": "A",
                "expr": f"rate({query}[1m])" if metric.counter else query,
                "legendFormat": f"{{{{{metric.label or _legend(metric)}}}}}",
            }
        ],
        "fieldConfig": {
            "defaults": {
                "unit": _UNITS.get(metric.unit, "short"),
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
    }


def _legend(metric: Metric) -> str:
    return {"eval": "set", "bus": "stream"}.get(metric.group, "id" if "live row" in metric.source else "run")
