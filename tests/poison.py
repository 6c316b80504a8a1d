"""Rewards that fail for some prompts or responses: in a module of their own, so that actors find them by import
path.
"""

import asyncio
from pathlib import Path

from tests.unhurried import WAIT_S
from tidemill.rewards.builtin.text import digits
from tidemill.rewards.port import RewardRequest


async def ones(request: RewardRequest, *, mended: str = "", wait_s: float = WAIT_S) -> float:
    """Return 1; fail for labels that begin with 1 while the file ``mended`` does not exist."""
    await asyncio.sleep(wait_s)
    if str(request.label).startswith("1") and not Path(mended).exists():  # noqa: ASYNC240
        raise RuntimeError("no judge for a one")
    return digits(request)


def some(request: RewardRequest) -> float:
    """Fail for the responses that begin with one of an eighth of the tokens."""
    if int(request.tokens[-request.response_length]) % 8 == 5:
        raise RuntimeError("no judge for this beginning")
    return digits(request)


def none(request: RewardRequest) -> float:
    """Fail for every response."""
    raise RuntimeError("no judge at all")
