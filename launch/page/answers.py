"""The answers of a page about a whole run, as plain maps: what the server sends, and what an export holds."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidemill.actors.engines.address_checks import unreachable
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.metrics import dictionary
from tidemill.launch.page.columns import BUCKETS, MetricColumns, rounded, shown_first
from tidemill.launch.page.lanes import fleet_facts, process_of
from tidemill.launch.page.logs import RunLogs
from tidemill.launch.page.reader import UNANSWERED_S, RunReader
from tidemill.launch.page.texts import fact, made_safe, safe, to_json
from tidemill.launch.run.desired import ROLES, LiveHost
from tidemill.launch.run.run_facts import RECENT_STEPS
from tidemill.launch.run.watch import SILENT_S
from tidemill.learner.algorithms.alarms import THRESHOLDS

MAX_POINTS = 400  # Newest pushes of an answer
_GROUPS = {
    "reward": ("data/reward", "train/reward", "eval/", "train/zero_variance"),
    "policy": (
        "train/loss",
        "train/grad",
        "train/entropy",
        "train/kl",
        "train/ppo",
        "train/lr",
        "train/sft",
        "critic/",
    ),
    "off-policy": ("offpolicy/", "data/lag", "staleness/"),
    "numerics": ("train/skipped", "numerics/", "routing/", "debug/"),
    "data": ("data/", "train/response", "train/truncated", "train/groups", "train/tokens", "train/unended"),
    "fleet": ("push/", "weights/", "train/", "turn/", "bus/", "disk/", "checkpoint/"),
}


class RunAnswers:
    """Answers from the present state of a reader; nothing here waits for the bus."""

    def __init__(self, reader: RunReader, *, resume: str = "", logs: Path | None = None) -> None:
        """``resume``: command that continues the run, ``logs``: directory of its logs, if they are known here."""
        self._reader, self._resume, self._logs = reader, resume, RunLogs(logs)
        self.mode = "ended" if reader.ended else "live"

    # ---- the run

    def run(self) -> JsonObject:
        """Return state, progress and cost of the run."""
        reader = self._reader
        steps, now_s = reader.settings.steps, reader.now_s
        elapsed_s = reader.ran.seconds(now_s if self._goes_on() else None)
        left_s = self._left_s()
        return {
            "run": reader.bus.run,
            "mode": self.mode,
            "state": self._state(),
            "dead": self._dead(),
            "bus": {
                "connected": reader.bus.connected,
                "silent_s": round(reader.silent_s, 1),
                "words": reader.full or _silence(reader.silent_s),
            },
            "step": reader.metrics.last,
            "planned": reader.planned,
            "steps": steps,
            "version": max((row.version for row, _ in reader.rows), default=-1),
            "newest_s": reader.newest_s,
            "age_s": round(now_s - reader.newest_s, 1) if reader.newest_s else None,
            "now_s": now_s,
            "elapsed_s": elapsed_s,
            "left_s": left_s,
            "cost": self._cost(elapsed_s, left_s),
            "loading": not reader.loaded.is_set(),
        }

    def _is_over(self) -> bool:
        steps = self._reader.settings.steps
        return bool(self._reader.end) or (steps is not None and self._reader.metrics.last >= steps)

    def _goes_on(self) -> bool:
        """Return whether a learner is alive, so that time passes for the run."""
        rows = self._reader.rows if self.mode == "live" and not self._is_over() else ()
        return any(age_s <= SILENT_S and row.role in ("learner", "feeder") for row, age_s in rows)

    def _state(self) -> JsonObject:
        reader = self._reader
        kind, symbol, words, since_s = "running", "●", "running", None
        if self._is_over():
            reason = safe(str(reader.end.get("reason", ""))) if reader.end else "learner.steps"
            kind, symbol, words, since_s = "finished", "✓", f"finished: {reason}", reader.newest_s
        elif self.mode != "live":
            kind, symbol, words, since_s = "ended", "✕", f"ended at step {reader.metrics.last}", reader.newest_s
        elif reader.silent_s > UNANSWERED_S:
            kind, symbol, words = "silent", "◌", _silence(reader.silent_s)
        elif reader.full:
            kind, symbol, words = "full", "✕", f"the bus stores nothing: {reader.full}"
        elif not self._goes_on():
            age_s = reader.now_s - reader.newest_s if reader.newest_s else 0.0
            words = f"no learner, no data for {age_s:.0f} s" if reader.newest_s else "waits for a learner"
            kind, symbol, since_s = ("silent" if reader.newest_s else "starting"), "◌", reader.newest_s or None
        elif not reader.metrics.last:
            kind, symbol, words = "starting", "◌", "starting, no step yet"
        return {"kind": kind, "symbol": symbol, "words": words, "since_s": since_s}

    def _dead(self) -> JsonObject | None:
        """Return the red line of a run that has stopped before its end; None for any other."""
        reader, state = self._reader, self._state()
        if state["kind"] not in ("ended", "silent", "full"):
            return None
        lanes = [lane for lane in reader.lanes.lanes.values() if lane.row.role in ("learner", "feeder", "bus")]
        lane = max(lanes, key=lambda lane: lane.silent_s, default=None)
        trouble = "" if lane is None else lane.row.trouble or lane.row.waits_for
        return {
            "sentence": state["words"] + (f"; last: {safe(trouble)}" if trouble else ""),
            "since_s": state["since_s"],
            "process": None if lane is None else safe(f"{lane.row.role} {lane.row.id}"),
            "cure": self._resume or "tidemill up CONFIG --resume on the machine of the run",
        }

    def _left_s(self) -> float | None:
        steps = self._reader.settings.steps
        if steps is None or self.mode != "live" or self._is_over():
            return None
        return self._reader.pace.left_s(steps)

    def _cost(self, elapsed_s: float, left_s: float | None) -> JsonObject:
        reader = self._reader
        gpus = len({device for row, _ in reader.rows for device in row.capabilities.devices})
        price = reader.settings.price or None
        hours = gpus * elapsed_s / 3600 if gpus else None
        hours_left = gpus * left_s / 3600 if gpus and left_s is not None else None

        def money(hours: float | None) -> float | None:
            return hours * price if hours is not None and price is not None else None

        cost = {"gpus": gpus, "gpu_hours": hours, "gpu_hours_left": hours_left, "price": price}
        return {**cost, "money": money(hours), "money_left": money(hours_left)}

    # ---- overview

    def overview(self) -> JsonObject:
        """Return the answers to: is it learning, is it healthy, what limits it."""
        reader = self._reader
        return {
            **self.run(),
            **self.summary(),
            "reward": {"metric": "data/reward_mean", "points": reader.metrics.points("data/reward_mean")},
            "evaluations": self.evaluations(),
            "pushes": list(reader.pushes)[-MAX_POINTS:],
            "alarms": reader.alarms.as_list(),
        }

    def summary(self) -> JsonObject:
        """Return the facts of the overview, the waits, and what limits the run."""
        return {"facts": self._facts(), "waits": self._waits(), "limit": self._limit()}

    def evaluations(self) -> list[JsonObject]:
        """Return the newest scores by version and set."""
        names = {"mean": "mean", "low": "mean_low", "high": "mean_high"}
        lines = [line for _, line in sorted(self._reader.evaluations.items())]
        return [
            {name: line[name] for name in ("step", "version", "set")}
            | {name: line.get(key) for name, key in names.items()}
            | {"metrics": {key: value for key, value in line.items() if key not in ("step", "version", "set")}}
            for line in lines
        ]

    def _facts(self) -> list[JsonObject]:
        metrics, reader = self._reader.metrics, self._reader
        reward, before = metrics.mean("data/reward_mean", 10), self._before("data/reward_mean")
        change = "" if reward is None or before is None else f"{reward - before:+.3g} in 10 steps"
        # By the clock, waiting included: to be compared with the generated tokens.
        tokens, pace_s = metrics.mean("train/tokens", RECENT_STEPS), reader.pace.step_s
        lag, wait = metrics.mean("offpolicy/lag_mean", 10), metrics.mean("train/wait_share", 10)
        generated = sum(lane.rate or 0.0 for lane in reader.lanes.lanes.values() if lane.row.role == "actor")
        push, balance = metrics.mean("push/seconds", 1), reader.ledger.as_map()["balance"]
        healthy = {True: "ok", False: "bad", None: "none"}[balance["ok"]]
        trained, waits = tokens / pace_s if tokens and pace_s else None, "warn" if (wait or 0) > 0.5 else "ok"

        return [
            fact("reward", reward, "", change, status="ok", metric="data/reward_mean"),
            fact("lag", lag, "steps", status=self.status("offpolicy/lag_max"), metric="offpolicy/lag_mean"),
            fact("learner waits", wait, "share", status=waits, metric="train/wait_share"),
            fact("generated", generated or None, "tokens/s", status="ok"),
            fact("trained", trained, "tokens/s", status="ok", metric="train/tokens"),
            fact("push", push, "s", status="ok", metric="push/seconds"),
            fact("accounting", balance["ok"], "check", balance["words"], status=healthy),
        ]

    def _before(self, name: str) -> float | None:
        metrics = self._reader.metrics
        values = metrics.values(name, max(metrics.first, metrics.last - 19), max(metrics.first, metrics.last - 10))
        values = values[values == values]
        return float(values.mean()) if len(values) and metrics.last > 10 else None

    def _waits(self) -> list[JsonObject]:
        """Return the seconds of a step, over the last steps, for which each part of the run waits for another."""
        metrics, pace_s = self._reader.metrics, self._reader.pace.step_s

        def line(who: str, what: str, seconds: float | None) -> JsonObject:
            share = min(1.0, seconds / pace_s) if seconds is not None and pace_s else None
            return {"who": who, "for": what, "seconds": seconds, "share": share}

        waits = [
            line("learner", "samples", metrics.mean("train/wait_seconds", RECENT_STEPS)),
            line("learner", "a push", metrics.mean("push/wait_seconds", RECENT_STEPS)),
        ]
        for role, what in (("actor", "tasks or engines"), ("engine", "requests")):
            shares = [row.load["waiting_share"] for row, _ in self._reader.rows if _waits(role, row.role, row.load)]
            seconds = sum(map(float, shares)) / len(shares) * pace_s if shares and pace_s else None
            waits.append(line(f"{role}s", what, seconds))
        return waits

    def _limit(self) -> JsonObject:
        """Return whether generation or training limits the run, by the seconds that the learner waits."""
        metrics = self._reader.metrics
        names = ("train/wait_seconds", "train/step_seconds", "push/wait_seconds")
        wait, step, push = (metrics.mean(name, RECENT_STEPS) or 0.0 for name in names)
        total = wait + step + push
        if not total:
            return {"words": "", "cure": "", "parts": []}
        parts = [{"name": "waiting for samples", "share": wait / total, "seconds": wait}]
        parts += [{"name": "training", "share": step / total, "seconds": step}]
        parts += [{"name": "waiting for a push", "share": push / total, "seconds": push}]
        share = f"{100 * max(wait, step, push) / total:.0f} % of a step"
        if wait == max(wait, step, push):
            words, cure = f"generation: the learner waits for samples, {share}", "more engines, or a larger max_lag"
        elif step >= push:
            words, cure = f"training: {share}", "more ranks, larger micro-batches, or fewer engines"
        else:
            words, cure = f"pushes: the learner waits for them, {share}", "weights.overlap, or another transport"
        return {"words": words, "cure": cure, "parts": parts}

    # ---- metrics

    def metrics(self) -> JsonObject:
        """Return every metric with its newest value and its healthy range."""
        columns = self._reader.metrics
        lines = []
        for name in columns.names:
            values = columns.newest(name, 10)
            low, high = healthy_range(name)
            lines.append(
                {
                    "name": name,
                    "group": group_of(name),
                    "n": int((columns.values(name) == columns.values(name)).sum()),
                    "newest": rounded(float(values[-1])) if len(values) else None,
                    "healthy": None if low is None and high is None else [low, high],
                    "status": self.status(name),
                    **described(name),
                }
            )
        return {"metrics": lines, "groups": [*_GROUPS, "other"], "step": columns.last, "shown": shown_first(columns)}

    def status(self, name: str) -> str:
        """Return ok, warn or bad by the alarms of the last steps on this metric; none without one."""
        present = [alarm for alarm in self._reader.alarms.as_list() if alarm["metric"] == name and alarm["now"]]
        if any(alarm["level"] == "error" for alarm in present):
            return "bad"
        watched = any(row.metric == name for row in THRESHOLDS.values())
        return "warn" if present else "ok" if watched else "none"

    def series(
        self, names: Sequence[str] = (), first: int = 0, last: int = 0, buckets: int = BUCKETS, columns: object = None
    ) -> JsonObject:
        """Return the reduced points of metrics, which names and beginnings (``eval/*``) choose; all without any.

        ``columns``: of another run.
        """
        source = columns if isinstance(columns, MetricColumns) else self._reader.metrics
        chosen = source.choose(names) if names else source.names
        # Encoded one by one: of a hundred thousand points at once, the search for cycles costs more than all the rest.
        series = {name: msgspec.Raw(to_json(source.points(name, first, last, buckets))) for name in chosen}
        return {"x": "step", "from": first or source.first, "to": last or source.last, "series": series}

    def lags(self, first: int = 0, last: int = 0, buckets: int = 200) -> JsonObject:
        """Return the shares of the trained tokens by lag, a row for each bucket of steps."""
        columns = self._reader.metrics
        prefix = "offpolicy/lag_share/"
        names = [name.removeprefix(prefix) for name in columns.names if name.startswith(prefix)]
        lags = sorted(names, key=lambda lag: (not lag.isdigit(), int(lag) if lag.isdigit() else 0))
        first, last = max(first, columns.first), min(last or columns.last, columns.last)
        if not columns.first or last < first:
            return {"steps": [], "lags": lags, "shares": []}
        width = -(-(last - first + 1) // buckets)
        steps = [[begin, min(begin + width - 1, last)] for begin in range(first, last + 1, width)]
        shares = [[_mean(columns, f"{prefix}{lag}", *bucket) for lag in lags] for bucket in steps]
        return {"steps": steps, "lags": lags, "shares": shares}

    def points_of(self, steps: Sequence[int]) -> JsonObject:
        """Return all metrics of some steps, for an event."""
        rows = [self._reader.metrics.at(step) for step in steps]
        names = sorted({name for row in rows for name in row})
        return {"steps": list(steps), "values": {name: [row.get(name) for row in rows] for name in names}}

    # ---- flow and fleet

    def flow(self, last_s: float = 0.0) -> JsonObject:
        """Return the counts of samples and tasks by disposition."""
        reader = self._reader
        size = max(0, reader.settings.get("learner.group_size", int, 0))
        return made_safe(reader.ledger.as_map(last_s, reader.now_s, size))  # type: ignore[no-any-return]

    def processes(self) -> list[JsonObject]:
        """Return every process with its newest row."""
        alive = [row for row, age_s in self._reader.rows if age_s <= SILENT_S]
        lanes = self._reader.lanes.lanes.values()
        return [process_of(lane, unreachable(lane.row.nonce, alive), self._logs.name_of(lane.row)) for lane in lanes]

    def fleet(self, begin_s: float = 0.0, end_s: float = float("inf")) -> JsonObject:
        """Return the processes, their segments and the pushes of the last hour, and the engines by their samples."""
        reader = self._reader
        return {
            "now_s": reader.now_s,
            "lanes": self.processes(),
            "segments": reader.lanes.segments(begin_s, end_s),
            "pushes": [push for push in reader.pushes if push["time_s"] >= begin_s][-MAX_POINTS:],
            "queue": self.queue(),
            "hosts": self._hosts(),
            "engines": made_safe(reader.held.engines()),
        }

    def queue(self) -> JsonObject:
        """Return the tasks that wait or are leased, the size of the stream of samples, and the use of the disks."""
        reader = self._reader
        waiting, leased = reader.ledger.backlog or (None, None)
        queue: JsonObject = {"waiting": waiting, "leased": leased, "full": reader.full}
        queue["stream_bytes"] = None if reader.samples is None else reader.samples.bytes
        queue["stream_messages"] = None if reader.samples is None else reader.samples.messages
        disks = ("bus_bytes", "checkpoints_free_bytes")
        queue |= {name: reader.metrics.mean(f"disk/{name}", 1) for name in disks}
        return queue | {"facts": fleet_facts(queue, reader.lanes.lanes.values())}

    def _hosts(self) -> list[JsonObject]:
        """Return the live hosts, with the running and the desired number of processes of each role."""
        rows = [row for row, age_s in self._reader.rows if row.role == "host" and age_s <= SILENT_S]
        hosts = [LiveHost(row.id, row.pool) for row in rows]
        return [
            {
                "name": safe(host.name),
                "pool": safe(host.pool),
                "running": {role: int(row.load.get(f"{role}s", 0)) for role in ROLES},
                "desired": self._reader.desired.of(host, hosts),
            }
            for host, row in zip(hosts, rows, strict=True)
        ]


def _mean(columns: MetricColumns, name: str, first: int, last: int) -> float:
    values = columns.values(name, first, last)
    values = values[values == values]
    return round(float(values.mean()), 5) if len(values) else 0.0


def _waits(role: str, row_role: str, load: object) -> bool:
    return role == row_role and isinstance(load, dict) and "waiting_share" in load


def _silence(silent_s: float) -> str:
    return f"the bus has not answered for {silent_s:.0f} s" if silent_s > UNANSWERED_S else ""


def group_of(name: str) -> str:
    """Return the group in which the page shows a metric: the one with the longest beginning of its name."""
    matches = [(len(begin), group) for group, begins in _GROUPS.items() for begin in begins if name.startswith(begin)]
    return max(matches)[1] if matches else "other"


def healthy_range(name: str) -> tuple[float | None, float | None]:
    """Return the healthy range of a metric by the dictionary, else by the alarms; None = no bound."""
    metric = dictionary.described(name)
    if metric is not None and (metric.low, metric.high) != (None, None):
        return metric.low, metric.high
    lows = [row.warn for row in THRESHOLDS.values() if row.metric == name and row.below]
    highs = [row.warn for row in THRESHOLDS.values() if row.metric == name and not row.below]
    return max(lows, default=None), min(highs, default=None)


def described(name: str) -> JsonObject:
    """Return meaning, unit, healthy range in words and source of a metric, empty for one that is in no table."""
    metric = dictionary.described(name)
    names = ("meaning", "unit", "source", "peers")
    texts = {field: "" if metric is None else getattr(metric, field) for field in names}
    return texts | {"healthy_words": "" if metric is None else metric.healthy}
