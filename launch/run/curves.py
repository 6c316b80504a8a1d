"""The picture of a run: curves.png. Loads matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.wire.json_object import JsonMapping

REWARD = "data/reward_mean"
PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", ((REWARD, "mean of the step"),)),
    ("lag (steps)", (("offpolicy/lag_mean", "mean"), ("offpolicy/lag_max", "max"))),
    ("mismatch", (("offpolicy/logprob_diff_abs", "|log pi - log mu|"), ("offpolicy/k3", "k3"))),
    ("entropy (nats)", (("train/entropy", "policy"),)),
    ("learner", (("train/wait_share", "waiting share"), ("offpolicy/ess", "effective sample size"))),
    ("seconds", (("train/step_seconds", "step"), ("push/seconds", "push"))),
)
SMOOTH_STEPS = 5
"""Number of steps over which a curve is averaged."""
UNSMOOTHED = ("offpolicy/lag_max",)
"""Curves drawn as they are: the mean of five maxima is no maximum."""


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
    low, high = min(0.0, *rewards, 0.0), max(1.0, *rewards, 1.0)
    margin = 0.02 * (high - low)
    return (low - margin if low < 0 else 0.0), high + margin


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of the last ``SMOOTH_STEPS`` values at each step."""
    return [
        sum(part) / len(part)
        for end in range(1, len(values) + 1)
        for part in [values[max(0, end - SMOOTH_STEPS) : end]]
    ]
