"""Environments of OpenEnv, behind their WebSocket: ``environment: openenv`` of ``multi_turn``. Nothing of OpenEnv is
imported.

The messages are those of OpenEnv 0.10, ``openenv/core/env_server/types.py`` (``WSResetMessage`` and those below it):
JSON maps with ``type`` and ``data``. A connection is a session, with an environment of its own.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tidemill.bus.http.client import open_session
from tidemill.bus.wire.json_object import is_number

MAX_MESSAGE_BYTES = 1 << 24
RETRY_S = 1.0
"""Pause before a server that is full, or not there, is asked again."""
FULL = "CAPACITY_REACHED"
OF_THE_ACTION = ("VALIDATION_ERROR", "INVALID_JSON")
"""Errors that an answer of the model causes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The ``environment_options``. Raises ValueError for values that cannot be."""

    url: str
    """Address of the server, http(s) or ws(s)."""
    action: str = "message"
    """Field of the action that is given the answer's text; empty = the answer is the action, as JSON."""
    observation: str = ""
    """Path of the text in the observation, with dots; empty = all of it, as JSON."""
    first: str = "{prompt}\n\n{observation}"
    """The first text."""
    fields: Mapping[str, Any] | None = None
    """Further fields of every action."""
    reset: Mapping[str, Any] | None = None
    """Arguments of each reset; a row's ``metadata.reset`` goes on top."""
    invalid_reward: float = 0.0
    """Reward of an answer that is no action. The model is shown the error."""
    seconds: float = 60.0
    """Limit of each answer of the server."""
    wait_seconds: float = 300.0
    """Time to wait for a session."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise ValueError(f"environment_options.url: want http://HOST:PORT, got {self.url!r}")
        if "{observation}" not in self.first:
            raise ValueError(f"environment_options.first: want {{observation}} in it, got {self.first!r}")
        for name, value in (("fields", self.fields), ("reset", self.reset)):
            if not isinstance(value or {}, Mapping):
                raise ValueError(f"environment_options.{name}: want a map, got {value!r}")
        if not (self.seconds > 0 and self.wait_seconds >= 0):
            got = f"{self.seconds} and {self.wait_seconds}"
            raise ValueError(f"environment_options: want seconds > 0 and wait_seconds >= 0, got {got}")

    @property
    def socket_url(self) -> str:
        """Address of the server's WebSocket."""
        base = self.url.rstrip("/")
        return base if urlsplit(self.url).path.endswith("/ws") else base + "/ws"


class OpenEnv:
    """An episode in an environment of OpenEnv: reset, then a step for every answer."""

    def __init__(self, url: str, **options: Any) -> None:
        """``options``: fields of ``Options``. Raises ValueError, and TypeError for one that is unknown."""
        self._options = Options(url=url, **options)
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, data: Mapping[str, Any]) -> str:
        """Begin a session, and return the first text. Raises RuntimeError."""
        arguments = (data.get("metadata") or {}).get("reset") or {}
        if not isinstance(arguments, Mapping):
            raise RuntimeError(f"metadata.reset: want a map, got {arguments!r:.80}")
        answer = await self._open({**(self._options.reset or {}), **arguments})
        text = self._text(answer)
        return self._options.first.replace("{observation}", text).replace("{prompt}", str(data.get("prompt", "")))

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Play an answer; return the observation, its reward, and whether the episode is over. Raises RuntimeError."""
        try:
            fields = {self._options.action: text} if self._options.action else json.loads(text)
            action = {**(self._options.fields or {}), **fields}
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: want an action as a JSON map: {error}", self._options.invalid_reward, False
        answer = await self._request({"type": "step", "data": action})
        if answer.get("type") == "error":
            code, message = _error(answer)
            if code in OF_THE_ACTION:
                return f"Error: {message}", self._options.invalid_reward, False
            raise RuntimeError(f"the environment failed: {message} ({code})")
        data = _data(answer)
        reward = data.get("reward")
        if reward is not None and (not is_number(reward)):
            raise RuntimeError(f"the environment's reward: want a number or null, got {reward!r:.80}")
        return self._text(answer), float(reward or 0.0), data.get("done") is True

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None and not self._socket.closed:
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(1.0):
                    await self._socket.send_json({"type": "close"})
                    await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _open(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a reset, for which a server that is full, or not there, is asked for a while."""
        self._session = open_session(connect_s=self._options.seconds)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.wait_seconds
        while True:
            try:
                self._socket = await self._session.ws_connect(self._options.socket_url, max_msg_size=MAX_MESSAGE_BYTES)
                answer = await self._request({"type": "reset", "data": dict(arguments)})
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{self._options.socket_url}: {error}"
            else:
                if answer.get("type") != "error":
                    return answer
                code, message = _error(answer)
                if code != FULL:
                    raise RuntimeError(f"the environment refused to reset: {message} ({code})")
                reason = message
                await self._socket.close()
            if loop.time() + RETRY_S > deadline_s:
                raise RuntimeError(f"no session of the environment within {self._options.wait_seconds:g} s: {reason}")
            await asyncio.sleep(RETRY_S)

    async def _request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the answer. Raises RuntimeError."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._options.seconds):
                with suppress(ConnectionError):  # a server that is full sends that error before it hangs up
                    await self._socket.send_json(message)
                received = await self._socket.receive()
        except TimeoutError:
            raise RuntimeError(f"the environment did not answer within {self._options.seconds:g} s") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"the environment hung up: {received.type.name} {received.data!r:.200}")
        try:
            answer = json.loads(received.data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise RuntimeError(f"the environment's answer: want a JSON map, got {received.data!r:.200}")
        return answer

    def _text(self, answer: Mapping[str, Any]) -> str:
        value = _data(answer).get("observation")
        for name in self._options.observation.split(".") if self._options.observation else ():
            if not isinstance(value, Mapping) or name not in value:
                got = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                want = f"{self._options.observation!r} in the observation"
                raise RuntimeError(f"environment_options.observation: want {want}, got {got:.200}")
            value = value[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _data(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    data = answer.get("data")
    if answer.get("type") != "observation" or not isinstance(data, Mapping):
        raise RuntimeError(f"the environment's answer: want an observation, got {answer!r:.200}")
    return data


def _error(answer: Mapping[str, Any]) -> tuple[str, str]:
    data = answer.get("data")
    data = data if isinstance(data, Mapping) else {}
    return str(data.get("code", "")), str(data.get("message", data))[:1000]
