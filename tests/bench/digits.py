"""CPU time of the main job, process by process, beside another checkout of the project.

python -m tests.bench digits [--against DIRECTORY] [--steps 160] [--rounds 3]

Each round runs ``launch/configs/digits.yaml`` once in this checkout and once in the other, with the ``.venv`` of each.
A process has a name by its role, and processes of one role are added. ``start`` is its CPU time until the first step is
recorded, ``sample`` its CPU time for a sample of the later steps. The figures are medians over the rounds; bytecode is
compiled before the first.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.meter import MEMORY_EVERY_S, pss_bytes
from tests.tree import ROOT

LOOK_EVERY_S = 0.2
CONFIG = "launch/configs/digits.yaml"
SAMPLES_PER_STEP = 256
"""Of ``CONFIG``."""
ALL = "all"


@dataclass(slots=True)
class Costs:
    """CPU seconds of one run, by role."""

    start: dict[str, float] = field(default_factory=dict)
    """Until its first step was recorded."""
    total: dict[str, float] = field(default_factory=dict)
    """Until the last look at each process; ``all`` is exact."""
    memory_gb: dict[str, float] = field(default_factory=dict)
    """Largest proportional set sizes, by readings a second apart; empty = not read."""


def role(process: psutil.Process) -> str:
    """Return the name of a process by its command: that of its role, module or program."""
    words = process.cmdline()
    if "-m" in words[:-1]:
        module, *arguments = words[words.index("-m") + 1 :]
        named = [word for word in arguments if not word.startswith("-")]
        return named[0] if module in ("tidemill", "launch") and named else module
    return "up" if "up" in words[1:3] else Path(words[0]).name


def run(directory: Path, config: str, settings: Sequence[str], *, with_memory: bool = False) -> Costs:
    """Run a configuration with the ``.venv`` of a checkout. Raises SystemExit with its last lines when it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as run_directory, tempfile.TemporaryFile("w+") as log:
        command = [str(directory / ".venv/bin/tidemill"), "up", config, "--fresh"]
        command += [word for setting in (f"directory={run_directory}/run", *settings) for word in ("--set", setting)]
        child = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log)
        costs, names, seen, read_s = Costs(), {}, {}, 0.0
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            look(psutil.Process(child.pid), names, seen)
            if with_memory and time.monotonic() - read_s >= MEMORY_EVERY_S:
                raise_peaks(costs.memory_gb, names)
                read_s = time.monotonic()
            if not costs.start and has_line(Path(run_directory) / "run/metrics.jsonl"):
                costs.start = by_role(names, seen)
            time.sleep(LOOK_EVERY_S)
        _, child.returncode, usage = ended
        costs.total = by_role(names, seen) | {ALL: usage.ru_utime + usage.ru_stime}
        if child.returncode:
            log.seek(0)
            raise SystemExit(f"{directory}: want exit code 0, got {child.returncode}:\n{log.read()[-2000:]}")
    return costs


def main_job(directory: Path, steps: int) -> Costs:
    return run(directory, CONFIG, (f"learner.steps={steps}", "up.require_reward=0"))


def look(parent: psutil.Process, names: dict[int, str], seen: dict[int, float]) -> None:
    """Read the CPU seconds of a process and its descendants into ``seen``, by process id."""
    for process in (parent, *parent.children(recursive=True)):
        try:
            times, names[process.pid] = process.cpu_times(), role(process)
        except (psutil.Error, IndexError):  # ended meanwhile
            continue
        seen[process.pid] = times.user + times.system


def raise_peaks(peaks: dict[str, float], names: dict[int, str]) -> None:
    """Raise the largest memory of each role, and of all together, to that of its processes now."""
    for name, gb in by_role(names, {pid: pss_bytes(pid) / 1e9 for pid in names}).items():
        peaks[name] = max(peaks.get(name, 0.0), gb)


def by_role(names: dict[int, str], seen: dict[int, float]) -> dict[str, float]:
    """Return the numbers of processes by role, with the sum of all."""
    sums: defaultdict[str, float] = defaultdict(float)
    for pid, number in seen.items():
        sums[names[pid]] += number
    return {**sums, ALL: sum(sums.values())}


def has_line(file: Path) -> bool:
    return file.exists() and b"\n" in file.read_bytes()


def medians(runs: list[Costs], steps: int) -> dict[str, tuple[float, float, float]]:
    """Return CPU seconds of the whole run and of its start, and CPU milliseconds of a sample, by role."""
    roles = sorted({name for costs in runs for name in costs.total}, key=lambda name: (name == ALL, name))
    table = {}
    for name in roles:
        totals = [costs.total.get(name, 0.0) for costs in runs]
        starts = [costs.start.get(name, 0.0) for costs in runs]
        trained = max(1, steps - 1) * SAMPLES_PER_STEP
        samples = [(total - start) / trained for total, start in zip(totals, starts, strict=True)]
        table[name] = (statistics.median(totals), statistics.median(starts), 1e3 * statistics.median(samples))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout with its .venv")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    checkouts = [ROOT] + ([args.against.resolve()] if args.against else [])
    runs: dict[Path, list[Costs]] = {directory: [] for directory in checkouts}
    for number in range(args.rounds):
        for directory in checkouts[:: 1 if number % 2 else -1]:
            if not number:
                main_job(directory, 1)
            runs[directory].append(main_job(directory, args.steps))
    tables = [medians(runs[directory], args.steps) for directory in checkouts]
    report(tables, args)


def report(tables: list[dict[str, tuple[float, float, float]]], args: argparse.Namespace) -> None:
    print(f"{args.steps} steps, medians of {args.rounds} rounds: CPU s, CPU s to the first step, CPU ms a sample")
    here, other = tables[0], tables[-1]
    for name in sorted({*here, *other}, key=lambda name: (name == ALL, name)):
        rows = [table.get(name, (0.0, 0.0, 0.0)) for table in tables]
        cells = "   |".join(f"{total:8.1f}{start:8.1f}{sample:8.3f}" for total, start, sample in rows)
        ratio = f"   ratio {rows[0][0] / rows[1][0]:.2f}" if len(rows) > 1 and rows[1][0] else ""
        print(f"{name:16}{cells}{ratio}")
    if args.against:
        print(f"RATIO CPU-s here / there: {here[ALL][0] / other[ALL][0]:.3f}")


if __name__ == "__main__":
    main()
