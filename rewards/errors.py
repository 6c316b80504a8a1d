"""The error tree of the rewards."""

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError


class RewardError(Exception):
    """Something is wrong with a reward."""


class UnknownReward(DetailedError, RewardError, ValueError):
    """No reward, or other function of its kind, has this name or import path."""

    exit_code = exit_codes.CONFIG
    name: str
    reason: str
    word: str = "reward"
    template = "{word} {name!r}: {reason}"


class RewardNotImported(UnknownReward):
    """The module of a reward, or of another function of its kind, raised an error while it was imported."""


class BadRewardOption(DetailedError, RewardError, ValueError):
    """A reward, or another function of its kind, got an option that it does not take, or lacks one that it needs."""

    exit_code = exit_codes.CONFIG
    reward: str
    option: str
    reason: str
    word: str = "reward"
    setting: str = "reward_options"
    template = "{setting}.{option}: {reason} ({word} {reward!r})"


class RewardFailed(DetailedError, RewardError):
    """A reward, or another function of its kind, has no result, or one that it may not have."""

    reward: str
    reason: str
    word: str = "reward"
    outside: bool = False
    """The cause lies outside of the row (a server that cannot be reached), so that calls for other rows fail, too."""
    template = "{word} {reward!r}: {reason}"


def is_outside(error: BaseException) -> bool:
    """Return whether the cause of a reward's error lies outside of its row: a server that it could not reach."""
    return isinstance(error, ConnectionError) or (isinstance(error, RewardFailed) and error.outside)
