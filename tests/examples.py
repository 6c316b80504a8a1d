"""Number of examples of the property tests with many: ``make test-all`` tries all of them, the other targets a
third.
"""

import os

THOROUGH = "THOROUGH"
"""Environment variable: all examples are tried."""


def examples(number: int) -> int:
    """Return how many of ``number`` examples are tried."""
    return number if os.environ.get(THOROUGH) else -(-number // 3)
