"""The address of the bus: servers, user and certificates in one line, shown without its password."""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

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
    """File of the client certificate's key."""

    @property
    def tls(self) -> bool:
        """True if the servers are reached by TLS."""
        return self.servers[0].startswith("tls://")

    def __str__(self) -> str:
        """Return the address for a log: with the user, without the password."""
        shown = ",".join(self.servers)
        return f"{shown} as {self.user if self.password else 'the holder of a token'}" if self.user else shown

    def line(self) -> str:
        """Return the whole address, password included: the text that ``parse`` reads."""
        scheme = self.servers[0].partition("://")[0]
        hosts = ",".join(server.partition("://")[2] for server in self.servers)
        login = f"{quote(self.user, safe='')}{':' if self.password else ''}{quote(self.password, safe='')}@" if self.user else ""
        files = urlencode({name: getattr(self, name) for name in _FILES if getattr(self, name)}, safe="/")
        return f"{scheme}://{login}{hosts}" + (f"?{files}" if files else "")


def parse(text: str) -> Address:
    """Return the address in a line. Raises ValueError without the parts that may be a password."""
    body, _, query = text.strip().partition("?")
    login, servers = "", []
    scheme = body.partition("://")[0] if "://" in body else "nats"
    for part in body.split(","):
        own, separator, host = part.strip().rpartition("://")
        if (own if separator else scheme) != scheme or scheme not in _SCHEMES:
            raise ValueError(f"address of the bus: want nats://host:port or tls://host:port, one scheme for all, got {own or scheme}://")
        before, at, host = host.rpartition("@")
        login = login or (before if at else "")
        if not host or host.startswith(":"):
            raise ValueError(f"address of the bus: want scheme://host:port[,host:port], got no host in {scheme}://...{host}")
        try:
            port = urlsplit(f"{scheme}://{host}").port
        except ValueError:
            port = -1
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"address of the bus: want scheme://host:port with a port from 1 to 65535, got {scheme}://{host}")
        servers.append(f"{scheme}://{host}")
    files = dict(parse_qsl(query))
    if unknown := sorted(set(files) - set(_FILES)):
        raise ValueError(f"address of the bus: want ?{', '.join(_FILES)}, got ?{', '.join(unknown)}")
    user, _, password = login.partition(":")
    return Address(servers=tuple(servers), user=unquote(user), password=unquote(password), **files)
