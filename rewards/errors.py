"""The error tree of the rewards."""

from bus import exit_codes


class RewardError(Exception):
    """Something is wrong with a reward."""


class UnknownReward(RewardError, ValueError):
    """No reward has this name or import path."""

    exit_code = exit_codes.CONFIG

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"reward {self.name!r}: {self.reason}"


class BadRewardOption(RewardError, ValueError):
    """A reward got an option that it does not take, or lacks one that it needs."""

    exit_code = exit_codes.CONFIG

    def __init__(self, reward: str, option: str, reason: str) -> None:
        super().__init__(reward, option, reason)
        self.reward, self.option, self.reason = reward, option, reason

    def __str__(self) -> str:
        return f"reward_options.{self.option}: {self.reason} (reward {self.reward!r})"


class RewardFailed(RewardError):
    """A reward could not score a response: it returned something else than numbers, or too many of its calls hang."""

    def __init__(self, reward: str, reason: str) -> None:
        super().__init__(reward, reason)
        self.reward, self.reason = reward, reason

    def __str__(self) -> str:
        return f"reward {self.reward!r}: {self.reason}"
