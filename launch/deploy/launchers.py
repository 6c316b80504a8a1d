"""The place of this process among all that a launcher has started, from the launcher's variables.

    torchrun, Kubeflow, Ray Train   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    mpirun (Open MPI)               OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    mpirun (MPICH, Intel)           PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                            SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE

Several may be set: a launcher that is started by another one is the nearer. Sources: torchrun's documentation,
"Environment Variables"; Open MPI, "Environment variables set by mpirun"; ``man srun``, "OUTPUT ENVIRONMENT VARIABLES";
MPICH, ``src/pm/hydra``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig

_LARGEST = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A process of a launcher. Ranks are numbered through node by node, and every node has as many."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    job: tuple[str, ...]
    """Values that the processes of one start have in common, and no other start on the machine has."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.local_world

    @property
    def node(self) -> int:
        """Number of this node."""
        return self.rank // self.local_world


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    job: tuple[str, ...]
    cure: str
    """How ranks are numbered node by node."""


_LAUNCHERS = (
    _Launcher(
        name="torchrun",
        rank="RANK",
        world="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world="LOCAL_WORLD_SIZE",
        job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
        cure="set them as torchrun does",
    ),
    _Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        cure="mpirun --map-by ppr:N:node",
    ),
    _Launcher(
        name="mpirun",
        rank="PMI_RANK",
        world="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
        job=(),  # none: the parent is the same for all of a node
        cure="mpirun -ppn N",
    ),
    _Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world="SLURM_STEP_TASKS_PER_NODE",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID"),
        cure="srun --ntasks-per-node=N --distribution=block",
    ),
)


def rank_process(config: RunConfig, environment: Mapping[str, str], parent: int) -> Launched | None:
    """Return the place of this process where a launcher has one for each rank, or one on each of ``learner.nodes``.

    None = the launcher decides nothing. Raises SettingsError for a launcher with another number of processes, unless
    ``learner.nodes`` explains them.
    """
    place = launched(environment, parent)
    if place is None:
        return None
    num_ranks, nodes = (1 if config.debug.rollout_only else config.learner.num_ranks), config.learner.nodes
    if place.world == num_ranks:
        if nodes not in (0, 1, place.nodes):
            why = f"{place.launcher} has started {place.world} processes, {place.local_world} on each node"
            raise SettingsError(f"learner.nodes: want {place.nodes} ({why}), got {nodes}; cure: --nodes auto")
        return place
    if place.local_world == 1 and nodes in (0, place.nodes):
        return place  # the ranks of a node are started by its agent
    if nodes == 1:
        want = f"one process, or {num_ranks}: one for each rank (data x tensor x pipeline x context parallel)"
        cure = "as many processes as ranks; one a node and --nodes auto; --node-rank 0 where the others are no learner"
        raise SettingsError(f"{place.launcher}: want {want}, got {place.world}; cure: {cure}")
    return None


def launched(environment: Mapping[str, str], parent: int) -> Launched | None:
    """Return the place of this process; None where no launcher has started several. ``parent``: its parent's id.

    Raises SettingsError naming variables that contradict each other.
    """
    for launcher in _LAUNCHERS:
        names = (launcher.rank, launcher.world, launcher.local_rank)
        if all(environment.get(name, "") for name in names):
            break
    else:
        return _pod(environment)
    rank, world, local_rank = (_number(name, environment[name]) for name in names)
    if world == 1:
        return None
    local_world = _local_world(launcher, environment)
    job = tuple(environment.get(name, "") for name in launcher.job)
    job = job if any(job) else (str(parent),)
    place = Launched(
        launcher=launcher.name, rank=rank, world=world, local_rank=local_rank, local_world=local_world, job=job
    )
    _refuse_uneven(launcher, place)
    _refuse_other(launcher, place, environment)
    return place


def _pod(environment: Mapping[str, str]) -> Launched | None:
    """Return the place of the only process of its node, as Kubeflow's pods have it: RANK and WORLD_SIZE alone."""
    if not all(environment.get(name, "") for name in ("RANK", "WORLD_SIZE")):
        return None
    rank, world = _number("RANK", environment["RANK"]), _number("WORLD_SIZE", environment["WORLD_SIZE"])
    if rank >= world:
        raise SettingsError(f"RANK: want 0 to {world - 1} (WORLD_SIZE says {world}), got {rank}")
    if world == 1:
        return None
    return Launched(launcher="the launcher", rank=rank, world=world, local_rank=0, local_world=1, job=())


def _local_world(launcher: _Launcher, environment: Mapping[str, str]) -> int:
    text = environment.get(launcher.local_world, "")
    if launcher.name != "srun":
        return _number(launcher.local_world, text)
    # "4", "4(x2)" for two nodes with four each, "4,3" for uneven ones
    match = re.fullmatch(r"(\d{1,5})(?:\(x\d{1,5}\))?", text)
    if match is None:
        raise SettingsError(
            f"{launcher.local_world}: want as many on each node, got {text[:40]!r}; cure: {launcher.cure}"
        )
    return int(match[1])


def _refuse_uneven(launcher: _Launcher, place: Launched) -> None:
    """Raise SettingsError unless the ranks are numbered through, node by node, as many on each."""
    in_order = place.local_world > 0 and place.world % place.local_world == 0
    if not in_order or place.rank >= place.world or place.rank % place.local_world != place.local_rank:
        names = f"{launcher.rank}, {launcher.world}, {launcher.local_rank}, {launcher.local_world}"
        got = f"{place.rank}, {place.world}, {place.local_rank}, {place.local_world}"
        want = "ranks numbered through node by node, as many on each"
        raise SettingsError(f"{names}: want {want}, got {got}; cure: {launcher.cure}")


def _refuse_other(launcher: _Launcher, place: Launched, environment: Mapping[str, str]) -> None:
    """Raise SettingsError for torch's variables, or for numbers of nodes, that do not fit."""
    equal = {"RANK": place.rank, "WORLD_SIZE": place.world, "GROUP_WORLD_SIZE": place.nodes, "GROUP_RANK": place.node}
    equal |= {"NODE_RANK": place.node} | ({"SLURM_NODEID": place.node} if launcher.name == "srun" else {})
    for name, want in equal.items():
        if environment.get(name, "") and _number(name, environment[name]) != want:
            why = f"{launcher.rank}={place.rank}, {launcher.world}={place.world}, {place.local_world} on each node"
            raise SettingsError(f"{name}: want {want} ({why}), got {environment[name]}; cure: unset {name}")


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= _LARGEST):
        raise SettingsError(f"{name}: want a number from 0 to {_LARGEST}, got {text[:40]!r}")
    return int(text)
