"""A request to profile the next steps of a running learner: a file in the run's directory, written by a command and read by rank 0.

Knows no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bus.system.files import write_whole

DIRECTORY = "debug"
"""Directory of dumps and traces in that of the run."""
_FILE = "profile.request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Steps to profile."""

    steps: int
    memory: bool = False
    """Record allocations as well."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= 100:
            raise ValueError(f"steps: want 1..100, got {self.steps!r}")


def request_file(root: Path) -> Path:
    """Return the file of a run's request."""
    return root / DIRECTORY / _FILE


def write_request(root: Path, request: ProfileRequest) -> None:
    """Write the request; it replaces one that rank 0 has not begun."""
    write_whole(request_file(root), json.dumps(asdict(request)))


def take_request(root: Path) -> ProfileRequest | None:
    """Return the request and remove it; None without one. Raises ValueError for a file with another content, which is removed as well."""
    file = request_file(root)
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    file.unlink(missing_ok=True)
    try:
        return ProfileRequest(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: want a request of tidemill debug profile, got {text[:60]!r} ({error})") from None
