"""A source of prompts: rows that are computed. Every call gives the same ones, for a run that is resumed."""

import random
from collections.abc import Iterator


def sums() -> Iterator[dict[str, object]]:
    """Yield a hundred sums with their answers."""
    numbers = random.Random(7)
    for _ in range(100):
        first, second = numbers.randint(1, 99), numbers.randint(1, 99)
        yield {
            "prompt": f"{first} + {second} =",
            "label": first + second,
            "metadata": {"level": "hard" if first + second > 99 else "easy"},
        }
