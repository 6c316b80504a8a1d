"""Errors of node agents."""

from tidemill.bus import exit_codes
from tidemill.learner.errors import LearnerError


class NodeRefused(LearnerError, ValueError):
    """A node, or the nodes together, cannot run this learner; no restart cures it."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, want: str, got: str, cure: str) -> None:
        super().__init__(where, want, got, cure)
        self.where, self.want, self.got, self.cure = where, want, got, cure

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}; cure: {self.cure}"


class NodeReplaced(LearnerError):
    """Another agent has taken this node rank, after this one had been silent for too long."""

    exit_code = exit_codes.TAKEN_OVER

    def __init__(self, node: int, by: str) -> None:
        super().__init__(node, by)
        self.node, self.by = node, by

    def __str__(self) -> str:
        return f"node {self.node}: another agent has this node rank now: {self.by}"


class LearnerEnded(LearnerError):
    """The learner as a whole was given up: nodes are missing, it failed too often, or a failure that no restart
    cures.
    """

    def __init__(self, reason: str, exit_code: int = exit_codes.CRASHED) -> None:
        super().__init__(reason, exit_code)
        self.reason, self.exit_code = reason, exit_code

    def __str__(self) -> str:
        return self.reason
