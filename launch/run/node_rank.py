"""The number of a node, and how many there are: from options, else from the variables of torchrun, Slurm and
Kubernetes. Pure.

Sources: torchrun's documentation, "Environment Variables"; ``man srun``, "OUTPUT ENVIRONMENT VARIABLES"; Kubernetes,
"Indexed Job".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.launch.settings.config_loader import SettingsError

NODES = ("GROUP_WORLD_SIZE", "SLURM_NNODES")
RANKS = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
PER_NODE = (("LOCAL_WORLD_SIZE", 1, "torchrun --nproc-per-node 1"), ("SLURM_LOCALID", 0, "srun --ntasks-per-node=1"))
"""Variables that show several processes on a node, their largest value for one, and the cure."""
_LARGEST = 1024


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place of an agent among all nodes."""

    nodes: int
    rank: int


def node_place(nodes: int, rank: int | None, environment: Mapping[str, str]) -> NodePlace:
    """Return the place of this process: an option, else variables, which must agree.

    ``nodes``: learner.nodes, 0 = from the variables. ``rank``: --node-rank; None = from the variables. With one node no
    variable is read.
    Raises SettingsError naming the options and variables that do not fit.
    """
    if nodes == 1:
        if rank:
            raise SettingsError(f"--node-rank: want 0 with one node (learner.nodes: 1), got {rank}; cure: --nodes N")
        return NodePlace(1, 0)
    count, counted_by = (nodes, "learner.nodes") if nodes else _agreed(NODES, environment, "--nodes N", least=1)
    if count == 1 and rank is None:
        return NodePlace(1, 0)
    _refuse_several(environment)
    if rank is None:
        rank, by = _agreed(RANKS, environment, "--node-rank R", least=0)
    else:
        by = "--node-rank"
    if not 0 <= rank < count:
        raise SettingsError(f"{by}: want 0 to {count - 1} ({counted_by} says {count} nodes), got {rank}")
    return NodePlace(count, rank)


def _agreed(names: Sequence[str], environment: Mapping[str, str], cure: str, *, least: int) -> tuple[int, str]:
    """Return the number that all of these variables have, and the first one's name. Raises SettingsError."""
    numbers = {name: _number(name, environment[name], least) for name in names if environment.get(name, "")}
    if not numbers:
        raise SettingsError(
            f"several nodes: want {cure}, or one of {', '.join(names)} in the environment, got none of them"
        )
    first = next(iter(numbers))
    for name, number in numbers.items():
        if number != numbers[first]:
            raise SettingsError(f"{first}, {name}: want equal numbers, got {numbers[first]} and {number}; cure: {cure}")
    return numbers[first], first


def _number(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and least <= int(text) <= _LARGEST):
        raise SettingsError(f"{name}: want a number from {least} to {_LARGEST}, got {text[:40]!r}")
    return int(text)


def _refuse_several(environment: Mapping[str, str]) -> None:
    """Raise SettingsError where a launcher starts several processes on a node: an agent starts its ranks itself."""
    for name, largest, cure in PER_NODE:
        if environment.get(name, "") and _number(name, environment[name], 0) > largest:
            raise SettingsError(f"{name}: want one agent on each node, got {name}={environment[name]}; cure: {cure}")
