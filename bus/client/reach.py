"""The addresses of a process: where it listens, and where others reach it; by default its address on the route to the bus."""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.bus.client.address import parse
from tidemill.bus.config import is_loopback

AUTO = "auto"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Route:
    """The way from this process to the bus."""

    local: str
    """Address of this machine on the route."""
    is_here: bool
    """True when the bus is on this machine."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The addresses of a process's listener."""

    bind: str
    advertised: str
    """Host, or host:port, under which others reach it."""


HERE = Reach(LOOPBACK, LOOPBACK)


def reach(host: str, advertise: str, route: Route, *, name: str) -> Reach:
    """Return where a process listens, and its advertised address.

    ``host``: auto, or an address to bind; ``advertise``: empty = the bound one, or where that is a wildcard the one of the route.
    Raises ValueError, with ``name`` for the setting, for an address that would be advertised and that the machine of the bus cannot reach.
    """
    bind = route.local if host == AUTO else host.strip("[]")  # an IPv6 address may be given as URLs have it
    shown = advertise or (route.local if is_wildcard(bind) else bind)
    if not route.is_here and (is_loopback(bare(shown)) or is_wildcard(bare(shown))):
        raise ValueError(f"{name}: want an address that other machines reach (the bus is on one), got {shown}; cure: auto, or --advertise")
    return Reach(bind, shown)


def route_to(url: str) -> Route:
    """Return the kernel's route to the first reachable server of the bus; nothing is sent. Blocking. Raises ValueError."""
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
    raise ValueError(f"host: auto: no route to the bus: {'; '.join(failures)}; cure: --host ADDRESS")


def is_wildcard(host: str) -> bool:
    """Return whether a host means every address of this machine: 0.0.0.0, ::, or none."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def in_url(host: str) -> str:
    """Return a host as URLs and host:port have it: an IPv6 address in brackets."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def bare(shown: str) -> str:
    """Return the host of an advertised address, which may have a port."""
    if shown.startswith("["):
        return shown[1:].partition("]")[0]
    return shown.partition(":")[0] if shown.count(":") == 1 else shown
