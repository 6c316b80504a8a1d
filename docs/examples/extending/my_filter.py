"""A filter: groups that are solved already are dropped, responses without a word are not trained, hard prompts come
first.
"""

from tidemill.learner import Decision, FilterGroup


def useful(group: FilterGroup, *, solved: float = 0.9) -> Decision:
    """Drop a group of which more than ``solved`` is right; mask empty responses."""
    right = sum(sample.reward > 0 for sample in group.samples) / len(group.samples)
    empty = tuple(sample.index for sample in group.samples if not sample.response.strip())
    return Decision(keep=right <= solved, reason="solved", masked=empty, priority=1.0 - right)
