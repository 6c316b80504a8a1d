"""A request to profile the next steps of a running learner: a file in the run's directory, written by a command and read by rank 0.

Rank 0 sends it to all ranks before the next step, and the one that it names profiles. Knows no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.bus.system.files import write_whole

DIRECTORY = "debug"
"""Directory of dumps and traces in that of the run."""
_FILE = "profile.request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Steps to profile."""

    steps: int
    memory: bool = False
    """Record allocations as well."""
    rank: int = 0
    """Rank that profiles its steps."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= 100:
            raise ValueError(f"steps: want 1..100, got {self.steps!r}")
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"rank: want 0 or more, got {self.rank!r}")

    def refuse_unknown_rank(self, num_ranks: int) -> None:
        """Raise ValueError if a learner of ``num_ranks`` does not have the rank."""
        if self.rank >= num_ranks:
            raise ValueError(f"rank: want 0..{num_ranks - 1}, one of the {num_ranks} ranks of this run's learner, got {self.rank}")


def request_file(root: Path) -> Path:
    """Return the file of a run's request."""
    return root / DIRECTORY / _FILE


def trace_name(rank: int, first: object, last: object) -> str:
    """Return the name of the file with the trace of these steps."""
    return f"profile_rank{rank}_{first}_{last}.json.gz"


def write_request(root: Path, request: ProfileRequest) -> None:
    """Write the request; it replaces one that rank 0 has not read."""
    write_whole(request_file(root), json.dumps(asdict(request)))


def take_request(root: Path, num_ranks: int) -> ProfileRequest | None:
    """Return the request and remove it; None without one.

    Raises ValueError for a file with another content, or for a rank that is not one of ``num_ranks``; the file is removed as well.
    """
    file = request_file(root)
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    file.unlink(missing_ok=True)
    try:
        request = ProfileRequest(**json.loads(text))
        request.refuse_unknown_rank(num_ranks)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: want a request of tidemill debug profile, got {text[:60]!r} ({error})") from None
    return request
