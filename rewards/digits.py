"""Dense reward for short exact strings: the share of positions that are right, the end counted as one of them."""

from bus.messages import Status
from rewards.port import RewardRequest


def digits(request: RewardRequest) -> float:
    """Give the share of right positions of ``label`` and the response, in 0..1.

    Positions are those of the longer string and one more for the end, which is right when the response stopped by itself at the
    label's length. So 1.0 is the label and nothing else, and every part of the way there is worth something.
    """
    label, response = str(request.label), request.response
    right = sum(got == want for got, want in zip(response, label, strict=False))
    ended = request.status is Status.COMPLETED and len(response) == len(label)
    return (right + ended) / (max(len(label), len(response)) + 1)
