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


def some(cases: Iterable[Case], every: int) -> list[Case]:
    """Return all cases of a product, or every fifth, say: a stride that shares no factor with the product's sides."""
    return list(cases)[:: 1 if THOROUGH else every]


def rarely(cases: Iterable[Case]) -> list[Case]:
    """Return the cases if all are tried, else none of them."""
    return list(cases) if THOROUGH else []
