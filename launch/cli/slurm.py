"""``tidemill slurm``: write the sbatch files of a run, and submit them: a head with bus and learner, and arrays of
``tidemill host`` with the other processes.

The files are text from a configuration alone. What the jobs do is in the templates (``launch/deploy/slurm_jobs/``),
which are shell scripts with names between @.
"""

import argparse
import getpass
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.actors.guarded_settings import guarded
from tidemill.bus.system.files import write_whole
from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import loaded_config, print_checked
from tidemill.launch.devices.demand import devices_of
from tidemill.launch.run import desired
from tidemill.launch.run.access import auth_dir
from tidemill.launch.run.desired import ROLES
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded

TEMPLATES = Path(__file__).parents[1] / "deploy" / "slurm_jobs"
HEAD, SHARED = "head", "job.sh"
DRAINED = 10
"""Exit code of a drained learner (``--drained-code``), which no other end of it has."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # Below the ports that Linux gives to clients (32768 and above)
_HEAD_CPUS = 2  # Of the bus and the feeder, beside the ranks
_WORKER_CPUS = {"engine": 2, "scorer": 1, "actor": 1}
_SLACK_S = 30  # Seconds before the time limit, beside the seconds of a drain
JOBS_FILE = "jobs"
ENDING = "COMPLETING"
FORGOTTEN = "Invalid job id"  # squeue's error when Slurm knows none of the jobs any longer
CANCELLED_S = 120.0  # Longer than KillWait, the time between SIGTERM and SIGKILL (30 s by default)
ANSWER_S = 60.0  # Seconds for a command of Slurm to answer; it retries by itself while its controller is away


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Numbers and resources of the jobs, as options of sbatch."""

    counts: Mapping[str, int]
    """Number of processes by role: engine, scorer, actor."""
    per_job: Mapping[str, int] = field(default_factory=dict)
    """Processes in each job of a role's array; default 1."""
    partition: str = ""
    engine_partition: str = ""
    account: str = ""
    time: str = ""
    gpus_per_node: int = 0
    """GPUs of each node of the learner; with it engines get the GPUs that they need."""
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More options of sbatch by job (``head``, ``engines``, ...), ``""`` = all; later ones win."""

    def hosts(self, role: str) -> int:
        """Return the number of jobs in a role's array."""
        return -(-self.counts.get(role, 0) // self.per_job.get(role, 1))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Paths, the same on all nodes."""

    working_directory: Path
    programs: Path
    """Directory of the program ``tidemill``."""
    out: Path


def changed_settings(config: RunConfig, jobs: Jobs) -> list[str]:
    """Return settings that a run on Slurm needs, unless they are set: users on the bus, and a port that stays.

    Raises ValueError for settings with which it cannot run.
    """
    if config.bus.url or config.bus.cluster > 1 or config.bus.server_name:
        raise ValueError("bus.url, bus.cluster, bus.server_name: want none, as the head job has the bus")
    if config.learner.nodes == 0:
        raise ValueError("learner.nodes: want a number, got 0 (auto); cure: --nodes N")
    if config.learner.colocated:
        raise ValueError("learner.colocated: want false on Slurm, where engines have jobs of their own, got true")
    for name, teacher in config.actor.teachers.items():
        if not teacher.servers:
            cure = "start `tidemill teacher` in a job of yours"
            raise ValueError(f"actor.teachers.{name}.urls: want the servers of the teacher, got none; cure: {cure}")
    settings = []
    if config.bus.port < 0:
        key = f"{getpass.getuser()} {config.run} {config.root.absolute()}"
        settings.append(f"bus.port={FIRST_PORT + zlib.crc32(key.encode()) % NUM_PORTS}")
    if not config.bus.insecure:
        users = max(sum(map(jobs.hosts, ROLES)), *jobs.counts.values(), config.bus.auth_users)
        settings += ["bus.auth=true", f"bus.auth_users={users}"]
    if config.learner.nodes > 1 and config.learner.checkpoint.store == "local":
        settings.append("learner.checkpoint.store=shared")
    return settings


def files(config: RunConfig, jobs: Jobs, place: Place) -> dict[str, str]:
    """Return the text of each file by its name."""
    directory = place.working_directory
    values = {
        "RUN": config.run,
        "CWD": shlex.quote(str(directory)),
        "BIN": shlex.quote(str(place.programs)),
        "RUN_DIR": shlex.quote(str(directory / config.root)),
        "HERE": shlex.quote(str(directory / place.out)),
        "DRAINED": str(DRAINED),
    }
    texts = {
        SHARED: _filled(SHARED, values),
        f"{HEAD}.sbatch": _filled(f"{HEAD}.sbatch", values | _head(config, jobs, place)),
    }
    first_host = 0
    for role in ROLES:
        if jobs.hosts(role):
            texts[f"{role}s.sbatch"] = _filled(
                "workers.sbatch", values | _workers(role, first_host, config, jobs, place)
            )
            first_host += jobs.hosts(role)
    return texts


def _head(config: RunConfig, jobs: Jobs, place: Place) -> dict[str, str]:
    nodes = config.learner.nodes
    cpus = config.learner.num_ranks // nodes * config.learner.threads + _HEAD_CPUS
    lines = [f"--nodes={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}"]
    lines += [f"--gpus-per-node={jobs.gpus_per_node}"] * (jobs.gpus_per_node > 0)
    prepare = 'run_to_end tidemill prepare "$config"\n' if config.prepare is not None else ""
    warning_s = round(config.up.drain_s) + _SLACK_S
    return {
        "NODES": str(nodes),
        "CPUS": str(cpus),
        "PREPARE": prepare,
        "DIRECTIVES": _directives(HEAD, lines, warning_s, jobs.partition, config, jobs, place),
    }


def _workers(role: str, first_host: int, config: RunConfig, jobs: Jobs, place: Place) -> dict[str, str]:
    per_job = jobs.per_job.get(role, 1)
    lines = [
        f"--array=0-{jobs.hosts(role) - 1}",
        f"--nodes=1 --ntasks=1 --cpus-per-task={per_job * _WORKER_CPUS[role]}",
    ]
    partition = jobs.partition
    if role == "engine":
        lines += [f"--gpus-per-node={per_job * devices_of(config.engine)}"] * (jobs.gpus_per_node > 0)
        partition = jobs.engine_partition or partition
    options = ['--users "$own/users"'] if config.bus.auth else []
    options += [f"--allow {shlex.quote(f'{path}={text}')}" for path, _, text in guarded(to_map(config), role)]
    return {
        "TITLE": f"{role.capitalize()}s",
        "ROLE": role,
        "PER_JOB": str(per_job),
        "FIRST_HOST": str(first_host),
        "USERS": _users(role, per_job, config, place) if config.bus.auth else "",
        "OPTIONS": "".join(f"            {option} \\\n" for option in options),
        "DIRECTIVES": _directives(f"{role}s", lines, 60, partition, config, jobs, place),
    }


def _users(role: str, per_job: int, config: RunConfig, place: Place) -> str:
    """Return the lines that give a host and its processes their users of the bus (docs/security.md)."""
    return f"""
# Users of the bus, of this host and its {role}s: files that the bus makes at its first start.
auth={shlex.quote(str(place.working_directory / auth_dir(config)))}
export TIDEMILL_BUS_CREDENTIALS=$auth/$host.env
mkdir -p "$own/users"
for ((number = SLURM_ARRAY_TASK_ID * {per_job}; number < (SLURM_ARRAY_TASK_ID + 1) * {per_job}; number++)); do
    ln -sf "$auth/{role}-$number.env" "$own/users/"
done
"""


def _directives(
    job: str, lines: Sequence[str], warning_s: int, partition: str, config: RunConfig, jobs: Jobs, place: Place
) -> str:
    """Return the lines #SBATCH of a job."""
    log_file = place.working_directory / place.out / (f"{job}-%j.log" if job == HEAD else f"{job}-%A_%a.log")
    options = [
        f"--job-name={config.run}-{job}",
        *lines,
        "--requeue --open-mode=append",
        f"--signal=B:TERM@{warning_s}",
        f"--output={shlex.quote(str(log_file))}",
        *(f"--{name}={value}" for name, value in (("partition", partition), ("account", jobs.account)) if value),
        *([f"--time={jobs.time}"] if jobs.time else []),
        *jobs.lines.get("", ()),
        *jobs.lines.get(job, ()),
    ]
    return "\n".join(f"#SBATCH {option}" for option in options)


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


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
    num_ranks = config.learner.num_ranks // max(config.learner.nodes, 1)
    if config.learner.device != "cpu" and args.gpus_per_node not in (0, num_ranks):
        cure = "--set learner.data_parallel=N with N = nodes x GPUs / (tensor x pipeline x context parallel)"
        want = f"want {num_ranks}, the ranks of the learner on each node, or 0 = ask for none"
        raise ValueError(f"--gpus-per-node: {want}, got {args.gpus_per_node}; cure: {cure}")
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


def refuse_running(out: Path, wait_s: float = CANCELLED_S) -> None:
    """Raise ValueError while jobs that were submitted from ``out`` wait or run: a second head would be a second bus.

    Jobs that Slurm is ending, as after scancel, are awaited for ``wait_s`` seconds.
    """
    file = out / JOBS_FILE
    ids = [line.split()[1] for line in file.read_text().splitlines()] if file.exists() else []
    deadline_s, is_told = time.monotonic() + wait_s, False
    while states := _states(ids):
        cure = "wait for their end" if states == {ENDING} else f"scancel {' '.join(ids)}"
        if states != {ENDING} or time.monotonic() > deadline_s:
            raise ValueError(f"{out}: jobs of this run wait or run ({', '.join(sorted(states))}); cure: {cure}")
        if not is_told:
            print(f"waits up to {wait_s:.0f} s for the jobs that Slurm is ending: {' '.join(ids)}", flush=True)
            is_told = True
        time.sleep(1)


def _states(ids: Sequence[str]) -> set[str]:
    """Return the states of the jobs that have not ended; none without Slurm. Raises ValueError if it gives no answer,
    because jobs that are not seen might run.
    """
    if not ids or shutil.which("squeue") is None:
        return set()
    try:
        return set(_answer("squeue", "--noheader", "--format=%T", f"--jobs={','.join(ids)}").split())
    except ValueError as error:
        if FORGOTTEN in str(error):
            return set()
        raise


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
