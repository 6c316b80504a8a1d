"""Effect of age on learning, with and without correction: the same task at pinned lags, and fully asynchronous.

Pinned: the closed loop of ``bench.pinned`` (the real engine and the real learner taking turns), four optimizer steps
per version, every lag x method x seed a run of its own. The *final* values are compared (the mean of the last three
evaluations and of the last ten batches): uncorrected runs reach the goal and fall back later, so a peak proves nothing.
``--async`` runs ``tidemill up`` instead, every process real, at growing ``max_lag``.

Runs are appended to a file as they end; an interrupted sweep continues with the missing ones. Claims are checked and
printed as HOLDS or DOES NOT HOLD with their figures; a good result must be good with every seed.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "runs" / "bench" / "staleness"
LAGS = (0, 1, 2, 4, 8, 16, 32)
METHODS = ("none", "naive", "bypass", "tis", "decoupled", "icepop", "cispo", "m2po")
VERSIONS = 200
EVALUATE_EVERY = 10
GOOD, BROKEN = 0.98, 0.8
OLD = 8
"""Lag from which uncorrected training must break visibly."""
NEAR = 0.9
"""Greedy accuracy; its first crossing measures the speed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One cell of the table and its seed."""

    method: str
    lag: int
    seed: int
    versions: int = VERSIONS

    @property
    def key(self) -> str:
        return f"{self.method} {self.lag} {self.seed} {self.versions}"


def train(run: Run) -> dict[str, Any]:
    """Train it; return its curve and its end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import warnings

    warnings.simplefilter("ignore")
    from tests.bench.pinned import PinnedLoop
    from tidemill.learner.algorithms.config import AlgorithmConfig

    began = time.perf_counter()
    curve: list[tuple[int, float, float, float]] = []
    worst_k3 = 0.0
    rewards: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        loop = PinnedLoop(
            Path(directory), AlgorithmConfig(correction=run.method), lag=run.lag, seed=run.seed, versions=run.versions
        )
        started = time.perf_counter()
        for version in range(1, run.versions + 1):
            metrics = loop.step()
            rewards.append(metrics["reward"])
            worst_k3 = max(worst_k3, metrics["offpolicy/k3"])
            if version % EVALUATE_EVERY == 0:
                curve.append((version, time.perf_counter() - started, metrics["reward"], loop.evaluate()))
        loop.close()
    near = next((version for version, _, _, accuracy in curve if accuracy >= NEAR), None)
    return {
        **asdict(run),
        "accuracy": statistics.mean(accuracy for _, _, _, accuracy in curve[-3:]),
        "reward": statistics.mean(rewards[-10:]),
        "peak": max(accuracy for _, _, _, accuracy in curve),
        "near": near,
        "max_k3": worst_k3,
        "entropy": metrics["train/entropy"],
        "seconds": time.perf_counter() - began,
        "curve": curve,
    }


def sweep(runs: Sequence[Run], file: Path, jobs: int) -> list[dict[str, Any]]:
    """Return all runs: those in the file as they are, the others trained now, the longest lags first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    there = {Run(**{name: row[name] for name in ("method", "lag", "seed", "versions")}).key: row for row in read(file)}
    missing = sorted((run for run in runs if run.key not in there), key=lambda run: (run.seed, -run.lag))
    print(f"{len(runs)} runs, {len(missing)} to do, {jobs} at a time", flush=True)
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, file.open("a") as out:
        for number, row in enumerate(pool.imap_unordered(train, missing), 1):
            out.write(json.dumps(row) + "\n")
            out.flush()
            there[Run(**{name: row[name] for name in ("method", "lag", "seed", "versions")}).key] = row
            shown = f"{row['method']:<10}lag {row['lag']:<3} seed {row['seed']}"
            print(
                f"{number:>4} {shown} accuracy {final(row):.3f} reward {row['reward']:.3f} {row['seconds']:.0f} s",
                flush=True,
            )
    return [there[run.key] for run in runs]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def cell(rows: Iterable[Mapping[str, Any]], method: str, lag: int) -> list[Mapping[str, Any]]:
    return [row for row in rows if (row["method"], row["lag"]) == (method, lag)]


def final(row: Mapping[str, Any]) -> float:
    """Return the greedy accuracy at the end: the mean of the last three evaluations, so that neither a fall nor a late
    rise is missed.
    """
    return statistics.mean(accuracy for _, _, _, accuracy in row["curve"][-3:])


def versions_to(row: Mapping[str, Any], reward: float) -> float:
    """Return the versions until an evaluated batch was sampled with this reward; one more than there are when none
    was.
    """
    return float(next((version for version, _, sampled, _ in row["curve"] if sampled >= reward), row["versions"] + 1))


def tables(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], lags: Sequence[int]) -> str:
    """Return Markdown tables: the final values, then the distance between data and policy and the remaining entropy."""

    def ending(found: Sequence[Mapping[str, Any]]) -> str:
        accuracies, near = [final(row) for row in found], [row["near"] for row in found]
        speed = "never" if None in near else f"{statistics.median(near):.0f}"
        reward = statistics.mean(row["reward"] for row in found)
        return f"{statistics.mean(accuracies):.2f} ({min(accuracies):.2f}) [{speed}] {reward:.2f}"

    def apart(found: Sequence[Mapping[str, Any]]) -> str:
        return f"{max(row['max_k3'] for row in found):.2f} / {statistics.mean(row['entropy'] for row in found):.3f}"

    def one(show: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
        lines = ["| lag | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
        lines += [
            f"| {lag} | " + " | ".join(show(cell(rows, method, lag)) for method in methods) + " |" for lag in lags
        ]
        return "\n".join(lines)

    ends = (
        f"Final greedy accuracy, mean (smallest) over the seeds; [versions to {NEAR} with the median seed, never "
        "= not with every seed];"
    )
    return (
        f"{ends} sampled reward of the last ten batches:\n\n{one(ending)}\n\n"
        f"Largest k3 of any batch and seed / entropy at the end (nats):\n\n{one(apart)}"
    )


def claims(rows: Sequence[Mapping[str, Any]], lags: Sequence[int]) -> list[str]:
    """Return the claims about the sweep, each with its result and the figures."""
    said = []

    def claim(text: str, figures: Mapping[int, float], holds: bool) -> None:
        said.append(
            f"{verdict(holds)}: {text}: " + ", ".join(f"lag {lag} {figure:.3f}" for lag, figure in figures.items())
        )

    def by_lag(
        method: str, reduce: Callable[[list[float]], float], of: Callable[[Any], float], least: int = 0
    ) -> dict[int, float]:
        return {
            lag: reduce([of(row) for row in cell(rows, method, lag)])
            for lag in lags
            if lag >= least and cell(rows, method, lag)
        }

    for method in ("decoupled", "tis"):
        if worst := by_lag(method, min, final):
            claim(
                f"{method} ends at {GOOD} or better at every lag with every seed; the worst",
                worst,
                min(worst.values()) >= GOOD,
            )
    if old := by_lag("none", statistics.mean, final, OLD):
        claim(
            f"without correction it ends at {BROKEN} or worse, in the mean, from lag {OLD} on",
            old,
            max(old.values()) <= BROKEN,
        )
    if speeds := by_lag("bypass", statistics.mean, lambda row: versions_to(row, NEAR)):
        text = f"bypass sharpens ever more slowly: versions to a sampled reward of {NEAR} never fall with the lag"
        claim(text, speeds, never_falls(speeds.values()))
    if entropies := by_lag("bypass", statistics.mean, lambda row: row["entropy"], 4):
        claim(
            "bypass sharpens ever more slowly: its final entropy never falls from lag 4 on",
            entropies,
            never_falls(entropies.values()),
        )
    return said


def verdict(holds: bool) -> str:
    return "HOLDS" if holds else "DOES NOT HOLD"


def never_falls(values: Iterable[float]) -> bool:
    return all(a <= b for a, b in itertools.pairwise(values))


def draw(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], lags: Sequence[int], file: Path) -> None:
    """Draw reward against versions (above) and against seconds (below), a column per lag, a line per method (mean over
    seeds).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(lags), figsize=(2.6 * len(lags), 5.2), sharey=True, squeeze=False)
    for column, lag in enumerate(lags):
        for method in methods:
            found = cell(rows, method, lag)
            points = list(zip(*(row["curve"] for row in found), strict=True))
            versions = [point[0][0] for point in points]
            seconds = [statistics.mean(one[1] for one in point) for point in points]
            rewards = [statistics.mean(one[2] for one in point) for point in points]
            axes[0][column].plot(versions, rewards, label=method, linewidth=1)
            axes[1][column].plot(seconds, rewards, label=method, linewidth=1)
        axes[0][column].set_title(f"lag {lag}", fontsize=9)
        axes[0][column].set_xlabel("versions", fontsize=8)
        axes[1][column].set_xlabel("seconds", fontsize=8)
    axes[0][0].set_ylabel("reward of the sampled batch", fontsize=8)
    axes[1][0].set_ylabel("reward of the sampled batch", fontsize=8)
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def honestly_asynchronous(max_lags: Sequence[int], steps: int, judge_seconds: float) -> None:
    """Run ``tidemill up`` at growing bounds; print the samples trained and the learner's waits."""
    rows = []
    for max_lag in max_lags:
        directory = WORK / f"async-{max_lag}"
        settings = [
            f"directory={directory}",
            f"staleness.max_lag={max_lag}",
            f"learner.steps={steps}",
            "up.require_reward=-1",
        ]
        if judge_seconds:  # many responses wait for the judge at the same time: only the bound on staleness limits them
            options = json.dumps({"seconds": judge_seconds})
            settings += [
                "actor.reward=tests.bench.judge:judged",
                f"actor.reward_options={options}",
                "actor.max_samples_in_flight=16384",
            ]
            settings += [
                "learner.minibatches=4",
                "learner.optimizer.lr=1e-3",
                "learner.optimizer.eps=1e-3",
            ]  # as in the pinned sweep
        command = [sys.executable, "-m", "tidemill", "up", str(ROOT / "launch/configs/digits.yaml"), "--fresh"]
        command += [word for setting in settings for word in ("--set", setting)]
        with (WORK / f"async-{max_lag}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        rewards = [line["data/reward_mean"] for line in lines]
        first = lines[0]["seconds"] - lines[0]["train/wait_seconds"] - lines[0]["train/step_seconds"]
        row = {
            "max_lag": max_lag,
            "seconds": lines[-1]["seconds"] - first,
            "wait": sum(line["train/wait_seconds"] for line in lines[1:])
            / (lines[-1]["seconds"] - lines[0]["seconds"]),
            "lag_mean": statistics.mean(line["offpolicy/lag_mean"] for line in lines),
            "lag_max": max(line["offpolicy/lag_max"] for line in lines),
            "reward": statistics.mean(rewards[-10:]),
        }
        rows.append(row)
        print(" ".join(f"{name}={value:.3g}" for name, value in row.items()), flush=True)
    print("| max_lag | seconds | learner waits | mean lag | largest lag | final reward |\n|---|---|---|---|---|---|")
    for row in rows:
        shown = (
            f"{row['seconds']:.1f} | {row['wait']:.0%} | {row['lag_mean']:.2f} | {row['lag_max']:.0f} | "
            f"{row['reward']:.3f}"
        )
        print(f"| {row['max_lag']} | {shown} |")
    within = all(row["lag_max"] <= row["max_lag"] for row in rows)
    print(f"{verdict(within)}: the largest lag trained is never above the bound")
    waits = [row["wait"] for row in rows]
    print(f"{verdict(never_falls(reversed(waits)))}: the learner's wait falls as the bound grows")
    print(
        f"{verdict(max(waits[1:], default=0.0) < waits[0])}: the learner waits less than at the smallest "
        "bound at every larger one"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lags", type=int, nargs="*", default=list(LAGS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="others than those a setting was chosen with")
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="tidemill up at growing max_lag, instead of the pinned sweep",
    )
    parser.add_argument(
        "--judge-seconds", type=float, default=0.0, help="with --async: every reward takes so long, and no computation"
    )
    args = parser.parse_args(arguments)
    if args.asynchronous:
        WORK.mkdir(parents=True, exist_ok=True)
        honestly_asynchronous([lag for lag in args.lags if lag <= 16], args.versions, args.judge_seconds)
        return
    runs = [
        Run(method=method, lag=lag, seed=seed, versions=args.versions)
        for method, lag, seed in itertools.product(
            args.methods, args.lags, range(args.first_seed, args.first_seed + args.seeds)
        )
    ]
    rows = sweep(runs, WORK / f"{setting()}.jsonl", args.jobs)
    print(f"\n{args.seeds} seeds from {args.first_seed} on\n\n{tables(rows, args.methods, args.lags)}\n")
    print("\n".join(claims(rows, args.lags)))
    draw(rows, args.methods, args.lags, WORK / "staleness.png")
    print(f"picture {WORK.relative_to(ROOT) / 'staleness.png'}")


def setting() -> str:
    """Return a name for the trained task: results of another task are not mixed in."""
    from tests.bench.pinned import Task

    return hashlib.sha256(json.dumps(asdict(Task()), sort_keys=True).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
