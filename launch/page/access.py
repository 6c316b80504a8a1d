"""Access to a page: tokens in cookies, names of hosts, origins; and the headers of every answer.

    Host, Sec-Fetch-Site -> token in the address (302, cookie) | cookie of viewer or operator -> handler; for a command
    also Origin

A page of another host that a browser shows can send requests to a loopback address under a name of its own (DNS
rebinding), so names are compared even where no token is needed. It also causes requests whose answers it cannot read
(``<img src=...>``): browsers mark these, and they are refused. The cookies are derived from the tokens.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import islice

from aiohttp import web

from tidemill.bus.http.access import Handler, Rule, check_host, refusal

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
TOKEN_BYTES = 24
_LONGEST_NAME = 253
_KEPT = ("Accept-Encoding", "Retry-After", "Allow")  # Headers of an error that its answer keeps


def new_token() -> str:
    """Return a new token, fit for an address."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_own_user(request: web.Request) -> bool:
    """Return whether the other end of the connection, on this machine, belongs to the user of this process. Blocks.

    The kernel lists sockets with their users: ``local_address rem_address st queues timer retrnsmt uid`` are columns 2
    to 8 of /proc/net/tcp. Both whole addresses are compared, which one socket alone has; its state does not matter.
    """
    peer, here = (request.get_extra_info(name) for name in ("peername", "sockname"))
    if not peer or not here or not ip_address(peer[0]).is_loopback:
        return False
    wanted = [(_plain(ip_address(host)), port) for host, port, *_ in (peer, here)]
    users: set[int] = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(file) as lines:
            for _, local, remote, _, _, _, _, user, *_ in map(str.split, islice(lines, 1, None)):
                # The port is compared first, because it tells most sockets apart.
                if local.endswith(f":{peer[1]:04X}") and [_address(local), _address(remote)] == wanted:
                    users.add(int(user))
    return users == {os.getuid()}


def _address(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Return an address of /proc/net, which has words of 32 bits in this machine's byte order."""
    host, port = text.split(":")
    words = (int(host[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(host), 8))
    return _plain(ip_address(b"".join(words))), int(port, 16)


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    return getattr(address, "ipv4_mapped", None) or address


class PageAccess:
    """The tokens of one page. Empty = no token is needed, which only loopback allows."""

    def __init__(self, token: str = "", operator: str = "", names: Collection[str] = ()) -> None:
        """``operator``: token of commands, which also shows the page. ``names``: hosts in addresses of this page."""
        self._cookies = {rights: _cookie(text) for rights, text in (("viewer", token), ("operator", operator)) if text}
        self._tokens = {rights: text for rights, text in (("viewer", token), ("operator", operator)) if text}
        self.token, self.operator = token, operator
        self._open, self._names = not token, {"localhost", *(name.lower() for name in names)}
        self.guarded, self.is_public = bool(token), False
        self.cookie_name = f"tidemill_{secrets.token_hex(4)}"  # Cookies do not tell ports apart

    def cookie(self, rights: str) -> str:
        """Return the value of the cookie that gives these rights; empty if no request can have them."""
        return self._cookies.get(rights, "")

    def key(self, rule: Rule) -> str:
        """Return the key that routes of a rule need, in words."""
        if rule is Rule.COMMAND:
            return "operator's cookie and Origin" if "operator" in self._tokens else "refused"
        return "none" if self._open else "viewer's cookie"

    async def check(self, request: web.Request, rule: Rule) -> None:
        """Check host, token and origin. Raises HTTPFound (with the cookie), HTTPUnauthorized, HTTPForbidden."""
        check_host(request, self._names, "the address that the dashboard printed (--name adds another name)")
        self._check_site(request)
        if request.method == "GET" and "token" in request.query:
            self._exchange(request)
        rights = self.rights(request)
        if rule is Rule.COMMAND:
            if rights != "operator":
                raise refusal(web.HTTPUnauthorized, f"{request.path}: want the operator's token")
            self._check_origin(request)
        elif not rights:
            raise refusal(web.HTTPUnauthorized, "want the address with ?token=... that the dashboard printed")

    def rights(self, request: web.Request) -> str:
        """Return operator, viewer, or nothing."""
        presented = request.cookies.get(self.cookie_name, "").encode(errors="replace")
        # A list: all cookies are compared, so that the time does not show which one fits.
        fits = [rights for rights, cookie in self._cookies.items() if hmac.compare_digest(presented, cookie.encode())]
        return fits[-1] if fits else "viewer" if self._open else ""

    def _exchange(self, request: web.Request) -> None:
        presented = request.query["token"].encode(errors="replace")
        fits = [name for name, token in self._tokens.items() if hmac.compare_digest(presented, token.encode())]
        if not fits:
            raise refusal(web.HTTPUnauthorized, "token: want the one that the dashboard printed, got another one")
        # The path alone: a redirect to what follows "//" would leave this host.
        redirect = web.HTTPFound("/" + request.path.lstrip("/"))
        redirect.set_cookie(self.cookie_name, self._cookies[fits[-1]], httponly=True, samesite="Strict", path="/")
        raise redirect

    def _check_site(self, request: web.Request) -> None:
        """Refuse a request that a page of another origin causes; a link to this page may be followed."""
        site = request.headers.get("Sec-Fetch-Site", "none")
        target = tuple(request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
        if site not in ("none", "same-origin") and (request.path, *target) != ("/", "navigate", "document"):
            raise refusal(web.HTTPForbidden, f"Sec-Fetch-Site: want a request of this page, got {site[:40]!r}")

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin", "")
        if origin != f"{request.scheme}://{request.headers.get('Host', '')}":
            raise refusal(web.HTTPForbidden, f"Origin: want this page's own, got {origin[:_LONGEST_NAME]!r}")


def _cookie(token: str) -> str:
    return hmac.new(token.encode(), b"tidemill page cookie", hashlib.sha256).hexdigest()


@web.middleware
async def secured(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Put the headers on every answer, and errors into JSON: ``{"error": sentence}``."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            error.headers.update(HEADERS)
            raise
        response = error_answer(error.status, _sentence(error))
        response.headers.update({name: error.headers[name] for name in _KEPT if name in error.headers})
    if not response.prepared:
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
    return response


def error_answer(status: int, sentence: str) -> web.Response:
    """Return the answer to a request that cannot be answered."""
    return web.json_response({"error": sentence}, status=status)


def _sentence(error: web.HTTPException) -> str:
    text = error.text or error.reason
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text
