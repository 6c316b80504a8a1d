"""Environments of GEM (``gem-llm`` 0.1): ``environment: gem`` of ``multi_turn``. GEM is imported in the rollout's child process alone.

An environment that has ended is reset for the next episode, as Gym's contract allows: making one may load a data set.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tidemill.actors.episodes.programs.environment_rows import number_of, only_text, own

SETTING = "environment: gem"


class Gem:
    """An episode in an environment of GEM. It plays in the loop's thread: some of GEM's environments use signals."""

    _idle: ClassVar[dict[str, list[Any]]] = {}
    """Environments that have ended, by id and options."""

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        first: str = "{observation}",
    ) -> None:
        """``id``: as ``gem.make`` takes it; a row's ``metadata.env`` is another one. ``options``: its arguments, with a row's
        ``metadata.extras`` on top. ``modules``: imported before, to register environments. ``first``: the first text, of
        ``{observation}`` and ``{prompt}``. Raises ValueError.
        """
        if "{observation}" not in first:
            raise ValueError(f"environment_options.first: want {{observation}} in it, got {first!r}")
        try:
            self._gem = importlib.import_module("gem")
        except ImportError as error:
            raise ValueError(f"{SETTING}: want the package gem-llm in the rollout's interpreter (rollouts.NAME.python): {error}") from None
        for module in modules:
            importlib.import_module(module)
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if id not in known:
            raise ValueError(f"environment_options.id: want an environment of GEM ({len(known)} are registered), got {id!r}")
        self._id, self._options, self._first = id, dict(options or {}), first
        self._key = ""
        self._env: Any = None

    def reset(self, data: Mapping[str, Any]) -> str:
        """Begin an episode, and return the first text. Raises RuntimeError, and the errors of the environment.

        The seed is ``metadata.seed``, or else the task's id: all members of a group begin alike.
        """
        id, extras = own(data, self._id)
        options = {**self._options, **extras}
        self._key = json.dumps([id, options], sort_keys=True)
        idle = self._idle.get(self._key)
        env = idle.pop() if idle else self._gem.make(id, **options)
        seed = (data.get("metadata") or {}).get("seed", data.get("task", 0))
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise RuntimeError(f"metadata.seed: want a whole number >= 0, got {seed!r:.80}")
        observation, info = env.reset(seed=seed % 2**32)  # numpy takes no larger one
        self._env = env
        return self._first.replace("{observation}", _seen(observation, info)).replace("{prompt}", str(data.get("prompt", "")))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Play an answer; return the observation, its reward, and whether the episode is over. Raises RuntimeError."""
        assert self._env is not None
        env, self._env = self._env, None  # one that raises is not used again
        observation, reward, terminated, truncated, info = env.step(text)
        self._env = env
        return _seen(observation, info), number_of(reward), bool(terminated) or bool(truncated)

    def close(self) -> None:
        """Keep the environment for another episode."""
        if self._env is not None:
            self._idle.setdefault(self._key, []).append(self._env)
            self._env = None


def _seen(observation: object, info: object) -> str:
    """Return an observation with its suffix, by which GEM asks for the next action."""
    text, suffix = only_text(observation), info.get("suffix") if isinstance(info, Mapping) else None
    return f"{text}\n{suffix}" if isinstance(suffix, str) and suffix else text
