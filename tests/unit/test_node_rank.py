"""Place of a node from options and from the variables of launchers; variables of ranks that name the interface."""

import pytest

from tidemill.launch.run.learner_nodes import network_variables
from tidemill.launch.run.learner_process import NodePlace, node_place
from tidemill.launch.settings.config_loader import SettingsError

TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("nodes", "rank", "given", "place"),
    [
        (1, None, {}, (1, 0)),
        (1, None, SLURM, (1, 0)),  # an allocation with engines on the other node
        (1, 0, TORCHRUN, (1, 0)),
        (0, None, TORCHRUN, (2, 1)),
        (0, None, SLURM, (2, 1)),
        (0, None, TORCHRUN | SLURM, (2, 1)),
        (0, None, {"SLURM_NNODES": "1"}, (1, 0)),
        (2, None, SLURM | {"SLURM_NNODES": "4", "SLURM_NODEID": "0"}, (2, 0)),  # two of four nodes
        (4, None, {"JOB_COMPLETION_INDEX": "3"}, (4, 3)),
        (0, None, {"PET_NNODES": "4", "PET_NODE_RANK": "3", "JOB_COMPLETION_INDEX": "3"}, (4, 3)),
        (2, 1, {"SLURM_NODEID": "3", "SLURM_NNODES": "4"}, (2, 1)),  # the option wins
        (2, 1, {"GROUP_RANK": "", "SLURM_NODEID": ""}, (2, 1)),
    ],
)
def test_the_place_of_a_node(nodes: int, rank: int | None, given: dict[str, str], place: tuple[int, int]) -> None:
    assert node_place(nodes, rank, given) == NodePlace(*place)


@pytest.mark.parametrize(
    ("nodes", "rank", "given", "names"),
    [
        (1, 1, {}, "--node-rank: want 0 with one node"),
        (2, None, {}, "--node-rank R, or one of GROUP_RANK, SLURM_NODEID, PET_NODE_RANK, JOB_COMPLETION_INDEX"),
        (0, None, {"JOB_COMPLETION_INDEX": "0"}, "--nodes N, or one of GROUP_WORLD_SIZE, SLURM_NNODES, PET_NNODES"),
        (
            0,
            None,
            TORCHRUN | SLURM | {"SLURM_NNODES": "3"},
            "GROUP_WORLD_SIZE, SLURM_NNODES: want equal numbers, got 2 and 3",
        ),
        (
            2,
            None,
            TORCHRUN | SLURM | {"SLURM_NODEID": "0"},
            "GROUP_RANK, SLURM_NODEID: want equal numbers, got 1 and 0",
        ),
        (2, 2, {}, r"--node-rank: want 0 to 1 \(learner.nodes says 2 nodes\), got 2"),
        (2, -1, {}, "--node-rank: want 0 to 1"),
        (2, None, {"SLURM_NODEID": "2"}, "SLURM_NODEID: want 0 to 1"),
        (2, None, {"GROUP_RANK": "one"}, "GROUP_RANK: want a number"),
        (2, None, {"GROUP_RANK": "٣"}, "GROUP_RANK: want a number"),
        (2, 0, TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "cure: torchrun --nproc-per-node 1"),
        (2, None, SLURM | {"SLURM_LOCALID": "1"}, "cure: srun --ntasks-per-node=1"),
    ],
)
def test_contradictions_are_refused_by_name(nodes: int, rank: int | None, given: dict[str, str], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        node_place(nodes, rank, given)


def test_what_the_user_has_set_is_left_alone() -> None:
    assert network_variables("eth1", {}) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert network_variables("eth1", {"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert network_variables("", {}) == {}
