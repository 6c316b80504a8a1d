"""Rewards of groups: functions of all responses to a prompt at once, which see the reward that ``actor.reward`` gave to
each.

The actor calls one when every sample of a task is generated; its results replace the rewards of the samples.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import score_of
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Contract, Parts, RewardRequest, fields_of, to_request
from tidemill.rewards.registry import checked

Reward = float | dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """All finished responses to a prompt: the argument of a reward of groups."""

    samples: tuple[RewardRequest, ...]
    rewards: tuple[Reward, ...] = ()
    """Reward of each sample by ``actor.reward`` or ``actor.reward_parts``; empty without them."""


# ---- the reward of groups that ships


def relative_length(request: GroupRequest, *, weight: float = 1.0, right_at: float = 1.0) -> list[dict[str, float]]:
    """Add ``weight`` times 0.5 to the shortest and -0.5 to the longest response, in between by sampled tokens.

    A wrong response (with a reward below ``right_at``) gets at most 0. Source: Kimi k1.5, 2501.12599, section 2.3.3.
    """
    if not request.rewards:
        reason = "want actor.reward: it is added to the reward of each response"
        raise RewardFailed("relative_length", reason, GROUP.word)
    lengths = [sample.sampled_length for sample in request.samples]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = []
    for length, reward in zip(lengths, request.rewards, strict=True):
        score = score_of(reward)
        bonus = 0.5 - (length - shortest) / spread if spread else 0.0
        bonus = bonus if score >= right_at else min(0.0, bonus)
        rewards.append({"score": score + weight * bonus, "reward": score, "length": bonus})
    return rewards


TABLE = {
    "relative_length": "tidemill.rewards.group:relative_length",
    "remote": "tidemill.rewards.remote:RemoteGroupReward",
}
# They ask a server, so an actor runs them in a child process, and a configuration from elsewhere is not trusted
ASKING = frozenset({"remote"})


# ---- contract


def _checked(name: str, result: object) -> list[Reward]:
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Sequence):
        raise RewardFailed(name, f"want a list with a reward for each sample, got {result!r}"[:500], "group reward")
    return [checked(f"{name}[{place}]", reward) for place, reward in enumerate(result)]


def group_fields(request: GroupRequest) -> JsonObject:
    return {"samples": [fields_of(sample) for sample in request.samples], "rewards": list(request.rewards)}


def _encode(request: GroupRequest) -> bytes:
    return json.dumps(group_fields(request)).encode()


def _decode(fields: JsonMapping) -> GroupRequest:
    return GroupRequest(samples=tuple(map(to_request, fields["samples"])), rewards=tuple(fields["rewards"]))


# The contract of rewards of groups: a GroupRequest in, a list of numbers or of named numbers out
GROUP = Contract(
    word="group reward",
    options="group_reward_options",
    argument="GroupRequest",
    path="tidemill.rewards.group:GROUP",
    table=TABLE,
    encode=_encode,
    decode=_decode,
    checked=_checked,
)

# A plain or an async callable; its keyword parameters are its options
GroupReward = Callable[[GroupRequest], Sequence[Parts] | Awaitable[Sequence[Parts]]]
