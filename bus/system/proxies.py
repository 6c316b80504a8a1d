"""Proxies of the environment: downloads go through them, traffic inside a run never does."""

import urllib.request
from collections.abc import Iterable, Mapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine. Only urllib wants brackets around IPv6; with them httpx fails ("Invalid port")."""
_VARIABLES = ("no_proxy", "NO_PROXY")
"""Clients read one or the other."""


def without_proxy(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return a child's environment, in which clients reach loopback and ``hosts`` (no port, no brackets) directly."""
    listed = [host.strip() for name in _VARIABLES for host in environment.get(name, "").split(",")]
    joined = ",".join(dict.fromkeys(host for host in (*listed, *LOOPBACK, *hosts) if host))
    return {**environment, **dict.fromkeys(_VARIABLES, joined)}


def direct_opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener of URLs that never goes through a proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
