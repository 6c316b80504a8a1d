"""Environments of other libraries for ``multi_turn``: GEM (``gem-llm`` 0.1), SkyRL-gym (``skyrl-gym`` 0.4) and OpenEnv.

An environment of OpenEnv is a server behind a WebSocket; nothing of OpenEnv is imported. The messages are those of
OpenEnv 0.10, ``openenv/core/env_server/types.py`` (``WSResetMessage`` and those below it): JSON maps with ``type`` and
``data``. A connection is a session, with an environment of its own.
"""

import asyncio
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsFloat
from urllib.parse import urlsplit

import aiohttp

from tidemill.actors.episodes.programs.tools import CallThreads
from tidemill.bus.errors import WireError
from tidemill.bus.http.client import open_session
from tidemill.bus.system.functions import find_object
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import is_integer, is_number


def env_of_row(data: Mapping[str, Any], default: str) -> tuple[str, dict[str, Any]]:
    """Return the id of a row's environment (``metadata.env``) and its ``metadata.extras``. Raises RuntimeError."""
    metadata = data.get("metadata") or {}
    env, extras = metadata.get("env", default), metadata.get("extras") or {}
    if not isinstance(env, str) or not env:
        raise RuntimeError(f"metadata.env: want the id of an environment, got {env!r:.80}")
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        raise RuntimeError(f"metadata.extras: want a map with names, got {extras!r:.80}")
    return env, dict(extras)


def number_of(reward: SupportsFloat) -> float:
    """Return a reward as a float. Raises RuntimeError unless it is a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(reward, str | bytes) or not math.isfinite(value):
        raise RuntimeError(f"the environment's reward: want a finite number, got {reward!r:.80}")
    return value


def messages_in(messages: object, where: str) -> list[dict[str, Any]]:
    """Return messages. Raises RuntimeError for anything else."""
    if isinstance(messages, list | tuple) and not messages:  # behind the last answer
        return []
    try:
        return chat_messages(messages, where)
    except WireError as error:
        raise RuntimeError(str(error)) from None


def _library(name: str, package: str, modules: Sequence[str]) -> Any:
    """Import a library, and modules that register environments with it. Raises ValueError where it is missing."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        want = f"want the package {package} in the rollout's interpreter (rollouts.NAME.python)"
        raise ValueError(f"environment: {name}: {want}: {error}") from None
    for module in modules:
        importlib.import_module(module)
    return library


class SkyRL:
    """An episode in a ``BaseTextEnv``. It runs in threads of its own: its tools wait for searches and programs."""

    def __init__(
        self,
        id: str,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """``id``: as ``skyrl_gym.make`` takes it; a row's ``metadata.env`` is another one. ``env_config``: the
        environment's settings.

        ``extras``: as in rows of SkyRL (``max_turns``, ``reward_spec``, ...), with a row's ``metadata.extras`` on top;
        the row's label is ``reward_spec.ground_truth`` where they have none. ``modules``: imported before, to register
        environments. Raises ValueError.
        """
        self._gym = _library("skyrl_gym", "skyrl-gym", modules)
        if id not in self._gym.registry:
            raise ValueError(f"environment_options.id: want one of {', '.join(sorted(self._gym.registry))}, got {id!r}")
        # Its environments read settings as attributes.
        self._config = importlib.import_module("omegaconf").OmegaConf.create(dict(env_config or {}))
        self._env_id, self._extras = id, dict(extras or {})
        self._env: Any = None
        self._threads = CallThreads()

    async def reset(self, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin an episode, and return the first messages. Raises RuntimeError, and the errors of the environment."""
        env_id, extras = env_of_row(data, self._env_id)
        extras = {**self._extras, **extras}
        if data.get("label") is not None and "reward_spec" not in extras:
            extras["reward_spec"] = {"method": "rule", "ground_truth": data["label"]}
        prompt = data.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_in(prompt, "prompt")
        self._env = await self._threads.run(self._gym.make, env_id, env_config=self._config, extras=extras)
        messages, _ = await self._threads.run(self._env.init, messages)
        return messages_in(messages, "the environment's prompt")

    async def step(self, text: str) -> tuple[list[dict[str, Any]], float, bool]:
        """Play an answer; return the messages behind it, its reward, and whether the episode is over. Raises
        RuntimeError.

        An environment that has changed the answer (``postprocessed_action``) returns it as the first message.
        """
        assert self._env is not None
        out = await self._threads.run(self._env.step, text)
        if not isinstance(out, Mapping) or not {"observations", "reward", "done"} <= set(out):
            raise RuntimeError(f"the environment's step: want observations, reward and done, got {out!r:.80}")
        messages = messages_in(out["observations"], "the environment's observations")
        action = out.get("postprocessed_action")
        if isinstance(action, str) and action != text:
            messages = [{"role": "assistant", "content": action}, *messages]
        return messages, number_of(out["reward"]), bool(out["done"])

    async def close(self) -> None:
        if self._env is not None:
            await self._threads.run(self._env.close)


class Gem:
    """An episode in an environment of GEM. It plays in the loop's thread: some of GEM's environments use signals.

    An environment that has ended is reset for the next episode, as Gym's contract allows: making one may load a data
    set.
    """

    _idle: ClassVar[dict[str, list[Any]]] = {}
    """Environments that have ended, by id and options."""

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        first: str = "{observation}",
    ) -> None:
        """``id``: as ``gem.make`` takes it; a row's ``metadata.env`` is another one. ``options``: its arguments, with a
        row's ``metadata.extras`` on top. ``modules``: imported before, to register environments. ``first``: the first
        text, of ``{observation}`` and ``{prompt}``. Raises ValueError.
        """
        if "{observation}" not in first:
            raise ValueError(f"environment_options.first: want {{observation}} in it, got {first!r}")
        self._gem = _library("gem", "gem-llm", modules)
        registry = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if id not in registry:
            want = f"an environment of GEM ({len(registry)} are registered)"
            raise ValueError(f"environment_options.id: want {want}, got {id!r}")
        self._env_id, self._options, self._first = id, dict(options or {}), first
        self._key = ""
        self._env: Any = None

    def reset(self, data: Mapping[str, Any]) -> str:
        """Begin an episode, and return the first text. Raises RuntimeError, and the errors of the environment.

        The seed is ``metadata.seed``, or else the task's id: all members of a group begin alike.
        """
        env_id, extras = env_of_row(data, self._env_id)
        options = {**self._options, **extras}
        self._key = json.dumps([env_id, options], sort_keys=True)
        idle = self._idle.get(self._key)
        env = idle.pop() if idle else self._gem.make(env_id, **options)
        seed = (data.get("metadata") or {}).get("seed", data.get("task", 0))
        if not is_integer(seed) or not 0 <= seed < 2**63:
            raise RuntimeError(f"metadata.seed: want a whole number >= 0, got {seed!r:.80}")
        observation, info = env.reset(seed=seed % 2**32)  # numpy takes no larger one
        self._env = env
        text = self._first.replace("{observation}", _text_of(observation, info))
        return text.replace("{prompt}", str(data.get("prompt", "")))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Play an answer; return the observation, its reward, and whether the episode is over. Raises RuntimeError."""
        assert self._env is not None
        env, self._env = self._env, None  # one that raises is not used again
        observation, reward, terminated, truncated, info = env.step(text)
        self._env = env
        return _text_of(observation, info), number_of(reward), bool(terminated) or bool(truncated)

    def close(self) -> None:
        """Keep the environment for another episode."""
        if self._env is not None:
            self._idle.setdefault(self._key, []).append(self._env)
            self._env = None


def _text_of(observation: object, info: object) -> str:
    """Return an observation with its suffix, by which GEM asks for the next action. Raises RuntimeError."""
    if not isinstance(observation, str):
        raise RuntimeError(f"the environment's observation: want a text, got {type(observation).__name__}")
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    return f"{observation}\n{suffix}" if isinstance(suffix, str) and suffix else observation


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


ENVIRONMENTS: dict[str, Callable[..., Any]] = {"openenv": OpenEnv, "gem": Gem, "skyrl_gym": SkyRL}
"""Environments that ship, by name."""


def environment_class(path: str, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the class of an environment by its name or import path; None = there is none. Raises ValueError."""
    if not path:
        return None
    if path in ENVIRONMENTS:
        ENVIRONMENTS[path](**options)  # it refuses impossible options
        return ENVIRONMENTS[path]
    if ":" not in path:
        raise ValueError(f"environment: want {', '.join(ENVIRONMENTS)} or module:Class, got {path!r}")
    environment: Callable[..., Any] = find_object(path, "environment", want="module:Class")
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise ValueError(f"environment: want a class with {method}, {path} has none")
    inspect.signature(environment).bind(**options)
    return environment
