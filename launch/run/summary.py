"""The end of a run: summary.json, metrics.jsonl, its curves, and a check of its promises.

While the accounting is made, a line on the terminal every few seconds, and a live row, show its progress.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.bus.wire.rows import LiveRow, VersionRow
from tidemill.launch.run.audit import RunAccounting, mean
from tidemill.launch.settings import extras

LAST_STEPS = 10  # Number of steps over which the last reward is averaged: a peak proves nothing
REWARD = "data/reward_mean"
SKIPPED = "train/skipped_minibatches"
# Largest counter of a live row that is used: without users of the bus any client may write such a row.
MOST_COUNT = 1e12
# Fields of the summary that are printed at the end.
REPORTED = (
    *("steps", "reward_first", "reward_last", "seconds", "samples_published", "samples_trained", "samples_lost"),
    *("samples_trained_twice", "samples_dropped", "tasks_given_up", "requests_aborted_by_pushes"),
    *("multi_version_samples", "max_lag_trained", "pushes", "restarts"),
)
ROLE = "up"  # Role and name of the live row
# Shortest intervals in seconds of lines on the terminal, and of updates of the live row.
REPORT_EVERY_S, SHOW_EVERY_S = 5.0, 1.0

PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", ((REWARD, "mean of the step"),)),
    ("lag (steps)", (("offpolicy/lag_mean", "mean"), ("offpolicy/lag_max", "max"))),
    ("mismatch", (("offpolicy/logprob_diff_abs", "|log pi - log mu|"), ("offpolicy/k3", "k3"))),
    ("entropy (nats)", (("train/entropy", "policy"),)),
    ("learner", (("train/wait_share", "waiting share"), ("offpolicy/ess", "effective sample size"))),
    ("seconds", (("train/step_seconds", "step"), ("push/seconds", "push"))),
)
SMOOTH_STEPS = 5  # Number of steps over which a curve is averaged
UNSMOOTHED = ("offpolicy/lag_max",)  # Curves drawn as they are: the mean of five maxima is no maximum


def count_in(load: Mapping[str, float], name: str) -> float:
    """Return a counter of a live row; 0 for one that is missing, or that no process can have."""
    value = load.get(name, 0.0)
    return value if 0 <= value <= MOST_COUNT else 0.0


def metric_lines(outcomes: Sequence[Done]) -> list[JsonObject]:
    """Return one flat map per step, in order; of a repeated step the newest outcome counts."""
    newest = {done.step: done for done in outcomes}
    return [{"step": step, "epoch": newest[step].epoch, **newest[step].metrics} for step in sorted(newest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations made while a run went on, which are in none of its streams."""

    seconds: float
    seconds_to_reward: float | None  # Seconds until the mean reward first reached 0.9; None = it has not
    loads: Mapping[str, Mapping[str, float]]  # Last counters that each process reported, by `role.id`
    troubles: Mapping[str, str] = field(default_factory=dict)  # Repeated failure that each process last reported, by id
    aborted_by_pushes: int
    restarts: Mapping[str, int]


def summarize(
    accounting: RunAccounting,
    lines: Sequence[JsonMapping],
    versions: Sequence[VersionRow],
    observed: Observed | None,
    *,
    run: str,
    max_lag: int,
) -> JsonObject:
    """Return the counts and means of summary.json; those of ``observed`` are absent without it."""
    rewards = [float(line[REWARD]) for line in lines if REWARD in line]
    # Without the lines of the first steps, which a long run removes from its log, the first reward is not known
    first_gone = bool(lines) and lines[0]["step"] > accounting.removed_steps > 0
    return {
        "run": run,
        "steps": lines[-1]["step"] if lines else accounting.removed_steps,
        "minibatches_skipped": int(sum(line.get(SKIPPED, 0.0) for line in lines)),
        "reward_first": rewards[0] if rewards and not first_gone else None,
        "reward_last": mean(rewards[-LAST_STEPS:]) if rewards else None,
        **_samples(accounting),
        "multi_version_samples": accounting.multi_version,
        "max_lag": max_lag,
        "max_lag_trained": accounting.max_lag_trained,
        "lag_histogram_tokens": {str(lag): accounting.lag_tokens[lag] for lag in sorted(accounting.lag_tokens)},
        "learner_wait_share": float(lines[-1].get("train/wait_share", 0.0)) if lines else None,
        "tokens_generated": accounting.tokens_generated,
        "tokens_trained": accounting.tokens_trained,
        "versions": len(versions),
        "pushes": sum(row.version > 0 and row.state == "published" for row in versions),
        **_pushes(lines),
        "tasks_issued": accounting.tasks_issued,
        "tasks_open": accounting.tasks_open,
        "tasks_given_up": dict(sorted(accounting.tasks_given_up.items())),
        **({} if observed is None else _observations(observed)),
        "problems": accounting.problems,
    }


def _observations(observed: Observed) -> JsonObject:
    loads = observed.loads
    shares = [load.get("waiting_share", -1.0) for name, load in loads.items() if name.startswith("actor.")]
    actors = [share for share in shares if 0 <= share <= 1]
    return {
        "seconds": round(observed.seconds, 2),
        "seconds_to_reward_0.9": observed.seconds_to_reward,
        "requests_aborted_by_pushes": observed.aborted_by_pushes,
        "actor_wait_share": mean(actors) if actors else None,
        "bad_rows": int(count_in(loads.get("feeder.feeder", {}), "bad_rows")),
        "troubles": dict(observed.troubles),
        "restarts": dict(observed.restarts),
    }


def _samples(accounting: RunAccounting) -> dict[str, object]:
    return {
        "samples_published": accounting.published,
        "samples_trained": accounting.trained,
        "samples_lost": accounting.lost,
        "samples_trained_twice": accounting.trained_twice,
        "samples_dropped": dict(sorted(accounting.dropped.items())),
        "samples_duplicate": accounting.duplicates,
        "samples_invalid": accounting.invalid,
        "samples_invalid_by_field": dict(sorted(accounting.invalid_by_field.items())),
        "samples_invalid_by_actor": dict(sorted(accounting.invalid_by_actor.items())),
        "samples_buffered": accounting.buffered,
        "samples_trimmed": accounting.trimmed,
        "samples_aborted": accounting.aborted,
        "books_balance": accounting.balance(),
    }


def _pushes(lines: Sequence[JsonMapping]) -> dict[str, float | None]:
    """Return means over pushes; several steps may have reported the same push."""
    pushes = {line["push/version"]: line for line in lines if line.get("push/version", -1) > 0}.values()
    names = {"push_seconds_mean": "push/seconds", "stall_seconds_mean": "push/stall_seconds_max"}
    return {key: mean([line[name] for line in pushes if name in line]) for key, name in names.items()}


def broken_promises(summary: JsonMapping, *, require_reward: float) -> list[str]:
    """Return the promises that the run did not keep, as text; empty if it kept all."""
    wrong = [
        f"{name} = {summary[name]}, want 0"
        for name in ("samples_lost", "samples_trained_twice", "requests_aborted_by_pushes")
        if summary.get(name, 0) != 0
    ]
    if not summary["books_balance"]:
        wrong.append("the accounting of the stream SAMPLES does not balance")
    if summary["problems"]:
        wrong.append(f"problems found by the audit: {len(summary['problems'])}, the first: {summary['problems'][0]}")
    if summary["max_lag_trained"] > summary["max_lag"]:
        wrong.append(f"max_lag_trained = {summary['max_lag_trained']}, want <= {summary['max_lag']}")
    reward = -math.inf if summary["reward_last"] is None else summary["reward_last"]
    if reward < require_reward:
        wrong.append(f"reward_last = {summary['reward_last']}, want >= {require_reward}")
    return wrong


def seconds_of_steps(file: Path) -> dict[int, float]:
    """Return the seconds at which earlier starts had done each step; a line cut short by a kill is ignored."""
    seconds: dict[int, float] = {}
    for text in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError, KeyError):
            line = json.loads(text)
            seconds.setdefault(int(line["step"]), float(line["seconds"]))
    return seconds


def lines_of_removed(file: Path, removed_steps: int) -> list[JsonObject]:
    """Return the lines of steps that are no longer in the log, the newest of each, as a watch has written them."""
    lines: dict[int, JsonObject] = {}
    for text in file.read_text().splitlines() if removed_steps and file.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            if int(line["step"]) <= removed_steps:
                lines[int(line["step"])] = line
    return [lines[step] for step in sorted(lines)]


def write_lines(file: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Write JSON lines atomically."""
    write_whole(file, "".join(json.dumps(line) + "\n" for line in lines))


def as_text(value: object) -> str:
    """Return a value of the summary for the terminal."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_curves(lines: list[dict[str, object]], evaluations: list[dict[str, object]], file: Path, title: str) -> str:
    """Draw the curves of a run; return the file, or why there is none: a run does not need the extra ``plots``."""
    try:
        extras.require("plots")
    except extras.PackagesMissing as missing:
        return f"not drawn ({missing})"
    try:
        draw(lines, file, title=title, evaluations=evaluations)
    except OSError as error:
        file.unlink(missing_ok=True)
        return f"not drawn ({error.strerror})"
    return str(file)


def seconds_to_reward(lines: list[dict[str, object]], reward: float, *, over: int = 5) -> float | None:
    """Return the seconds at which the mean reward of ``over`` steps first reached ``reward``; None if it did not."""
    values = [float(line.get(REWARD, 0.0)) for line in lines]  # type: ignore[arg-type]
    for end in range(over, len(values) + 1):
        if sum(values[end - over : end]) / over >= reward:
            return float(lines[end - 1]["seconds"])  # type: ignore[arg-type]
    return None


def draw(lines: Sequence[JsonMapping], file: Path, *, title: str, evaluations: Sequence[JsonMapping] = ()) -> None:
    """Draw the panels that have data into a PNG. ``evaluations``: lines of evaluations.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), constrained_layout=True)
    for axis, (name, curves) in zip(axes.flat, PANELS, strict=True):
        for key, label in curves:
            points = [(line["step"], line[key]) for line in lines if key in line]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            (drawn,) = axis.plot(steps, values, linewidth=0.8, alpha=0.35)
            shown = values if key in UNSMOOTHED else smooth(values)
            axis.plot(steps, shown, linewidth=1.8, color=drawn.get_color(), label=label)
        for label, points in scores_of(evaluations).items() if name == "reward" else ():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.0, label=label)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.2)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    means = [mean for points in scores_of(evaluations).values() for _, mean in points]
    axes.flat[0].set_ylim(*reward_limits([*(line[REWARD] for line in lines if REWARD in line), *means]))
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def scores_of(evaluations: Sequence[JsonMapping]) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, mean) of every version that has one, by the label of its set."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in evaluations:
        if "mean" in line:
            points.setdefault(f"evaluation {line['set']}", []).append((line["step"], line["mean"]))
    return points


def reward_limits(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the range of the reward panel: 0 to 1, or the extreme rewards beyond, with a margin."""
    low, high = min(0.0, *rewards, 0.0), max(1.0, *rewards, 1.0)  # without rewards, too
    margin = 0.02 * (high - low)
    return (low - margin if low < 0 else 0.0), high + margin


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of the last ``SMOOTH_STEPS`` values at each step."""
    return [mean(list(values[max(0, end - SMOOTH_STEPS) : end])) for end in range(1, len(values) + 1)]


@asynccontextmanager
async def audit_shown(
    bus: Bus,
    report: Callable[[str], None],
    *,
    report_every_s: float = REPORT_EVERY_S,
    show_every_s: float = SHOW_EVERY_S,
) -> AsyncIterator[Callable[[int, int], None]]:
    """Yield the function to which the audit reports its progress: messages read, and their total number."""
    host, pid = socket.gethostname(), os.getpid()
    row = LiveRow(role=ROLE, id=ROLE, host=host, pid=pid, phase="auditing", waits_for="the log of plans")
    reported_s = shown_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported_s, shown_s
        now, text = time.monotonic(), f"{done:,} of {total:,} messages of SAMPLES read"
        if now - shown_s >= show_every_s:
            shown_s = now
            heartbeat.update(waits_for=text)
        if now - reported_s >= report_every_s:
            reported_s = now
            report(f"auditing: {text}")

    async with HeartbeatPublisher(bus, row) as heartbeat:
        yield progress


EVALUATIONS_FILE = "evaluations.jsonl"  # File in the run's directory with a line for each evaluation set and version


def scores_line(record: Evaluated) -> JsonObject:
    """Return the line of one set at one version."""
    return {"version": record.version, "step": record.step, "set": record.dataset, **record.metrics}


def scores_lines(evaluated: Mapping[tuple[int, str], Evaluated]) -> list[JsonObject]:
    """Return the lines of all records, by version and set."""
    return [scores_line(evaluated[key]) for key in sorted(evaluated)]


async def read_scores(bus: Bus, *, after_epoch: int = 0) -> dict[tuple[int, str], Evaluated]:
    """Return the newest record by version and set; records up to ``after_epoch`` are of another run."""
    records = [record async for _, record in bus.plans.scan() if isinstance(record, Evaluated)]
    return {(record.version, record.dataset): record for record in records if record.epoch > after_epoch}


def newest_scores(evaluated: Iterable[Evaluated]) -> dict[str, Evaluated]:
    """Return the record of the newest version of each set."""
    return {record.dataset: record for record in sorted(evaluated, key=lambda record: record.version)}


def scores_in_words(line: JsonMapping) -> str:
    """Return a line's mean with its interval and the versions of its tokens, in words."""
    if "mean" not in line:
        return f"{line['set']} without an answer (version {line['version']})"
    return f"{line['set']} {line['mean']:.3f} [{line['mean_low']:.3f}, {line['mean_high']:.3f}] ({_versions(line)})"


def _versions(line: JsonMapping) -> str:
    """Return the version of a line, and the versions of its tokens where they differ."""
    version = line["version"]
    oldest, newest = (version + int(line.get(name, 0)) for name in ("versions_later_min", "versions_later"))
    if newest == version:
        return f"version {version}"
    return f"version {version}, tokens of {newest if oldest == newest else f'{oldest} to {newest}'}"


def best_in_words(row: JsonMapping) -> str:
    """Return the row ``run/best`` in words."""
    score = f"{row['set']}/{row['metric']} {row['value']:.4g} (version {row['version']}, step {row['step']})"
    return f"{score}: {row.get('directory', '')}"


def newest_scores_in_words(evaluated: Iterable[Evaluated]) -> list[str]:
    """Return the newest scores of each set, in words."""
    return [scores_in_words(scores_line(record)) for record in newest_scores(evaluated).values()]
