"""A buffer filter: each step takes prompts of different levels, and groups that wait for long are not kept for ever."""

from collections import Counter

from tidemill.learner import Decision, FilterBuffer


def balanced(buffer: FilterBuffer, *, max_lag: int = 4) -> list[Decision]:
    """Drop groups with a lag above ``max_lag``; take the first group of each level, then the second of each, and so
    on.
    """
    seen: Counter[str] = Counter()
    decisions = []
    for group in buffer.groups:
        lag = max(sample.lag for sample in group.samples)
        if lag > max_lag:
            decisions.append(Decision(keep=False, reason="old"))
            continue
        level = str(group.metadata.get("level"))
        decisions.append(Decision(priority=-float(seen[level])))
        seen[level] += 1
    return decisions
