"""Samples and seconds to reward 0.9: Tidemill, synchronous and asynchronous, against TRL's GRPOTrainer on the same task.

Same model directory, tokenizer, prompts, reward, batch, optimizer and seed; one torch thread a process. TRL is one process; Tidemill is
engine, actor, feeder, learner and bus on the same two cores. TRL's clock starts with its training loop; Tidemill's with its first outcome
less one mean step, and the time of the whole command with start-up is printed beside it.
"""

import argparse
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch.prepare import prepare
from launch.settings import load

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "launch/configs/digits.yaml"
TARGET, OVER = 0.9, 5
"""Reached when the mean reward of so many consecutive steps is so high."""
TRL = ("torch==2.13.0", "trl==1.16.0", "datasets", "accelerate")
LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a run crossed the target; None = it never did."""

    samples: int | None
    seconds: float | None
    last: float
    """Mean reward of the last ten steps."""
    whole_s: float
    """Start-up included."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench learn", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--trl-python", default="", help="python of an environment that has TRL; otherwise one is made")
    args = parser.parse_args(arguments)
    work = ROOT / "runs" / "bench" / "learn"
    work.mkdir(parents=True, exist_ok=True)
    python = args.trl_python or make_environment(ROOT / "runs" / "bench" / "trl-venv")
    results: dict[str, list[Reached]] = {}
    for seed in range(args.seeds):
        results.setdefault("TRL", []).append(run_trl(python, work, seed, args.steps))
        for lag in (0, 2):
            results.setdefault(f"Tidemill, max_lag {lag}", []).append(run_tidemill(work, seed, args.steps, lag))
    report(results)


def make_environment(directory: Path) -> str:
    """A virtual environment with TRL; torch first, so that whatever build the index offers satisfies the rest."""
    python = directory / "bin" / "python"
    if not (directory / "ready").exists():
        venv.create(directory, with_pip=True, clear=True)
        for packages in (TRL[:1], TRL):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (directory / "ready").touch()
    return str(python)


def run_trl(python: str, work: Path, seed: int, steps: int) -> Reached:
    config = load(CONFIG, [f"seed={seed}"]).config
    assert config.prepare is not None
    prepared = prepare(config.prepare, work / f"trl-{seed}")
    learner, optimizer = config.learner, config.learner.optimizer
    settings = {
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
    out = work / f"trl-{seed}.jsonl"
    script = str(Path(__file__).with_name("trl_grpo.py"))
    command = [python, script, "--model", str(prepared.model), "--prompts", str(prepared.prompts)]
    command += ["--settings", json.dumps(settings), "--out", str(out)]
    quiet(command)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return crossed(lines, "reward", settings["groups"] * settings["group_size"], began_s=0.0)


def run_tidemill(work: Path, seed: int, steps: int, lag: int) -> Reached:
    directory = work / f"lag-{lag}-{seed}"
    settings = (f"directory={directory}", f"seed={seed}", f"staleness.max_lag={lag}", f"learner.steps={steps}", "up.require_reward=-1")
    command = [sys.executable, "-m", "launch", "up", str(CONFIG), "--fresh"]
    quiet([*command, *(word for setting in settings for word in ("--set", setting))])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    pace_s = (lines[-1]["seconds"] - lines[0]["seconds"]) / (len(lines) - 1)
    return crossed(lines, "data/reward_mean", int(lines[0]["data/samples"]), began_s=lines[0]["seconds"] - pace_s)


def crossed(lines: list[dict[str, Any]], name: str, samples_per_step: int, *, began_s: float) -> Reached:
    """First crossing of the target."""
    rewards = [line[name] for line in lines]
    last, whole_s = sum(rewards[-10:]) / len(rewards[-10:]), lines[-1]["seconds"]
    for end in range(OVER, len(rewards) + 1):
        if sum(rewards[end - OVER : end]) / OVER >= TARGET:
            return Reached(end * samples_per_step, lines[end - 1]["seconds"] - began_s, last, whole_s)
    return Reached(None, None, last, whole_s)


def quiet(command: list[str]) -> None:
    """Run with one thread; its output only if it fails."""
    import os

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def report(results: dict[str, list[Reached]]) -> None:
    """A line a system and the ratios to TRL (medians over seeds)."""
    print(f"{'to reward ' + str(TARGET):<24}{'samples':>10}{'seconds':>10}{'samples/s':>11}{'last reward':>13}{'whole run s':>13}")
    middles: dict[str, tuple[float, float]] = {}
    for name, runs in results.items():
        if any(run.samples is None or run.seconds is None for run in runs):
            never = sum(run.samples is None for run in runs)
            print(f"{name:<24} never in {never} of {len(runs)} runs; last {[round(run.last, 3) for run in runs]}")
            continue
        samples, seconds = median(run.samples or 0 for run in runs), median(run.seconds or 0.0 for run in runs)
        middles[name] = (samples, seconds)
        last, whole = median(run.last for run in runs), median(run.whole_s for run in runs)
        print(f"{name:<24}{samples:>10.0f}{seconds:>10.1f}{samples / seconds:>11.0f}{last:>13.3f}{whole:>13.1f}")
    if "TRL" not in middles:
        return
    for name, (samples, seconds) in middles.items():
        if name != "TRL":
            trl = middles["TRL"]
            print(f"{name} / TRL: samples ratio {samples / trl[0]:.2f}, seconds ratio {seconds / trl[1]:.2f}")


if __name__ == "__main__":
    main()
