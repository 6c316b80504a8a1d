"""Reward against seconds: a warm start on written answers and RL from there, beside RL alone for the same time.

python -m tests.bench warm_start [--lr 2e-3]

The task is that of ``make arithmetic``: sums of two numbers of two digits, a random model of two layers. ``warm
start``: 300 steps of cross-entropy, then 100 steps of RL from the checkpoint. ``RL alone``: the same configuration of
RL from the random weights, with ``--lr``, for as many seconds as the two runs together took, their starts included. One
after the other, on the same machine; the ratio is that of the rewards at the end, each the mean of ten steps. The
reward is the share of right digits.
"""

import argparse
import statistics
import sys
from pathlib import Path

from tests.bench.meter import Metered, metered

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "runs" / "bench" / "warm_start"
TAUGHT, LEARNT = (ROOT / "launch/configs" / name for name in ("arithmetic.yaml", "arithmetic_rl.yaml"))
TARGET, MEAN_OF = 0.9, 10
SHOWN = 8
"""Columns of the table."""

Curve = list[tuple[float, float]]
"""(seconds since the first command was started, reward of a step)."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench warm_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=2e-3,
        help="learning rate of RL alone (default 2e-3; from the warm start it is 5e-4)",
    )
    args = parser.parse_args(arguments)
    taught = up(TAUGHT, "taught")
    checkpoint = max((WORK / "taught/checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    learnt = up(LEARNT, "learnt", "--from-checkpoint", str(checkpoint))
    began_s, seconds = taught.seen[-1].wall_s, taught.seen[-1].wall_s + learnt.seen[-1].wall_s
    alone = up(
        LEARNT, "alone", "--set", f"learner.optimizer.lr={args.lr}", "--set", "learner.steps=100000", for_s=seconds
    )
    curves = {"warm start": smoothed(learnt, began_s), "RL alone": smoothed(alone, 0.0)}
    print(
        (
            f"warm start: {began_s:.0f} s, cross-entropy {taught.lines[0]['train/sft_loss']:.2f} -> "
            f"{taught.lines[-1]['train/sft_loss']:.2f}; "
        ),
        end="",
    )
    print(
        f"RL: {len(learnt.lines)} steps in {seconds - began_s:.0f} s; RL alone: {len(alone.lines)} steps in "
        f"{seconds:.0f} s"
    )
    report(curves, seconds)
    draw(curves, began_s, WORK / "warm_start.png")
    print(f"picture {(WORK / 'warm_start.png').relative_to(ROOT)}")


def up(config: Path, name: str, *words: str, for_s: float = 0.0) -> Metered:
    """Run a configuration in a directory of its own, for ``for_s`` seconds at most."""
    directory = WORK / name
    settings = (f"directory={directory}", "up.require_reward=-1")
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "up",
        str(config),
        "--fresh",
        *words,
        *(word for one in settings for word in ("--set", one)),
    ]
    return metered(
        command, lines_file=directory / "metrics.jsonl", log_file=WORK / f"{name}.log", directory=ROOT, for_s=for_s
    )


def smoothed(run: Metered, began_s: float) -> Curve:
    """Return the mean reward of the last ``MEAN_OF`` steps behind each step that has so many."""
    rewards = [line["data/reward_mean"] for line in run.lines]
    numbers = range(MEAN_OF, len(rewards) + 1)
    return [
        (began_s + run.at(number).wall_s, statistics.mean(rewards[number - MEAN_OF : number])) for number in numbers
    ]


def report(curves: dict[str, Curve], seconds: float) -> None:
    ends = [seconds * number / SHOWN for number in range(1, SHOWN + 1)]
    print(f"| seconds | {' | '.join(f'{end:.0f}' for end in ends)} |\n|---|{'---|' * SHOWN}")
    for name, curve in curves.items():
        shown = [next((f"{mean:.2f}" for at, mean in reversed(curve) if at <= end + 1), "") for end in ends]
        print(f"| {name} | {' | '.join(shown)} |")
    for name, curve in curves.items():
        reached = next((f"after {at:.0f} s" for at, mean in curve if mean >= TARGET), f"not in {seconds:.0f} s")
        print(f"{name}: reward {TARGET} (mean of {MEAN_OF} steps) {reached}; at the end {curve[-1][1]:.3f}")
    print(f"ratio of the rewards at the end: {curves['warm start'][-1][1] / max(curves['RL alone'][-1][1], 1e-9):.2f}")


def draw(curves: dict[str, Curve], began_s: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.2))
    for name, curve in curves.items():
        axis.plot(*zip(*curve, strict=True), label=name, linewidth=1)
    axis.axvspan(0, began_s, alpha=0.12, label="cross-entropy on written answers")
    axis.set_xlabel("seconds", fontsize=8)
    axis.set_ylabel("reward of the sampled batch", fontsize=8)
    axis.set_ylim(0, 1)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
