"""Cost of evaluation beside training: samples/s that are trained with evaluations all the time, against the same run
without any.

Both runs have the same model, prompts, engine, actor and seed, one after the other on the same cores, in rounds. With
``eval.every: 1`` the next evaluation begins when the last one ends, so there is one at any time; at most ``--open``
prompts of it are out. The engine gives each sequence the same share of its time, so an evaluation may cost as much of
the training's rate as it has of the generated
tokens: the last ratio is 1 where it costs just that. The evaluation that is open at the last step ends after it, and is
counted whole.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.learn import CONFIG, ROOT
from tests.bench.meter import metered
from tidemill.launch.settings.config_loader import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    rate: float
    """Trained samples per second, from the first step to the last."""
    eval_share: float
    """Share of the generated tokens that belongs to evaluations."""
    evaluations: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--open", type=int, default=8, help="eval.max_open_tasks")
    args = parser.parse_args(arguments)
    costs, shares = [], []
    for number in range(args.rounds):
        without, beside = run(number, args, evaluates=False), run(number, args, evaluates=True)
        costs.append(beside.rate / without.rate)
        shares.append(costs[-1] / (1 - beside.eval_share))
        print(
            f"round {number}: {without.rate:.0f} samples/s trained without, {beside.rate:.0f} with "
            f"{beside.evaluations} evaluations, which "
            f"have {beside.eval_share:.0%} of the generated tokens",
            flush=True,
        )
    print(f"RATIO trained with evaluations / without: {median(costs):.2f}")
    print(f"RATIO of that to the share of tokens that is left to training: {median(shares):.2f}")


def run(number: int, args: argparse.Namespace, *, evaluates: bool) -> Measured:
    """Run the steps, and return the rate between the first and the last."""
    directory = ROOT / "runs" / "bench" / f"evaluation-{number}-{'beside' if evaluates else 'without'}"
    held = directory.with_suffix(".held.jsonl")
    held.parent.mkdir(parents=True, exist_ok=True)
    held.write_text("".join(json.dumps({"prompt": f"{n}=", "label": f"{n}"}) + "\n" for n in range(100, 164)))
    settings = [
        *(f"directory={directory}", f"seed={number}", f"learner.steps={args.steps}"),
        *("learner.checkpoint_every=0", "up.require_reward=-1"),
    ]
    if evaluates:
        # The last version is not evaluated: nothing is trained beside that.
        sets = json.dumps({"held": {"path": str(held), "samples": 4}})
        settings += [f"eval.sets={sets}", "eval.every=1", "eval.at_end=false", f"eval.max_open_tasks={args.open}"]
    config = load(CONFIG, settings).config
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "up",
        str(CONFIG),
        "--fresh",
        *(word for each in settings for word in ("--set", each)),
    ]
    done = metered(
        command, lines_file=directory / "metrics.jsonl", log_file=directory.with_suffix(".log"), directory=ROOT
    )
    seconds = done.lines[-1]["seconds"] - done.lines[0]["seconds"]
    scores = evaluations(directory / "evaluations.jsonl") if evaluates else []
    tokens = sum(line["samples"] * line.get("tokens_mean", 0.0) for line in scores)
    trained = json.loads((directory / "summary.json").read_text())["tokens_generated"]
    return Measured(
        rate=(len(done.lines) - 1) * config.samples_per_step / seconds,
        eval_share=tokens / (tokens + trained),
        evaluations=len(scores),
    )


def evaluations(file: Path) -> list[dict[str, float]]:
    """Return the lines of evaluations.jsonl."""
    return [json.loads(line) for line in file.read_text().splitlines()]
