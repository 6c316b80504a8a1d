"""Dense reward for short exact strings: the share of correct positions, with the end counted as one position."""

from tidemill.bus.wire.messages import Status
from tidemill.rewards.port import RewardRequest


def digits(request: RewardRequest) -> float:
    """Return the share of positions at which the response equals the label, in 0..1.

    Positions are those of the longer string and one more for the end, which is correct when the response stopped by itself at the
    label's length. So only the label itself scores 1.0, and every partial match scores more than none.
    """
    label, response = str(request.label), request.response
    right = sum(got == want for got, want in zip(response, label, strict=False))
    ended = request.status is Status.COMPLETED and len(response) == len(label)
    return (right + ended) / (max(len(label), len(response)) + 1)
