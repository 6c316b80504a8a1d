"""At which address a process of a run listens, and under which one others find it: that of its way to the bus, unless it is set."""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from bus.client.address import parse
from bus.config import is_loopback

AUTO = "auto"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Route:
    """The way from this process to the bus."""

    local: str
    """Address of this machine on it."""
    is_here: bool
    """The bus is on this machine."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a process listens."""

    bind: str
    advertised: str
    """Host, or host:port, that it gives to others."""


HERE = Reach(LOOPBACK, LOOPBACK)


def reach(host: str, advertise: str, route: Route, *, name: str) -> Reach:
    """``host``: auto, or an address to bind; ``advertise``: empty = the bound one, or where that is a wildcard the one of the route.

    Raises ValueError, with ``name`` for the setting, for an address that would be advertised and that the machine of the bus cannot reach.
    """
    bind = route.local if host == AUTO else host
    shown = advertise or (route.local if is_wildcard(bind) else bind)
    if not route.is_here and (is_loopback(bare(shown)) or is_wildcard(bare(shown))):
        raise ValueError(
            f"{name}: want an address that others reach (the bus is on another machine), got {shown}; cure: auto, or --advertise"
        )
    return Reach(bind, shown)


def route_to(url: str) -> Route:
    """By the kernel's choice for the first server of the bus to which there is a way; nothing is sent. Blocking. Raises ValueError."""
    failures = []
    for server in parse(url).servers:
        parts = urlsplit(server)
        try:
            family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                local = str(probe.getsockname()[0])
            return Route(local, local == address[0] or is_loopback(str(address[0])))
        except OSError as error:
            failures.append(f"{parts.hostname}: {error}")
    raise ValueError(f"host: auto wants a way to the bus: {'; '.join(failures)}; cure: --host ADDRESS")


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def bare(shown: str) -> str:
    """The host of what is advertised, which may have a port."""
    if shown.startswith("["):
        return shown[1:].partition("]")[0]
    return shown.partition(":")[0] if shown.count(":") == 1 else shown
