"""``tidemill slurm``: write the sbatch files of a run (``launch/deploy/slurm.py``), and submit them."""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.system.files import write_whole
from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import loaded_config, print_checked
from tidemill.launch.deploy.slurm import HEAD, Jobs, Place, changed_settings, files
from tidemill.launch.run import desired
from tidemill.launch.run.desired import ROLES
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded

JOBS_FILE = "jobs"
ANSWER_S = 60.0  # Seconds for a command of Slurm to answer; it retries by itself while its controller is away


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, positional=True)
    parser.add_argument("--submit", action="store_true", help="submit the jobs, and print their ids")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the files and logs (default: slurm/ of the run)")
    for role in ROLES:
        parser.add_argument(f"--{role}s", type=int, metavar="N", help=f"{role}s (default: up.{role}s)")
    per_job = "processes in each job of an array, such as engines=8; repeatable (default: one)"
    parser.add_argument("--per-job", action="append", default=[], metavar="ROLES=N", help=per_job)
    parser.add_argument(
        "--nodes",
        action="append",
        dest="set",
        type=lambda count: f"learner.nodes={count}",
        metavar="N",
        help="nodes of the learner: learner.nodes",
    )
    parser.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of a node of the learner")
    parser.add_argument("--partition", default="", help="partition of all jobs (default: Slurm's)")
    parser.add_argument("--engine-partition", default="", metavar="P", help="of the engines, such as a preemptible one")
    parser.add_argument("--account", default="", help="account of all jobs")
    parser.add_argument("--time", default="", help="time limit of a job; at its end it drains, and is requeued")
    sbatch_help = (
        "one more option of sbatch, --sbatch=--qos=high, or of one job, --sbatch=engines:--constraint=h100; repeatable"
    )
    parser.add_argument("--sbatch", action="append", default=[], metavar="[JOB:]OPTION", help=sbatch_help)


def run(args: argparse.Namespace) -> int:
    """Write the files of the jobs, and submit them. Returns 0. Raises ValueError."""
    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    jobs = _jobs(args, loaded.config)
    args.set = [*changed_settings(loaded.config, jobs), *args.set]
    config = loaded_config(args).config
    root, out = config.root, args.out or config.root / "slurm"
    refuse_running(out)
    place = Place(working_directory=Path.cwd(), programs=Path(sys.executable).parent, out=out)
    texts = files(config, jobs, place)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(root / CONFIG_FILE, yaml_file.dump(recorded(to_map(config))))
    for name, text in texts.items():
        write_whole(out / name, text)
        print(f"{out / name}: written")
    for role in ROLES:
        if f"{role}s.sbatch" not in texts:
            (out / f"{role}s.sbatch").unlink(missing_ok=True)
    if config.bus.insecure:
        print("bus.insecure: every machine that reaches the head's node may do everything on its bus", file=sys.stderr)
    scripts = [name.removesuffix(".sbatch") for name in texts if name.endswith(".sbatch")]
    if not args.submit:
        print("next: the same command with --submit")
        return 0
    submit(out, scripts)
    print(f"watch: tidemill status --run-dir {root}")
    print(f"cancel: scancel $(awk '{{print $2}}' {out / JOBS_FILE})")
    return 0


def _jobs(args: argparse.Namespace, config: RunConfig) -> Jobs:
    """Return what the jobs ask for. Raises ValueError."""
    counts = {role: getattr(args, f"{role}s") for role in ROLES}
    counts = {role: getattr(config.up, f"{role}s") if count is None else count for role, count in counts.items()}
    for option, number in {
        **{f"{role}s": count for role, count in counts.items()},
        "gpus-per-node": args.gpus_per_node,
    }.items():
        if not 0 <= number <= desired.MOST:
            raise ValueError(f"--{option}: want a number from 0 to {desired.MOST}, got {number}")
    for option in ("partition", "engine_partition", "account", "time"):
        text = getattr(args, option)
        if text and len(text.split()) != 1:
            raise ValueError(f"--{option.replace('_', '-')}: want one word, got {text!r}")
    per_job = desired.parse(args.per_job)
    for role, count in per_job.items():
        if count < 1 or counts[role] % count:
            raise ValueError(f"--per-job {role}s: want a divisor of {counts[role]}, the number of {role}s, got {count}")
    lines: dict[str, list[str]] = {}
    names = [HEAD, *(f"{role}s" for role in ROLES)]
    for text in args.sbatch:
        job, _, option = ("", "", text) if text.startswith("-") else text.partition(":")
        if not option.startswith("-") or "\n" in option or job not in ("", *names):
            want = f"an option such as --qos=high, or of one job ({', '.join(names)}) engines:--constraint=h100"
            raise ValueError(f"--sbatch: want {want}, got {text!r}")
        lines.setdefault(job, []).append(option)
    return Jobs(
        counts=counts,
        per_job=per_job,
        partition=args.partition,
        engine_partition=args.engine_partition,
        account=args.account,
        time=args.time,
        gpus_per_node=args.gpus_per_node,
        lines=lines,
    )


def refuse_running(out: Path) -> None:
    """Raise ValueError while jobs that were submitted from ``out`` wait or run: a second head would be a second bus."""
    file = out / JOBS_FILE
    ids = [line.split()[1] for line in file.read_text().splitlines()] if file.exists() else []
    running = ""
    with contextlib.suppress(ValueError):  # all of them are forgotten by now, or there is no Slurm here
        running = _answer("squeue", "--noheader", "--format=%A", f"--jobs={','.join(ids)}") if ids else ""
    if running:
        raise ValueError(f"{out}: jobs of this run wait or run; cure: scancel {' '.join(ids)}")


def submit(out: Path, scripts: Sequence[str]) -> None:
    """Submit the head and, to start behind it, the workers; print and record their ids. Raises ValueError."""
    ids: dict[str, str] = {}
    for name in scripts:
        behind = [f"--dependency=after:{ids[HEAD]}"] if HEAD in ids else []
        ids[name] = _answer("sbatch", "--parsable", *behind, str(out / f"{name}.sbatch")).partition(";")[0]
        print(f"{name}: job {ids[name]}")
        write_whole(out / JOBS_FILE, "".join(f"{job} {number}\n" for job, number in ids.items()))


def _answer(*command: str) -> str:
    """Return the output of a command of Slurm. Raises ValueError with its errors."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=ANSWER_S)
    except FileNotFoundError:
        raise ValueError(f"{command[0]}: no such program here; cure: run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command[0]}: no answer of Slurm in {ANSWER_S:.0f} s; cure: see scontrol ping") from None
    if ended.returncode:
        raise ValueError(f"{' '.join(command)}: exit code {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout.strip()
