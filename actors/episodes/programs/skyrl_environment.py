"""Environments of SkyRL-gym (``skyrl-gym`` 0.4): ``environment: skyrl_gym`` of ``multi_turn``. Imported in the rollout's child alone."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.actors.episodes.programs.call_threads import CallThreads
from tidemill.actors.episodes.programs.environment_rows import messages_in, number_of, own

SETTING = "environment: skyrl_gym"


class SkyRL:
    """An episode in a ``BaseTextEnv``. It runs in threads of its own: its tools wait for searches and programs."""

    def __init__(
        self,
        id: str,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """``id``: as ``skyrl_gym.make`` takes it; a row's ``metadata.env`` is another one. ``env_config``: the environment's settings.

        ``extras``: as in rows of SkyRL (``max_turns``, ``reward_spec``, ...), with a row's ``metadata.extras`` on top; the row's label is
        ``reward_spec.ground_truth`` where they have none. ``modules``: imported before, to register environments. Raises ValueError.
        """
        try:
            self._gym = importlib.import_module("skyrl_gym")
        except ImportError as error:
            want = "want the package skyrl-gym in the rollout's interpreter (rollouts.NAME.python)"
            raise ValueError(f"{SETTING}: {want}: {error}") from None
        for module in modules:
            importlib.import_module(module)
        if id not in self._gym.registry:
            raise ValueError(f"environment_options.id: want one of {', '.join(sorted(self._gym.registry))}, got {id!r}")
        config = importlib.import_module("omegaconf").OmegaConf.create(dict(env_config or {}))  # its environments read attributes
        self._id, self._config, self._extras = id, config, dict(extras or {})
        self._env: Any = None
        self._threads = CallThreads()

    async def reset(self, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin an episode, and return the first messages. Raises RuntimeError, and the errors of the environment."""
        id, extras = own(data, self._id)
        extras = {**self._extras, **extras}
        if data.get("label") is not None and "reward_spec" not in extras:
            extras["reward_spec"] = {"method": "rule", "ground_truth": data["label"]}
        given = data.get("prompt")
        prompt = [{"role": "user", "content": given}] if isinstance(given, str) else messages_in(given, "prompt")
        self._env = await self._threads.run(self._gym.make, id, env_config=self._config, extras=extras)
        messages, _ = await self._threads.run(self._env.init, prompt)
        return messages_in(messages, "the environment's prompt")

    async def step(self, text: str) -> tuple[list[dict[str, Any]], float, bool]:
        """Play an answer; return the messages behind it, its reward, and whether the episode is over. Raises RuntimeError.

        An environment that has changed the answer (``postprocessed_action``) returns it as the first message.
        """
        assert self._env is not None
        out = await self._threads.run(self._env.step, text)
        if not isinstance(out, Mapping) or not {"observations", "reward", "done"} <= set(out):
            raise RuntimeError(f"the environment's step: want observations, reward and done, got {out!r:.80}")
        seen = messages_in(out["observations"], "the environment's observations")
        changed = out.get("postprocessed_action")
        if isinstance(changed, str) and changed != text:
            seen = [{"role": "assistant", "content": changed}, *seen]
        return seen, number_of(out["reward"]), bool(out["done"])

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            await self._threads.run(self._env.close)
