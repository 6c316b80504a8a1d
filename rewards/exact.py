"""Reward for an exact match with the label."""

from tidemill.rewards.port import RewardRequest


def exact(request: RewardRequest, *, strip: bool = True, case_sensitive: bool = True) -> float:
    """Return 1.0 if the response equals the label (or one of the labels, if it is a list), else 0.0."""

    def normal(text: object) -> str:
        """Return the text in the form in which it is compared."""
        plain = str(text).strip() if strip else str(text)
        return plain if case_sensitive else plain.casefold()

    labels = request.label if isinstance(request.label, (list, tuple)) else [request.label]
    return float(normal(request.response) in {normal(label) for label in labels})
