"""The sbatch files of a run: a head with bus and learner, and arrays of ``tidemill host`` with the other processes.

Pure text from a configuration; ``launch/cli/slurm.py`` writes and submits it. What the jobs do is in the templates
(``slurm_jobs/``), which are shell scripts with names between @.
"""

import getpass
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.actors.guarded_settings import guarded
from tidemill.launch.devices.demand import devices_of
from tidemill.launch.run.access import auth_dir
from tidemill.launch.run.desired import ROLES
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import RunConfig

TEMPLATES = Path(__file__).parent / "slurm_jobs"
HEAD, SHARED = "head", "job.sh"
DRAINED = 10
"""Exit code of a drained learner (``--drained-code``), which no other end of it has."""
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # Below the ports that Linux gives to clients (32768 and above)
_HEAD_CPUS = 2  # Of the bus and the feeder, beside the ranks
_WORKER_CPUS = {"engine": 2, "scorer": 1, "actor": 1}
_SLACK_S = 30  # Seconds before the time limit, beside those of a drain


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What the jobs ask Slurm for."""

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
