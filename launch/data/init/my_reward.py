"""The reward of the run: a function that takes a request and returns a number."""

from tidemill.rewards import RewardRequest


def contains(request: RewardRequest) -> float:
    """Return 1 when the label occurs in the response, else 0."""
    return float(str(request.label) in request.response)
