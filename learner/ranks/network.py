"""Network interface of the ranks' process groups on a machine without a network. Loads no torch."""

from collections.abc import Mapping
from pathlib import Path

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
INTERFACES = Path("/sys/class/net")
UP, LOOPBACK = 0x1, 0x8
"""Flags of an interface (``IFF_UP``, ``IFF_LOOPBACK`` in linux/if.h)."""


def loopback_variables(given: Mapping[str, str], interfaces: Path = INTERFACES) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to the loopback interface, if no other one is up.

    Gloo resolves the machine's name otherwise, which may have no address there, and NCCL passes over the loopback interface. A variable
    that is ``given`` is left alone.
    """
    flags = {each.name: _flags(each) for each in interfaces.glob("*")}
    up = {name for name, bits in flags.items() if bits & UP}
    local = {name for name in up if flags[name] & LOOPBACK}
    if up != local or not local:
        return {}
    return {variable: min(local) for variable in IFNAMES if variable not in given}


def _flags(interface: Path) -> int:
    """Return the flags of an interface; 0 where they cannot be read."""
    try:
        return int((interface / "flags").read_text(), 16)
    except (OSError, ValueError):
        return 0
