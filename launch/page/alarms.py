"""Alarms of a run with sentence and cure: of the steps' metrics, by the learner's own table, and of its processes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.page.texts import safe
from tidemill.launch.run.run_facts import RunSettings
from tidemill.launch.run.watch import SILENT_S
from tidemill.learner.algorithms.alarms import Alarm, recorded

MAX_ALARMS = 50
RECENT_STEPS = 10  # Steps within which an alarm of a metric counts as present


@dataclass(slots=True)
class RunAlarms:
    """Alarms so far: newest stretch of steps of each alarm of a metric, and present states of processes."""

    _of_metrics: dict[str, JsonObject] = field(default_factory=dict)
    _of_processes: dict[str, JsonObject] = field(default_factory=dict)
    _step: int = 0

    def step(self, step: int, metrics: Mapping[str, float], stored_s: float, settings: RunSettings) -> None:
        """Check the metrics of a step."""
        self._step = max(self._step, step)
        for alarm in recorded(metrics, settings.alarms, settings.context):
            before = self._of_metrics.get(alarm.name)
            goes_on = before is not None and step - before["last_step"] <= RECENT_STEPS
            since = (before["since_step"], before["since_s"]) if goes_on and before is not None else (step, stored_s)
            self._of_metrics[alarm.name] = _of_metric(alarm, step, since)

    def processes(self, rows: Sequence[tuple[LiveRow, float]], now_s: float, troubles: Mapping[str, str]) -> None:
        """Register the present troubles of processes. ``troubles``: sentence -> cure, of the run as a whole."""
        sentences = dict(troubles)
        for row, age_s in rows:
            name = f"{row.role} {row.id}"
            if age_s > SILENT_S:
                cure = f"look at its host {row.host}, process {row.pid}, and its log"
                sentences[f"{name} sends no heartbeats"] = cure
            if row.trouble:
                sentences[f"{name}: {row.trouble}"] = "see its log; docs/troubleshooting.md"
        before, self._of_processes = self._of_processes, {}
        for sentence, cure in list(sentences.items())[:MAX_ALARMS]:
            known = before.get(sentence)
            since_s = known["since_s"] if known is not None else now_s
            self._of_processes[sentence] = {
                "id": safe(sentence),
                "level": "error",
                "since_step": None,
                "last_step": None,
                "since_s": since_s,
                "now": True,
                "sentence": safe(sentence),
                "cure": safe(cure),
                "metric": None,
                "link": "#fleet",
            }

    def as_list(self) -> list[JsonObject]:
        """Return the alarms, present ones first, newest first."""
        of_metrics = [
            {**alarm, "now": self._step - alarm["last_step"] < RECENT_STEPS} for alarm in self._of_metrics.values()
        ]
        alarms: Iterable[JsonObject] = (*self._of_processes.values(), *of_metrics)
        return sorted(alarms, key=lambda alarm: (not alarm["now"], -alarm["since_s"]))[:MAX_ALARMS]


def _of_metric(alarm: Alarm, step: int, since: tuple[int, float]) -> JsonObject:
    side = "below" if alarm.value < alarm.threshold else "above"
    return {
        "id": alarm.name,
        "level": alarm.level,
        "since_step": since[0],
        "last_step": step,
        "since_s": since[1],
        "sentence": f"{alarm.metric} is {alarm.value:.3g}, {side} {alarm.threshold:.3g}",
        "cure": alarm.advice,
        "metric": alarm.metric,
        "value": alarm.value,
        "threshold": alarm.threshold,
        "link": f"#learning&q={quote(alarm.metric)}",
    }
