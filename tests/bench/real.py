"""The example with a pretrained model (``make real``), against TRL's GRPOTrainer in the same run.

Both have the same model, prompts, rewards, lengths, groups, learning rates, KL coefficient and seed, float32, and one
torch thread a process. TRL's own bonus below an entropy is not asked for. Each seed
runs TRL, then Tidemill. ``CPU s/step``: user and system time of all processes from the end of the first step to the end
of the last. ``memory``: largest sum of the proportional set sizes (PSS) of all processes, each page counted once.
``held-out``: the final models by ``tidemill eval``, with the run's configuration.

``--max-lag 0``: Tidemill's samples are of the weights that they train, as TRL's are. ``--steps`` shortens both sides.

``--against DIRECTORY``: another checkout with its ``.venv`` in TRL's place, such as 06d6f4dc, the commit of 2026-11-29
before prompts, samples without a gradient and frozen weights were computed less often, and keys and values were in
blocks. CPU and memory of each process, of the same run with the settings that both know (without the bonus below an
entropy, scored by ``ifeval`` alone); ``--lora RANK``: of adapters.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev

from tests.bench.digits import ALL, Costs
from tests.bench.digits import run as run_costs
from tests.bench.meter import metered
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.optimizer import learning_rate

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "launch/configs/real.yaml"
WORK = ROOT / "runs/bench/real"
MODEL = "runs/models/SmolLM2-135M-Instruct"
LIMIT_S = 7200.0
"""Of one run of one side, and of one evaluation: a busy machine may be ten times as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The figures of one run of one side."""

    cpu_s_per_step: float
    cpu_s: float
    """Of all processes from their start to the last step."""
    memory_gb: float
    held_out: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="steps of both sides; 0 = as in the configuration")
    parser.add_argument("--max-lag", type=int, help="staleness.max_lag; default: as in the configuration")
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="another checkout in TRL's place")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="with --against: adapters of this rank")
    args = parser.parse_args(arguments)
    needed = [] if args.against else [".venv-trl/.ready", "as-installed"]
    subprocess.run(["make", "--silent", *needed, f"{MODEL}/config.json"], cwd=ROOT, check=True)
    settings = ["eval.every=0", *([f"learner.steps={args.steps}"] if args.steps else [])]
    if args.against:
        compare_checkouts(args.against.resolve(), [*settings, f"learner.lora.rank={args.lora}"])
    else:
        compare_with_trl(args.seeds, settings, [] if args.max_lag is None else [f"staleness.max_lag={args.max_lag}"])


def compare_with_trl(seeds: int, settings: list[str], ours: list[str]) -> None:
    sides: dict[str, list[Side]] = {"TRL": [], "Tidemill": []}
    for seed in range(seeds):
        for name, run, its_own in (("TRL", run_trl, []), ("Tidemill", run_tidemill, ours)):
            sides[name].append(run([f"seed={seed}", *settings, *its_own], WORK / f"{name.lower()}-{seed}"))
            figures_shown = ", ".join(f"{key} {value:.3f}" for key, value in asdict(sides[name][-1]).items())
            print(f"seed {seed} {name}: {figures_shown}", flush=True)
    report(sides["Tidemill"], sides["TRL"])


def run_trl(settings: list[str], work: Path) -> Side:
    config = load(CONFIG, settings).config
    lines, final = work.with_suffix(".jsonl"), work / "final"
    command = ["env", "PYTHONPATH=.venv/as-installed", ".venv-trl/bin/python", "-m", "tests.bench.trl_real"]
    command += ["--model", config.model.path, "--prompts", config.data.path, "--out", str(lines), "--final", str(final)]
    command += ["--settings", json.dumps(trl_settings(config))]
    return measured(command, lines, work, final)


def trl_settings(config: RunConfig) -> dict[str, object]:
    """Return the configuration as settings of TRL. Refuses settings that ``trl_real.py`` does not pass on."""
    learner, optimizer, algorithm = config.learner, config.learner.optimizer, config.learner.algorithm
    assert optimizer.weight_decay == 0.0, optimizer
    assert (algorithm.advantage, algorithm.clip.low, algorithm.clip.high) == ("grpo", 0.2, 0.28), algorithm
    assert (config.sampling.temperature, algorithm.entropy.coef) == (1.0, 0.0), "no entropy bonus at the start"
    return {
        "steps": learner.steps,
        "groups": learner.groups_per_step,
        "group_size": learner.group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "rates": [learning_rate(optimizer, step, learner.steps) for step in range(1, learner.steps + 1)],
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "kl": algorithm.kl.coef,
        "gradient_checkpointing": learner.recompute == "full",
        "seed": config.seed,
        "system_prompt": config.data.system_prompt,
        "parts": {name: asdict(part) for name, part in config.actor.reward_parts.items()},
    }


def run_tidemill(settings: list[str], work: Path) -> Side:
    words = [word for setting in [*settings, f"directory={work}"] for word in ("--set", setting)]
    command = [sys.executable, "-m", "tidemill", "up", str(CONFIG), "--fresh", *words]
    return measured(command, work / "metrics.jsonl", work, work / "final")


def measured(command: list[str], lines: Path, work: Path, final: Path) -> Side:
    log = work.with_suffix(".log")
    run = metered(command, lines_file=lines, log_file=log, directory=ROOT, limit_s=LIMIT_S, with_memory=True)
    return Side(
        cpu_s_per_step=run.cpu_s_per_line(1, len(run.lines)),
        cpu_s=run.seen[-1].cpu_s,
        memory_gb=run.peak_bytes / 1e9,
        held_out=held_out(final),
    )


def held_out(model: Path) -> float:
    """Return the mean score of a model on the held-out set."""
    command = [sys.executable, "-m", "tidemill", "eval", str(model), "--config", str(CONFIG), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["mean"])


def report(ours: list[Side], theirs: list[Side]) -> None:
    """Print medians over the seeds, the mean scores with their standard errors, and the ratios of the runs of each
    seed: their median and range.
    """
    print(f"{'median':<10}{'CPU s/step':>12}{'CPU s':>8}{'memory GB':>11}{'held-out':>10}")
    for name, runs in (("TRL", theirs), ("Tidemill", ours)):
        step, total, memory, score = (median(column) for column in zip(*map(figures, runs), strict=True))
        print(f"{name:<10}{step:>12.1f}{total:>8.0f}{memory:>11.2f}{score:>10.3f}")
    for name, runs in (("TRL", theirs), ("Tidemill", ours)):
        scores = [side.held_out for side in runs]
        error = f"{stdev(scores) / len(scores) ** 0.5:.3f}" if len(scores) > 1 else "unknown of one seed"
        print(f"held-out of {name}: mean {mean(scores):.3f}, standard error {error}")
    for place, name in enumerate(("CPU a step", "CPU with start", "memory", "held-out")):
        ratios = [figures(mine)[place] / figures(trl)[place] for mine, trl in zip(ours, theirs, strict=True)]
        print(f"RATIO Tidemill / TRL: {name} {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def figures(side: Side) -> tuple[float, float, float, float]:
    return side.cpu_s_per_step, side.cpu_s, side.memory_gb, side.held_out


def compare_checkouts(other: Path, settings: list[str]) -> None:
    """Print CPU seconds of a step and the largest memory of each process, here and in another checkout."""
    values, _ = yaml_file.read(CONFIG)
    values["model"]["path"], values["data"]["path"] = str(ROOT / MODEL), str(ROOT / values["data"]["path"])
    values |= {"actor": {"reward": "ifeval", "reward_options": {"share": True}}, "eval": {}}
    del values["learner"]["algorithm"]["entropy"]
    file = WORK / "before.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml_file.dump(values))
    steps = load(file, settings).config.learner.steps
    ours, theirs = (run_costs(directory, str(file), settings, with_memory=True) for directory in (ROOT, other))
    print(f"{'':<12}{'CPU s/step':>12}{'there':>8}{'ratio':>8}{'memory GB':>12}{'there':>8}{'ratio':>8}")
    for role in sorted({*ours.total, *theirs.total}, key=lambda name: (name == ALL, name)):
        cells = []
        for kind in (cpu_s_per_step, memory_gb):
            here, there = kind(ours, role, steps), kind(theirs, role, steps)
            cells.append(f"{here:>12.2f}{there:>8.2f}" + (f"{here / there:>8.2f}" if there > 0.05 else f"{'':>8}"))
        print(f"{role:<12}" + "".join(cells))


def cpu_s_per_step(costs: Costs, role: str, steps: int) -> float:
    """Return the CPU seconds of a step behind the first."""
    return (costs.total.get(role, 0.0) - costs.start.get(role, 0.0)) / max(1, steps - 1)


def memory_gb(costs: Costs, role: str, _steps: int) -> float:
    return costs.memory_gb.get(role, 0.0)


if __name__ == "__main__":
    main()
