"""A real Slurm cluster on one machine: Debian's daemons on machines of ``tests/net/lab.py``, so that every node has a
name, an address and processes of its own, and can vanish.

    with SlurmLab(tmp_path) as slurm:
        job = slurm("sbatch", "--parsable", "job.sh")

``login`` has the controller, munged and the commands; n1, n2, ... run jobs. Partitions: ``main`` and, of the same
nodes, ``spot``, whose jobs are requeued when ``main`` wants their processors. No control groups and no accounting.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.net.lab import Lab, NoLab, Started, why_not
from tests.programs import missing
from tests.waits import poll

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
LOGIN = "login"
CPUS = 8
REQUEUE_S = 5
"""Seconds that a requeued job waits: ``cred_expire``, 120 by default."""
DOWN_S = 10
"""Seconds without an answer after which a node is down; its jobs are requeued."""
KILL_WAIT_S = 30
_CONF = """ClusterName=lab
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge.socket,cred_expire={requeue_s}
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SlurmdTimeout={down_s}
SlurmctldTimeout=10
KillWait={kill_wait_s}
MinJobAge=3600
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} CPUs={cpus} RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES PriorityTier=10 LLN=YES MaxTime=INFINITE State=UP
PartitionName=spot Nodes={nodes} PriorityTier=1 LLN=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str:
    """Return why there can be no cluster here; empty if there can."""
    if packages := missing(PROGRAMS):
        return f"Slurm: want {', '.join(packages)}"
    return why_not()


class SlurmLab:
    """A cluster while entered. Calling it runs a command on the login node and returns its output."""

    def __init__(self, directory: Path, *, nodes: int = 3) -> None:
        self.directory = directory / "slurm"
        self.directory.mkdir(mode=0o755)
        for above in (directory, directory.parent):  # munge refuses a socket that not every user reaches
            above.chmod(above.stat().st_mode & 0o7777 | 0o055)  # /tmp stays writable for all, and sticky
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.lab = Lab(self.directory, LOGIN, *self.nodes)
        self._daemons: list[Started] = []

    def __enter__(self) -> Self:
        self._configure()
        self.lab.__enter__()
        try:
            here = self.directory
            files = [
                *(f"--key-file={here}/munge.key", f"--socket={here}/munge.socket", f"--pid-file={here}/munged.pid"),
                *(f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed"),
            ]
            self._start(LOGIN, "munged", "--foreground", "--force", *files)
            poll((here / "munge.socket").exists)
            self._start(LOGIN, "slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            poll(lambda: self.idle() == set(self.nodes), every_s=0.1, timeout_s=60)
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lab.close()

    def __call__(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Return the output of a command on the login node. Raises NoLab with its errors, unless ``check`` is False."""
        where = ["-C", str(cwd)] if cwd else []
        try:
            return self.lab[LOGIN].run("env", *where, f"SLURM_CONF={self.directory}/slurm.conf", *command).strip()
        except NoLab:
            if check:
                raise
            return ""

    def _configure(self) -> None:
        here = self.directory
        key = here / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (here / "state").mkdir()
        (here / "gres.conf").write_text("Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n")
        text = _CONF.format(
            login=LOGIN,
            here=here,
            nodes=",".join(self.nodes),
            cpus=CPUS,
            requeue_s=REQUEUE_S,
            down_s=DOWN_S,
            kill_wait_s=KILL_WAIT_S,
        )
        (here / "slurm.conf").write_text(text)

    def _start(self, machine: str, *command: str) -> Started:
        log, env = self.directory / f"{machine}-{command[0]}.out", {"SLURM_CONF": f"{self.directory}/slurm.conf"}
        return self.lab[machine].start(command, log=log, env=env)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start(name, "slurmd", "-D", "-N", name)

    def idle(self) -> set[str]:
        """Return the nodes without a job that take one."""
        return set(self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def jobs(self) -> dict[str, str]:
        """Return the state of each job that has not ended, by its id (JOB or JOB_TASK)."""
        lines = self("squeue", "-h", "-r", "-o", "%i %T", check=False).splitlines()
        return dict(line.split(None, 1) for line in lines)

    def programs(self) -> list[str]:
        """Return the commands on all nodes of programs that belong to jobs."""
        lines = [line for node in self.nodes for line in self.lab[node].run("ps", "-eo", "args").splitlines()]
        return [line for line in lines if any(word in line for word in ("tidemill", "nats-server", "slurmstepd"))]

    def vanish(self, node: str) -> None:
        """A node loses power."""
        self.lab[node].vanish()

    def boot(self, node: str) -> None:
        """The node returns."""
        self.lab[node].boot()
        self.start_node(node)

    def report(self) -> str:
        """Return states and logs, for a failure's message."""
        logs = "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}"
            for file in sorted(self.directory.glob("*.out"))
        )
        return f"{self('squeue', '-r', check=False)}\n{self('sinfo', '-N', check=False)}\n{logs}"
