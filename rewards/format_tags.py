"""Reward for the form of a response: tags in order, each exactly once, with nothing outside of them.

Source: the format reward of DeepSeek-R1 (DeepSeek-AI 2025, arXiv 2501.12948): thoughts between ``<think>`` tags, then the answer.
"""

from tidemill.rewards.port import RewardRequest


def format_tags(request: RewardRequest, *, tags: str = "think answer", outside: bool = False) -> float:
    """Return 1.0 if the response is ``<think>...</think><answer>...</answer>`` with text in each, else 0.0.

    ``tags``: their names in order, with spaces between. ``outside``: other text may stand before, between and after them.
    """
    rest = request.response
    for tag in tags.split():
        opened, closed = f"<{tag}>", f"</{tag}>"
        if request.response.count(opened) != 1 or request.response.count(closed) != 1:
            return 0.0
        before, found, rest = rest.partition(opened)
        inside, ended, rest = rest.partition(closed)
        if not found or not ended or not inside.strip() or (before.strip() and not outside):
            return 0.0
    return float(outside or not rest.strip())
