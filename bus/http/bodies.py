"""Bodies of requests, read before their handlers run: bounded one by one and together, and within deadlines.

Compressed bodies are refused: aiohttp compares its limit with the unpacked bytes only after it has unpacked them, and
one megabyte of gzip makes a gigabyte.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from tidemill.bus.http.access import refusal

MAX_BODY_BYTES = 64 << 20  # Largest body of a request; a larger one is refused with 413
# Maximum number of bytes of bodies that one listener holds until the ends of their requests; then 503
MAX_BODIES_BYTES = 256 << 20
SMALL_BYTES = 64 << 10  # Bodies up to this size are not counted, so that an abort passes where large requests do not
BODY_S = 120.0
STALL_S = 15.0
RETRY_AFTER_S = 1
MAX_DEPTH = 100  # Maximum depth of nested lists and maps in JSON: not every encoder can write deeper ones
# Maximum number of lists and maps in JSON: an empty one has 2 bytes in a body and 56 or more in memory
MAX_NESTED = 1 << 20
_BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of the bodies that a listener reads."""

    one_bytes: int = MAX_BODY_BYTES
    all_bytes: int = MAX_BODIES_BYTES
    whole_s: float = BODY_S
    stall_s: float = STALL_S


class Bodies:
    """The bodies that one listener holds."""

    def __init__(self, limits: BodyLimits) -> None:
        # The largest body can be read when there is no other one.
        self.limits = replace(limits, all_bytes=max(limits.all_bytes, limits.one_bytes))
        self.held_bytes = 0

    @asynccontextmanager
    async def received(self, request: web.Request) -> AsyncIterator[None]:
        """Read the body for ``body_in``, and hold it while entered.

        Raises HTTPUnsupportedMediaType, HTTPRequestEntityTooLarge, HTTPRequestTimeout, HTTPBadRequest,
        HTTPServiceUnavailable.
        """
        self._refuse_by_headers(request)
        body, num_bytes = bytearray(), 0
        try:
            if request.can_read_body:
                await self._read(request, body)
            request[_BODY], num_bytes = bytes(body), len(body)
            body.clear()
            yield
        finally:
            self.held_bytes -= _counted(num_bytes or len(body))

    def _refuse_by_headers(self, request: web.Request) -> None:
        encodings = ",".join(request.headers.getall("Content-Encoding", [])).replace(" ", "").lower()
        if not set(encodings.split(",")) <= {"", "identity"}:
            reason = f"Content-Encoding: want a body that is not compressed (identity), got {encodings[:80]}"
            raise refusal(web.HTTPUnsupportedMediaType, reason, {"Accept-Encoding": "identity"})
        self._refuse_size(request.content_length or 0)

    def _refuse_size(self, num_bytes: int) -> None:
        if num_bytes > (limit := self.limits.one_bytes):
            # web.HTTPRequestEntityTooLarge takes other arguments than ``refusal`` gives.
            raise refusal(_TooLarge, f"body: want at most {limit} bytes, got {num_bytes} or more")

    async def _read(self, request: web.Request, body: bytearray) -> None:
        limits = self.limits
        deadline = asyncio.get_running_loop().time() + limits.whole_s
        try:
            while piece := await _within(request, min(deadline, asyncio.get_running_loop().time() + limits.stall_s)):
                self._refuse_size(len(body) + len(piece))
                num_bytes = _counted(len(body) + len(piece)) - _counted(len(body))
                if self.held_bytes + num_bytes > limits.all_bytes:
                    got = f"bodies of {self.held_bytes} bytes are being processed"
                    reason = f"{got}, want at most {limits.all_bytes}: repeat the request"
                    raise refusal(web.HTTPServiceUnavailable, reason, {"Retry-After": str(RETRY_AFTER_S)})
                body += piece
                self.held_bytes += num_bytes
        except TimeoutError:
            reason = f"body: want all of it within {limits.whole_s:g} s, and a piece of it every {limits.stall_s:g} s"
            raise refusal(web.HTTPRequestTimeout, f"{reason}, got {len(body)} bytes") from None
        except web.RequestPayloadError as error:
            reason = f"body: want valid chunks or as many bytes as Content-Length says: {error}"
            raise refusal(web.HTTPBadRequest, reason) from None


class _TooLarge(web.HTTPClientError):
    status_code = 413


async def _within(request: web.Request, deadline: float) -> bytes:
    async with asyncio.timeout_at(deadline):
        return await request.content.readany()


def _counted(num_bytes: int) -> int:
    return num_bytes if num_bytes > SMALL_BYTES else 0


def body_in(request: web.Request) -> bytes:
    """Return the body of a request, which the listener has read; empty for one without."""
    return request[_BODY]


def json_in(raw: bytes) -> object:
    """Return a body as a JSON value. Raises ValueError unless it is JSON in UTF-8, at most ``MAX_DEPTH`` deep."""
    # Counted first, as that is cheap: a body with fewer brackets cannot be deeper, and the memory of the value is
    # bounded.
    nested = raw.count(b"[") + raw.count(b"{")
    if nested > MAX_NESTED:
        raise ValueError(f"body: want at most {MAX_NESTED} lists and maps (brackets), got {nested}")
    try:
        value = json.loads(raw.decode())
        deep = nested > MAX_DEPTH and _deeper(value, MAX_DEPTH)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise ValueError(f"body: want JSON: {error}") from error
    if deep:
        raise ValueError(f"body: want lists and maps at most {MAX_DEPTH} deep, got more")
    return value


def _deeper(value: object, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    return bool(level)
