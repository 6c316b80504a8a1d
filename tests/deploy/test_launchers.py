"""The place of a process of a launcher, from variables as torchrun, srun and mpirun set them."""

import dataclasses

import pytest

from tests.refusals import refusal
from tidemill.launch.deploy.launchers import launched, rank_process
from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.config import LearnerConfig

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_JOB_ID": "7"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "run-0"}
ONE_EACH = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def config(*, nodes: int = 1, data_parallel: int = 4) -> RunConfig:
    return RunConfig(learner=LearnerConfig(nodes=nodes, data_parallel=data_parallel))


@pytest.mark.parametrize("given", [TORCHRUN, SRUN, OPEN_MPI, MPICH, TORCHRUN | SRUN, ONE_EACH | TORCHRUN, MPICH | POD])
def test_the_place_of_one_of_two_processes_on_the_second_of_two_nodes(given: dict[str, str]) -> None:
    place = launched(given, parent=5)
    assert place is not None
    assert (place.rank, place.world, place.local_rank, place.local_world) == (3, 4, 1, 2)
    assert (place.node, place.nodes) == (1, 2)
    assert any(place.job)


def test_a_pod_has_one_process_and_one_process_has_no_launcher() -> None:
    pod = launched(POD, parent=5)
    assert pod is not None
    assert (pod.node, pod.nodes, pod.local_world) == (3, 4, 1)
    allocation = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "8",
    }  # sbatch, no srun
    for given in ({}, allocation, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert launched(given, parent=5) is None


def test_two_starts_on_one_machine_do_not_meet() -> None:
    starts = [{}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"MASTER_PORT": "29501"}, {"GROUP_RANK": "", "RANK": "1"}]
    places = [launched(TORCHRUN | changed, parent=5) for changed in starts]
    assert len({(place.job, place.node) for place in places if place is not None}) == len(starts)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (TORCHRUN | {"RANK": "2"}, r"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: .* got 2, 4, 1, 2"),
        (TORCHRUN | {"RANK": "5"}, "numbered through"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "as many on each"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE: want a number"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, r"GROUP_WORLD_SIZE: want 2 \(RANK=3, WORLD_SIZE=4, 2 on each node\)"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "cure: srun --ntasks-per-node=N"),
        (SRUN | {"SLURM_PROCID": "2"}, "numbered through.*--distribution=block"),
        (SRUN | {"SLURM_NODEID": "0"}, "SLURM_NODEID: want 1"),
        (SRUN | {"RANK": "1", "WORLD_SIZE": "4"}, "RANK: want 3 .* cure: unset RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "mpirun --map-by ppr:N:node"),
        (POD | {"RANK": "4"}, "RANK: want 0 to 3"),
        (POD | {"WORLD_SIZE": "٤"}, "WORLD_SIZE: want a number"),
    ],
)
def test_contradictions_are_refused_by_name(given: dict[str, str], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        launched(given, parent=5)


def test_a_launcher_with_a_process_for_each_rank_decides_the_nodes() -> None:
    for nodes in (0, 1, 2):
        assert rank_process(config(nodes=nodes), TORCHRUN, 5) is not None
    with refusal(SettingsError, place="learner.nodes", got="4"):
        rank_process(config(nodes=4), TORCHRUN, 5)


def test_another_number_of_processes_is_one_agent_a_node_or_refused() -> None:
    for nodes in (0, 2):
        place = rank_process(config(nodes=nodes), ONE_EACH, 5)
        assert place is not None and (place.nodes, place.node, place.local_world) == (2, 1, 1)
    assert rank_process(config(nodes=4), ONE_EACH, 5) is None, "node_place names the variables that do not fit"
    assert rank_process(config(nodes=0), SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, 5) is None
    with refusal(SettingsError, place="srun", got="2") as refused:
        rank_process(config(), ONE_EACH, 5)
    assert "--node-rank 0" in str(refused.value)
    alone = dataclasses.replace(config(), debug=dataclasses.replace(RunConfig().debug, rollout_only=True))
    with refusal(SettingsError, place="torchrun", got="4"):
        rank_process(alone, TORCHRUN, 5)
