"""Examples and cases of which ``make test-all`` tries all, and the other targets some."""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

THOROUGH = bool(os.environ.get("THOROUGH"))
"""Whether all are tried."""


def examples(number: int) -> int:
    """Return how many of ``number`` examples of a property are tried: all, or a sixth."""
    return number if THOROUGH else -(-number // 6)


def rarely(cases: Iterable[Case]) -> list[Case]:
    """Return the cases if all are tried, else none of them."""
    return list(cases) if THOROUGH else []
