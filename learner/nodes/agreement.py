"""Check that nodes fit together before their ranks start. Pure."""

import ipaddress
from collections.abc import Sequence

from tidemill.bus.config import is_loopback
from tidemill.learner.errors import NodeRefused
from tidemill.learner.nodes.node_rows import NodeRow


def refuse_unlike(offers: Sequence[NodeRow]) -> None:
    """Raise NodeRefused for nodes with other versions, settings or sizes, and addresses that cannot connect them."""
    leader = offers[0]
    for row in offers[1:]:
        if row.nodes != leader.nodes:
            raise NodeRefused(
                row.name,
                f"--nodes {leader.nodes}, as {leader.name}",
                f"{row.nodes}",
                "start all agents with the same number",
            )
        if bool(row.devices) != bool(leader.devices):
            got = "devices" if row.devices else "none"
            raise NodeRefused(
                row.name,
                f"{'devices' if leader.devices else 'no devices'}, as {leader.name}",
                got,
                "learner.device: cpu",
            )
        for name in sorted({*leader.versions, *row.versions}):
            want, got = leader.versions.get(name, "none"), row.versions.get(name, "none")
            if want != got:
                cure = (
                    "use the same configuration on all nodes"
                    if name == "settings"
                    else "install the same versions on all nodes"
                )
                raise NodeRefused(row.name, f"{name} {want}, as {leader.name}", got, cure)
    if len({row.place for row in offers}) > 1 or not leader.place:
        for row in offers:
            if is_loopback(row.address):
                cure = (
                    f"--host ADDRESS, or a --bus address of the network; {row.name} is reached under "
                    f"{row.address} by itself only"
                )
                raise NodeRefused(row.name, "an address that the other nodes reach", row.address, cure)


def fit(offers: Sequence[NodeRow]) -> bool:
    """Return whether ``refuse_unlike`` accepts these nodes."""
    try:
        refuse_unlike(offers)
    except NodeRefused:
        return False
    return True


def refuse_public(address: str, *, insecure: bool) -> None:
    """Raise NodeRefused for an address of the internet: torch's store, gloo and NCCL have no authentication."""
    try:
        public = ipaddress.ip_address(address.strip("[]")).is_global
    except ValueError:
        return  # a name: its owner knows the network
    if public and not insecure:
        want = "an address of a private network: the ranks' own connections have no authentication"
        raise NodeRefused(
            "learner: address of this node",
            want,
            f"{address}, which is public",
            "--host ADDRESS, or learner.insecure_network: true",
        )
