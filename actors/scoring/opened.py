"""The rewards of a run, opened in the process that computes them: an actor, or a scorer."""

from contextlib import AsyncExitStack

from tidemill.actors.config import ActorConfig
from tidemill.rewards.children.limits import Limits
from tidemill.rewards.part_settings import read_parts
from tidemill.rewards.port import Scorer
from tidemill.rewards.scorers.groups import GroupScorer, opened_group
from tidemill.rewards.scorers.parts import opened_parts
from tidemill.rewards.scorers.single import opened


async def open_rewards(stack: AsyncExitStack, config: ActorConfig) -> tuple[Scorer | None, GroupScorer | None]:
    """Return the reward of samples and that of groups; None where there is none. ``stack`` closes them.

    Raises UnknownReward, BadRewardOption, RewardFailed (a process with the reward could not be started).
    """
    limits = Limits(timeout_s=config.reward_timeout_s, workers=config.reward_workers, memory_mb=config.reward_memory_mb)
    score: Scorer | None = None
    if config.reward_parts:
        score = await stack.enter_async_context(opened_parts(read_parts(config.reward_parts), limits))
    elif config.reward or not config.group_reward:
        score = await stack.enter_async_context(opened(config.reward, config.reward_options, limits))
    group_score: GroupScorer | None = None
    if config.group_reward:
        group_score = await stack.enter_async_context(opened_group(config.group_reward, config.group_reward_options, limits))
    return score, group_score
