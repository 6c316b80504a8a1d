"""Samples and seconds to reward 0.9: Tidemill, synchronous and asynchronous, against TRL's GRPOTrainer on the same
task.

Same model, tokenizer, prompts, reward, batch, optimizer and seed; one torch thread a process. TRL is one process,
Tidemill is bus, engine, actor, feeder, rank and their parents. They take turns, so that other load on the machine
affects all of them.

``seconds`` count from the beginning of training: TRL's on_train_begin (model loaded, nothing generated); Tidemill's
first request for a batch (model loaded; the wait for the engine to come up and for the first samples is included).
``with start`` counts from the command. ``CPU`` is user and system time of all processes, from the first step's end to
the crossing: the cost of the run, independent of other load.
"""

import argparse
import filecmp
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.meter import Metered, metered
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.prepare import prepare
from tidemill.launch.settings.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "launch/configs/digits.yaml"
TARGET, OVER = 0.9, 5
"""Target: mean reward, and number of consecutive steps over which it is taken."""
LAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The point at which a run crossed the target; ``step`` None = it never did, and the other figures are those of its
    end.
    """

    step: int | None
    samples: int
    seconds: float
    with_start_s: float
    cpu_ms_per_step: float
    last: float
    """Mean reward of the last steps."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench learn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 2], help="values of max_lag")
    args = parser.parse_args(arguments)
    work = ROOT / "runs" / "bench" / "learn"
    subprocess.run(["make", "--silent", ".venv-trl/.ready"], cwd=ROOT, check=True)
    results: dict[str, list[Reached]] = {}
    for seed in range(args.seeds):
        note(results, "TRL", run_trl(work, seed, args.steps))
        for lag in args.lags:
            note(results, f"max_lag {lag}", run_tidemill(work, seed, args.steps, lag))
    report(results)


def run_trl(work: Path, seed: int, steps: int) -> Reached:
    config = load(CONFIG, [f"seed={seed}"]).config
    assert config.prepare is not None
    prepared = prepare(config.prepare, work / f"trl-{seed}")
    out = work / f"trl-{seed}.jsonl"
    script = str(Path(__file__).with_name("trl_grpo.py"))
    command = [".venv-trl/bin/python", script, "--model", str(prepared.model), "--prompts", str(prepared.prompts)]
    command += ["--settings", json.dumps(trl_settings(config, seed, steps)), "--out", str(out)]
    run = metered(command, lines_file=out, log_file=work / f"trl-{seed}.log", directory=ROOT)
    return crossed(run, "reward", config.samples_per_step, began_s=0.0)


def trl_settings(config: RunConfig, seed: int, steps: int) -> dict[str, object]:
    """Return the configuration as settings of TRL. Refuses settings that ``trl_grpo.py`` does not pass on."""
    learner, optimizer, algorithm = config.learner, config.learner.optimizer, config.learner.algorithm
    assert (optimizer.warmup_steps, optimizer.lr_decay, optimizer.weight_decay) == (0, "constant", 0.0), optimizer
    assert (algorithm.advantage, algorithm.clip.low, algorithm.clip.high) == ("grpo", 0.2, 0.28), algorithm
    assert config.sampling.temperature == 1.0, config.sampling
    return {
        "steps": steps,
        "groups": learner.groups_per_step,
        "group_size": learner.group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "seed": seed,
    }


def run_tidemill(work: Path, seed: int, steps: int, lag: int) -> Reached:
    directory = work / f"lag-{lag}-{seed}"
    settings = (
        f"directory={directory}",
        f"seed={seed}",
        f"staleness.max_lag={lag}",
        f"learner.steps={steps}",
        "up.require_reward=-1",
    )
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "up",
        str(CONFIG),
        "--fresh",
        *(word for each in settings for word in ("--set", each)),
    ]
    run = metered(
        command, lines_file=directory / "metrics.jsonl", log_file=work / f"lag-{lag}-{seed}.log", directory=ROOT
    )
    for file in ("model/model.safetensors", "prompts.jsonl"):
        assert filecmp.cmp(work / f"trl-{seed}" / file, directory / "prepared" / file, shallow=False), (
            f"{file} is not the one TRL had"
        )
    first = run.lines[0]
    began_s = first["seconds"] - first["train/wait_seconds"] - first["train/step_seconds"]
    return crossed(run, "data/reward_mean", int(first["data/samples"]), began_s=began_s)


def crossed(run: Metered, name: str, samples_per_step: int, *, began_s: float) -> Reached:
    """Return the first crossing of the target."""
    rewards = [line[name] for line in run.lines]
    ends = (end for end in range(OVER, len(rewards) + 1) if sum(rewards[end - OVER : end]) / OVER >= TARGET)
    step = next(ends, None)
    end = step or len(rewards)
    return Reached(
        step=step,
        samples=end * samples_per_step,
        seconds=run.lines[end - 1]["seconds"] - began_s,
        with_start_s=run.at(end).wall_s,
        cpu_ms_per_step=1e3 * run.cpu_s_per_line(1, end),
        last=sum(rewards[-LAST:]) / len(rewards[-LAST:]),
    )


def note(results: dict[str, list[Reached]], name: str, found: Reached) -> None:
    """Record and print one run."""
    results.setdefault(name, []).append(found)
    where = f"step {found.step}" if found.step else "never"
    print(
        f"seed {len(results[name]) - 1} {name:<10} {TARGET} at {where}: {found.samples} samples, {found.seconds:.1f} s "
        f"(with start {found.with_start_s:.1f}), {found.cpu_ms_per_step:.0f} CPU ms/step, last reward {found.last:.3f}",
        flush=True,
    )


def report(results: dict[str, list[Reached]]) -> None:
    """Print medians over the seeds; ratios to TRL's run of the same seed, which came just before: their median and
    range.
    """
    print(
        f"{'to reward ' + str(TARGET):<14}{'samples':>9}{'seconds':>9}{'with start':>12}{'CPU ms/step':>13}"
        f"{'last reward':>13}{'never':>7}"
    )
    for name, runs in results.items():
        samples, seconds, with_start_s, cpu_ms = (median(column) for column in zip(*map(figures, runs), strict=True))
        last, never = median(run.last for run in runs), sum(run.step is None for run in runs)
        print(f"{name:<14}{samples:>9.0f}{seconds:>9.1f}{with_start_s:>12.1f}{cpu_ms:>13.0f}{last:>13.3f}{never:>7}")
    for name, runs in results.items():
        if name != "TRL":
            print(f"RATIO {name} / TRL: {ratios(runs, results['TRL'])}")


def figures(run: Reached) -> tuple[float, float, float, float]:
    return run.samples, run.seconds, run.with_start_s, run.cpu_ms_per_step


def ratios(ours: Sequence[Reached], theirs: Sequence[Reached]) -> str:
    """Return the ratios for the seeds with which both reached the target."""
    pairs = [(figures(mine), figures(trl)) for mine, trl in zip(ours, theirs, strict=True) if mine.step and trl.step]
    if not pairs:
        return "with no seed did both get there"
    shown = []
    for place, name in enumerate(("samples", "seconds", "with start", "CPU a step")):
        found = [mine[place] / trl[place] for mine, trl in pairs]
        shown.append(f"{name} {median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
    return f"{', '.join(shown)}, {len(pairs)} seeds"


if __name__ == "__main__":
    main()
