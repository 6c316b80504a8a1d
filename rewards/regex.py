"""Reward for a response that a regular expression describes. A pattern may take exponential time, so it runs in child processes."""

import re

from tidemill.rewards.port import RewardRequest


def regex(request: RewardRequest, *, pattern: str, whole: bool = False, group: str = "") -> float:
    """Return 1.0 if ``pattern`` is found in the response (``whole``: if it describes all of it), else 0.0.

    ``group``: name or number of a group; its text in the last match, stripped, must equal the label. Dots match line ends.
    """
    compiled = re.compile(pattern, re.DOTALL)
    if whole:
        found = compiled.fullmatch(request.response)
    else:
        found = None
        for found in compiled.finditer(request.response):  # noqa: B007 - the last one counts
            pass
    if found is None or not group:
        return float(found is not None)
    text = found.group(int(group) if group.isdecimal() else group)
    return float(text is not None and text.strip() == str(request.label).strip())
