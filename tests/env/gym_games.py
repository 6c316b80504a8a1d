"""Environments of GEM and of SkyRL-gym for the tests, registered by those of the packages that are installed."""

import random
from typing import Any

try:
    import gem

    class Count(gem.Env):
        """Three answers; each earns its number. The start is drawn by the seed."""

        def __init__(self, last: int = 3, fails_at: int = 0, reward: float = 1.0) -> None:
            self.last, self.fails_at, self.unit, self.turn = last, fails_at, reward, 0

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed)
            self.turn = 0
            return f"start {random.randint(0, 10**6)}", {"suffix": "say something"}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.turn += 1
            if self.turn == self.fails_at:
                raise ValueError("boom")
            return f"seen {self.turn}", self.turn * self.unit, False, self.turn == self.last, {}

    gem.register("test:Count", Count)
except ImportError:
    pass

try:
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Talk(BaseTextEnv):
        """Answers with two messages, and shortens the second answer."""

        def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
            super().__init__()
            self.extras, self.word = extras or {}, env_config.word

        def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
            return [{"role": "system", "content": self.word}, *prompt], {}

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            if self.turns == self.extras.get("fails_at"):
                raise ValueError("boom")
            said = [
                {"role": "user", "content": f"{self.turns}"},
                {"role": "user", "content": self.extras["reward_spec"]["ground_truth"]},
            ]
            out = BaseTextEnvStepOutput(observations=said, reward=0.5 * self.turns, done=self.turns == 3, metadata={})
            return BaseTextEnvStepOutput(**out, postprocessed_action="short") if self.turns == 2 else out

    skyrl_gym.register(id="test_talk", entry_point=Talk)
except ImportError:
    pass
