"""Keys of a listener, and a rule for every route: the key that a request needs. Knows no body and no meaning of a path.

    open     no key: /health, for monitors and load balancers
    request  the run's api key where other machines can reach the listener; a token or an episode's key everywhere
    command  what changes the process behind the listener: the run's admin key, everywhere

A rule stands beside the handler of its route (``Route``), so there is no route without one.
"""

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import web

from tidemill.bus.errors import BusError
from tidemill.bus.keys import Keys, RunKeys

_SCHEME = "bearer"
_LONGEST_NAME = 253
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Rule(StrEnum):
    """Kinds of routes."""

    OPEN = "open"
    REQUEST = "request"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and the rule of its requests."""

    rule: Rule
    handler: Handler

    @classmethod
    def open(cls, handler: Handler) -> "Route":
        return cls(Rule.OPEN, handler)

    @classmethod
    def request(cls, handler: Handler) -> "Route":
        """Return a route that changes nothing but the requests of its client."""
        return cls(Rule.REQUEST, handler)

    @classmethod
    def command(cls, handler: Handler) -> "Route":
        """Return a route that changes the process."""
        return cls(Rule.COMMAND, handler)


class Access(Protocol):
    """The keys of one listener."""

    guarded: bool
    """There is a key, so that the listener may be bound beyond loopback."""
    is_public: bool
    """Other machines can reach the listener, which sets it when it starts."""

    def key(self, rule: Rule) -> str:
        """Return the key that routes of a rule need, in words."""
        ...

    async def check(self, request: web.Request, rule: Rule) -> None:
        """Check the key of a request. Raises an HTTPError."""


class RunAccess:
    """The keys of a run. Without a run (a teacher, a router without a bus) only commands are refused."""

    def __init__(
        self, keys: RunKeys | None, on_refused: Callable[[str], None] | None = None, *, unguarded: bool = False
    ) -> None:
        """``on_refused`` gets the reason of each refused command. ``unguarded``: without keys, accept all commands."""
        self.keys, self._on_refused, self._unguarded = keys, on_refused, unguarded
        self.guarded, self.is_public = keys is not None, False

    def key(self, rule: Rule) -> str:
        match rule:
            case Rule.OPEN:
                return "none"
            case Rule.REQUEST:
                return "none" if self.keys is None else "api key, where other machines reach it"
            case Rule.COMMAND:
                return "admin key" if self.keys is not None else "none" if self._unguarded else "refused"

    async def check(self, request: web.Request, rule: Rule) -> None:
        """Check the key. Raises HTTPUnauthorized, HTTPForbidden; HTTPServiceUnavailable while no keys can be read."""
        if rule is Rule.COMMAND or (rule is Rule.REQUEST and self.is_public):
            await self.want(request, admin=rule is Rule.COMMAND)

    async def want(self, request: web.Request, *, admin: bool) -> None:
        """Check for a key, for a handler that reads from the body which one it needs. Raises as ``check``."""
        if self.keys is None:
            if admin and not self._unguarded:
                reason = "want no command: this process belongs to no run, so there is no key for one"
                self._refused(request, reason)
                raise refusal(web.HTTPForbidden, f"{request.path}: {reason}")
            return
        presented = bearer(request)
        try:
            # The keys may have been made, or replaced, since they were read: a key that does not fit is compared once
            # more with the newest ones. A request without a key does not make this process read the bus.
            is_admitted = (await self.keys.known()).admits(presented, admin=admin)
            if is_admitted or (presented and (await self.keys.newest()).admits(presented, admin=admin)):
                return
            has = (await self.keys.known()) != Keys()
        except BusError as error:
            reason = f"{request.path}: the keys of the run are not known: {error}"
            raise refusal(web.HTTPServiceUnavailable, reason) from error
        reason = f"want the run's {'admin key' if admin else 'api key'}"
        if not has:
            raise refusal(web.HTTPServiceUnavailable, f"{request.path}: {reason}, and the run has none yet")
        reason += f" (Authorization: Bearer KEY), got {'another one' if presented else 'none'}"
        if admin:
            self._refused(request, reason)
        raise refusal(web.HTTPUnauthorized, f"{request.path}: {reason}")

    def _refused(self, request: web.Request, reason: str) -> None:
        if self._on_refused is not None:
            self._on_refused(f"{request.path}: {reason}")


class TokenAccess:
    """One token for all requests; empty = none is needed. There are no commands."""

    def __init__(
        self, token: str, on_refused: Callable[[str], None] | None = None, *, names: Collection[str] = ()
    ) -> None:
        """``on_refused`` gets the reason of each refused request. ``names``: hosts of requests without a token; empty
        = any.
        """
        self._token, self._on_refused, self._names = token, on_refused, names
        self.guarded, self.is_public = bool(token), False

    def key(self, rule: Rule) -> str:
        if rule is Rule.COMMAND:
            return "refused"
        return "its token" if rule is Rule.REQUEST and self._token else "none"

    async def check(self, request: web.Request, rule: Rule) -> None:
        if rule is Rule.COMMAND:
            raise refusal(web.HTTPForbidden, f"{request.path}: want no command here")
        if self._names and not self._token:
            check_host(request, self._names, "an address or localhost")
        if rule is Rule.OPEN or not self._token:
            return
        if not hmac.compare_digest(bearer(request).encode(errors="replace"), self._token.encode()):
            reason = f"{request.path}: want the server's token (Authorization: Bearer TOKEN)"
            if self._on_refused is not None:
                self._on_refused(reason)
            raise refusal(web.HTTPUnauthorized, reason)


class _WrongHost(web.HTTPClientError):
    status_code = 421  # Misdirected Request: RFC 9110, 15.5.20


def check_host(request: web.Request, names: Collection[str], want: str) -> None:
    """Raise an HTTPError (421) for a request under a name that another host could point here (DNS rebinding).

    ``names``: the names of this listener. ``want``: the same in words.
    """
    host = request.headers.get("Host", "")
    if not _is_ours(host, names):
        raise refusal(_WrongHost, f"Host: want {want}, got {host[:_LONGEST_NAME]!r}")


def _is_ours(host: str, names: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in names:
            ipaddress.ip_address(name)  # no name, so none that another host could point here
    except ValueError:
        return False
    return True


def bearer(request: web.Request) -> str:
    """Return the key in the Authorization header; empty without one."""
    scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
    # The scheme of an Authorization header may be in any case (RFC 9110).
    return presented.strip() if scheme.lower() == _SCHEME else ""


def refusal(kind: type[web.HTTPError], message: str, headers: Mapping[str, str] | None = None) -> web.HTTPError:
    """Return the error of a request that is refused before its handler, with SGLang's JSON."""
    error = {"message": message, "code": kind.status_code}
    answer = {"success": False, "message": message, "error": error}
    challenge = {"WWW-Authenticate": "Bearer"} if kind is web.HTTPUnauthorized else {}
    return kind(text=json.dumps(answer), content_type="application/json", headers={**challenge, **(headers or {})})
