"""Where the processes of a run go in a Ray cluster: bundles with devices for the learner's nodes, single actors for
engines and actors, which Ray places as it finds room.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.launch.devices.demand import devices_of
from tidemill.launch.settings.run_config import RunConfig

WAIT_S = 600.0
"""Seconds in which the cluster must have room for the learner: an autoscaler needs minutes for a machine."""


class NoRoom(ValueError):
    """The cluster has no room for the learner's nodes."""

    exit_code = 1  # there may be room later


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What each process asks of Ray, in CPUs and devices."""

    nodes: int
    """Nodes of the learner, the first with the bus."""
    devices_of_node: int
    devices_of_engine: int

    @classmethod
    def of(cls, config: RunConfig, devices: float) -> "Demand":
        """``devices``: GPUs of the cluster; without any, everything runs on CPUs. Raises ValueError."""
        learner = config.learner
        if learner.colocated:
            why = "Ray gives the devices of a process to no other"
            raise ValueError(f"learner.colocated: want false in a Ray cluster ({why}), got true; cure: tidemill up")
        has_devices = devices > 0
        return cls(
            nodes=learner.nodes,
            devices_of_node=learner.num_ranks // learner.nodes if has_devices else 0,
            devices_of_engine=devices_of(config.engine) if has_devices else 0,
        )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundles of the learner's nodes; the first has a CPU for the bus."""
        devices = {"GPU": float(self.devices_of_node)} if self.devices_of_node else {}
        return [{"CPU": 2.0 if node == 0 else 1.0, **devices} for node in range(self.nodes)]

    def options(self, name: str, group: Any) -> dict[str, Any]:
        """Return the options of the Ray actor of a process. ``group``: the placement group of the bundles."""
        role, _, number = name.partition("-")
        if role in ("engine", "actor", "scorer"):
            return {"num_cpus": 1, "num_gpus": self.devices_of_engine if role == "engine" else 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = int(number.rpartition("-")[2] or 0) if role == "learner" else 0
        cpus = {"bus": 1, "learner": 1}.get(role, 0)
        return {
            "num_cpus": cpus,
            "num_gpus": self.devices_of_node if role == "learner" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        }


def reserve(demand: Demand, wait_s: float = WAIT_S) -> Any:
    """Return a placement group with the bundles of the learner. Raises NoRoom after ``wait_s``. Blocks."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(demand.bundles, strategy="STRICT_SPREAD" if demand.nodes > 1 else "PACK")
    if not group.wait(wait_s):
        remove_placement_group(group)
        want = ", ".join(str(bundle) for bundle in demand.bundles)
        raise NoRoom(f"placement: want nodes with {want} for the learner, got none with room within {wait_s:g} s")
    return group


def address_in(group: Any) -> tuple[str, int]:
    """Return the address of the first bundle's node, and a port that is free there. Blocks."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    look: Callable[[], Any] = ray.remote(num_cpus=0, scheduling_strategy=place)(_address_here).remote
    address, port = ray.get(look())
    return str(address), int(port)


def _address_here() -> tuple[str, int]:
    import ray

    from tidemill.bus.client.addresses import KeptPort

    address = ray.util.get_node_ip_address()
    with KeptPort(address) as port:
        return address, port.number
