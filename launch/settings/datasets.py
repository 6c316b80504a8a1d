"""Prompt files: JSONL with one ``{"prompt": ..., "label": ...}`` a line. Knows the digits game and the shipped
GSM8K.
"""

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tidemill.launch.settings.prepare_config import PrepareConfig
from tidemill.launch.settings.shipped import DATA

GOLD_MARKER = "####"
"""Text before the answer in a line of GSM8K."""
FILLER = "."
"""Character that fills up short prompts of the digits game (``prepare.fill``)."""


def prompts(config: PrepareConfig) -> Iterator[dict[str, str]]:
    """Return the prompts that ``config`` describes, the same ones every time."""
    if config.kind == "gsm8k":
        return islice(gsm8k_prompts(DATA / "gsm8k/train.jsonl"), config.count or None)
    return digits_prompts(config)


def digits_prompts(config: PrepareConfig) -> Iterator[dict[str, str]]:
    """Yield prompts such as ``482=`` with their label: the largest digit of 482, itself, its reverse, or its digits in
    order.

    For the task ``sum``: ``12+7=`` with the label ``19``. For ``walk``: ``3.7=`` with the label ``7``.
    """
    rng = random.Random(config.seed)
    if config.task == "sum":
        yield from sum_prompts(config, rng)
        return
    if config.task == "walk":
        yield from walk_prompts(config, rng)
        return
    for _ in range(config.count):
        length = rng.randint(config.min_digits, config.max_digits)
        digits = "".join(rng.choice("0123456789") for _ in range(length))
        filler = FILLER * (config.max_digits - length) if config.fill else ""
        yield {"prompt": f"{digits}{filler}=", "label": solve(config.task, digits)}


def sum_prompts(config: PrepareConfig, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield sums of two numbers without leading zeros."""
    for _ in range(config.count):
        lengths = [rng.randint(config.min_digits, config.max_digits) for _ in range(2)]
        first, second = (
            str(rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)) for length in lengths
        )
        filler = FILLER * (2 * config.max_digits + 1 - len(f"{first}+{second}")) if config.fill else ""
        yield {"prompt": f"{first}+{second}{filler}=", "label": str(int(first) + int(second))}


def walk_prompts(config: PrepareConfig, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield ways from one digit to another (``actors/episodes/programs/walk.py``)."""
    for _ in range(config.count):
        at, goal = rng.sample("0123456789", 2)
        yield {"prompt": f"{at}.{goal}=", "label": goal}


def solve(task: str, digits: str) -> str:
    """Return the right response to a prompt of the digits game. Raises ValueError for an unknown task."""
    match task:
        case "largest":
            return max(digits)
        case "copy":
            return digits
        case "reverse":
            return digits[::-1]
        case "sort":
            return "".join(sorted(digits))
    raise ValueError(f"task: want largest, copy, reverse or sort, got {task!r}")


def gsm8k_prompts(path: Path) -> Iterator[dict[str, str]]:
    """Yield each GSM8K question with its label, the number after ``####``. Raises ValueError without one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            _, marker, gold = row["answer"].rpartition(GOLD_MARKER)
            if not marker or not gold.strip():
                raise ValueError(
                    f"{path}:{number}: answer: want text that ends in '{GOLD_MARKER} number', got {row['answer']!r}"
                )
            yield {"prompt": row["question"], "label": gold.strip()}


def gsm8k_texts() -> Iterator[str]:
    """Yield questions and worked answers unchanged, to train a tokenizer on."""
    with (DATA / "gsm8k/train.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["question"]
            yield row["answer"]


def write_prompts(path: Path, rows: Iterable[dict[str, str]]) -> int:
    """Write prompts to a JSONL file and return their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
