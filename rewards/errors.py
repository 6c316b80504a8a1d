"""The error tree of the rewards."""

from tidemill.bus import exit_codes


class RewardError(Exception):
    """Something is wrong with a reward."""


class UnknownReward(RewardError, ValueError):
    """No reward, or other function of its kind, has this name or import path."""

    exit_code = exit_codes.CONFIG

    def __init__(self, name: str, reason: str, word: str = "reward") -> None:
        super().__init__(name, reason, word)
        self.name, self.reason, self.word = name, reason, word

    def __str__(self) -> str:
        return f"{self.word} {self.name!r}: {self.reason}"


class RewardNotImported(UnknownReward):
    """The module of a reward, or of another function of its kind, raised an error while it was imported."""


class BadRewardOption(RewardError, ValueError):
    """A reward, or another function of its kind, got an option that it does not take, or lacks one that it needs."""

    exit_code = exit_codes.CONFIG

    def __init__(
        self, reward: str, option: str, reason: str, word: str = "reward", setting: str = "reward_options"
    ) -> None:
        super().__init__(reward, option, reason, word, setting)
        self.reward, self.option, self.reason, self.word, self.setting = reward, option, reason, word, setting

    def __str__(self) -> str:
        return f"{self.setting}.{self.option}: {self.reason} ({self.word} {self.reward!r})"


class RewardFailed(RewardError):
    """A reward, or another function of its kind, has no result: it returned something else than it may, or too many of
    its calls hang.
    """

    def __init__(self, reward: str, reason: str, word: str = "reward", *, outside: bool = False) -> None:
        """``outside``: the cause lies outside of the row (a server that cannot be reached), so that calls for other
        rows fail, too.
        """
        super().__init__(reward, reason, word)
        self.reward, self.reason, self.word, self.outside = reward, reason, word, outside

    def __str__(self) -> str:
        return f"{self.word} {self.reward!r}: {self.reason}"


def is_outside(error: BaseException) -> bool:
    """Return whether the cause of a reward's error lies outside of its row: a server that it could not reach."""
    return isinstance(error, ConnectionError) or (isinstance(error, RewardFailed) and error.outside)
