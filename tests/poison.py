"""A reward that cannot judge some prompts until it is mended: in a module of its own, so that actors find it by its import path."""

from pathlib import Path

from rewards.digits import digits
from rewards.port import RewardRequest


def ones(request: RewardRequest, *, mended: str = "") -> float:
    """Fails for labels that begin with 1 while the file ``mended`` is not there."""
    if str(request.label).startswith("1") and not Path(mended).exists():
        raise RuntimeError("no judge for a one")
    return digits(request)
