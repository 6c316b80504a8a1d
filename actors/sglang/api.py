"""Calls to an SGLang server: JSON in and out, errors translated. Knows its paths; not what they are for."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from actors.errors import BadRequest, EngineFailed, EngineUnavailable

CONNECT_S = 5.0
KEEP_S = 2.0
"""An idle connection is kept so long: less than SGLang keeps it (5 s), or a request might meet its end."""


class Aborted(BadRequest):
    """Somebody aborted the request before it began (HTTP 499)."""


class Api:
    """One server at ``url``, which asks for ``key``, if that is not empty."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._headers = url.rstrip("/"), {"Authorization": f"Bearer {key}"} if key else {}
        self._opened: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON, None for one without. Raises BadRequest (HTTP 4xx), EngineFailed (5xx), EngineUnavailable (no answer)."""
        async with self.open(method, path, body, timeout_s=timeout_s) as response:
            raw = await response.read()
        try:
            return json.loads(raw) if response.content_type == "application/json" else None
        except ValueError as error:
            raise EngineFailed(self.url, f"{path}: want JSON: {error}") from error

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200, to be read. Raises as ``call``."""
        try:
            async with asyncio.timeout(timeout_s), self._session.request(method, self.url + path, json=body) as response:
                if response.status != 200:
                    raw = await response.read()
                    if response.status >= 500:
                        response.close()  # uvicorn is about to: the next request is not to travel on it
                    raise self._refusal(path, response.status, raw)
                yield response
        except aiohttp.ServerTimeoutError as error:
            raise EngineUnavailable(self.url, f"{path}: not connected within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise EngineUnavailable(self.url, f"{path}: no answer within {timeout_s or 0.0:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(self.url, f"{path}: {type(error).__name__}: {error}") from error

    async def healthy(self) -> bool:
        try:
            await self.call("GET", "/health", timeout_s=CONNECT_S)
        except (BadRequest, EngineFailed, EngineUnavailable):
            return False
        return True

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
                headers=self._headers,
                read_bufsize=1 << 20,
            )
        return self._opened

    def _refusal(self, path: str, status: int, raw: bytes) -> Exception:
        text = raw[:2000].decode(errors="replace")
        try:
            answer = json.loads(raw)
            told = answer.get("error")
            text = str((told.get("message") if isinstance(told, dict) else told) or answer.get("message") or text)
        except (ValueError, AttributeError):
            pass
        if status in (408, 429, 502, 503, 504):
            return EngineUnavailable(self.url, f"{path}: {text}")
        if status == 499:
            return Aborted(f"{path}: {text}")
        return (BadRequest if 400 <= status < 500 else lambda reason: EngineFailed(self.url, reason))(f"{path}: {text}")


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON of each server-sent event, up to [DONE]."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
