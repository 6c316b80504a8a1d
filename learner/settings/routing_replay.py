"""Choices of ``learner.routing_replay``: which passes of a step use experts that an earlier pass has chosen."""

ROLLOUT = "rollout"
REPLAYS = ("none", "old", ROLLOUT)
