"""The address of the bus in one line; the addresses at which a process listens and is reached; reserved ports.

By default a process is reached at its address on the route to the bus.
"""

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from tidemill.bus.config import is_loopback

_SCHEMES = ("nats", "tls")
_FILES = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """``nats://user:password@host:4222,host:4222?ca=FILE``: one or more servers, all reached in the same way."""

    servers: tuple[str, ...]
    """Every server as ``scheme://host:port``."""
    user: str = ""
    password: str = field(default="", repr=False)
    """Password; empty when ``user`` is a token."""
    ca: str = ""
    """File of certificates to trust (PEM); empty = the system's."""
    cert: str = ""
    """File of the client certificate, for servers that require one."""
    key: str = ""

    @property
    def tls(self) -> bool:
        return self.servers[0].startswith("tls://")

    def __str__(self) -> str:
        """Return the address for a log: with the user, without the password."""
        shown = ",".join(self.servers)
        return f"{shown} as {self.user if self.password else 'the holder of a token'}" if self.user else shown

    def line(self) -> str:
        """Return the whole address, password included: the text that ``parse`` reads."""
        scheme = self.servers[0].partition("://")[0]
        hosts = ",".join(server.partition("://")[2] for server in self.servers)
        password = f":{quote(self.password, safe='')}" if self.password else ""
        login = f"{quote(self.user, safe='')}{password}@" if self.user else ""
        files = urlencode({name: getattr(self, name) for name in _FILES if getattr(self, name)}, safe="/")
        return f"{scheme}://{login}{hosts}" + (f"?{files}" if files else "")


def parse(text: str) -> Address:
    """Return the address in a line. Raises ValueError without the parts that may be a password."""
    body, _, query = text.strip().partition("?")
    login, servers = "", []
    scheme = body.partition("://")[0] if "://" in body else "nats"
    for part in body.split(","):
        part_scheme, separator, host = part.strip().rpartition("://")
        if (part_scheme if separator else scheme) != scheme or scheme not in _SCHEMES:
            raise _refused("nats://host:port or tls://host:port, one scheme for all", f"{part_scheme or scheme}://")
        before, at, host = host.rpartition("@")
        login = login or (before if at else "")
        if not host or host.startswith(":"):
            raise _refused("scheme://host:port[,host:port]", f"no host in {scheme}://...{host}")
        try:
            port = urlsplit(f"{scheme}://{host}").port
        except ValueError:
            port = -1
        if port is not None and not 0 < port < 65536:
            raise _refused("scheme://host:port with a port from 1 to 65535", f"{scheme}://{host}")
        servers.append(f"{scheme}://{host}")
    files = dict(parse_qsl(query))
    if unknown := sorted(set(files) - set(_FILES)):
        raise _refused(f"?{', '.join(_FILES)}", f"?{', '.join(unknown)}")
    user, _, password = login.partition(":")
    return Address(servers=tuple(servers), user=unquote(user), password=unquote(password), **files)


def _refused(want: str, got: str) -> ValueError:
    return ValueError(f"address of the bus: want {want}, got {got}")


AUTO = "auto"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class BusRoute:
    """The way from this process to the bus."""

    local: str
    is_here: bool


@dataclass(frozen=True, slots=True)
class Reach:
    """The addresses of a process's listener."""

    bind: str
    advertised: str
    """Host, or host:port, under which others reach it."""


HERE = Reach(LOOPBACK, LOOPBACK)


def reach(host: str, advertise: str, route: BusRoute, *, name: str) -> Reach:
    """Return where a process listens, and its advertised address.

    ``host``: auto, or an address to bind; ``advertise``: empty = the bound address, or the route's where that is a
    wildcard. Raises ValueError, with ``name`` for the setting, for an advertised address that the machine of the bus
    cannot reach.
    """
    bind = route.local if host == AUTO else host.strip("[]")  # an IPv6 address may be given as URLs have it
    shown = advertise or (route.local if is_wildcard(bind) else bind)
    if not route.is_here and (is_loopback(bare(shown)) or is_wildcard(bare(shown))):
        want = "an address that other machines reach (the bus is on one)"
        raise ValueError(f"{name}: want {want}, got {shown}; cure: auto, or --advertise")
    return Reach(bind, shown)


def route_to(url: str) -> BusRoute:
    """Return the kernel's route to the first reachable server; sends nothing. Blocking. Raises ValueError."""
    failures = []
    for server in parse(url).servers:
        parts = urlsplit(server)
        try:
            infos = socket.getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_DGRAM)
            family, kind, _, _, address = infos[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of UDP: sends nothing
                local = str(probe.getsockname()[0])
            return BusRoute(local, local == address[0] or is_loopback(str(address[0])))
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


class KeptPort:
    """A free TCP port of this machine, which the system gives to no client until ``close``.

    A server, which listens with SO_REUSEADDR, can bind ``number``.
    """

    def __init__(self, host: str = "127.0.0.1", number: int = 0) -> None:
        """``number``: the requested port; 0 = any. Raises OSError when a process listens there."""
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Give up the port: from now on the system may give it to any process."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
