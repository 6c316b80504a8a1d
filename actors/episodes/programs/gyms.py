"""Environments of GEM (``gem-llm`` 0.1) and SkyRL-gym (``skyrl-gym`` 0.4) for ``multi_turn``, in a child alone."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, SupportsFloat

from tidemill.actors.episodes.programs.call_threads import CallThreads
from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import is_integer


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
        """Close the environment."""
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
