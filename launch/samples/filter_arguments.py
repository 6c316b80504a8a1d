"""Parses filter arguments of the command line: they are checked before the connection to a bus."""

import argparse
import re

from tidemill.launch.samples.filters import Filter, Range

_TASK = re.compile(r"([1-9]\d*)(?:\.(\d+))?")


def filter_of(args: argparse.Namespace) -> Filter:
    """Return the filter of the arguments. Raises ValueError naming the argument."""
    task, index = task_of("--task", args.task) if args.task else (None, None)
    return Filter(
        reward=_range("--reward", args.reward),
        lag=_range("--lag", args.lag),
        tokens=_range("--tokens", args.tokens),
        status=tuple(args.status),
        kind=args.kind,
        task=task,
        index=index,
        actor=args.actor,
        engine=args.engine,
        text=_pattern("--text", args.text),
    )


def task_of(where: str, text: str) -> tuple[int, int | None]:
    """Return (task, index) of ``57`` or ``57.3``; index None without one. Raises ValueError naming ``where``."""
    found = _TASK.fullmatch(text)
    if found is None:
        raise ValueError(f"{where}: want TASK or TASK.INDEX, got {text!r}")
    return int(found[1]), None if found[2] is None else int(found[2])


def positive(where: str, number: int | None) -> None:
    """Raise ValueError naming ``where`` for a number below 0; None is accepted."""
    if number is not None and number < 0:
        raise ValueError(f"{where}: want >= 0, got {number}")


def _range(where: str, text: str) -> Range | None:
    return Range.parse(where, text) if text else None


def _pattern(where: str, text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise ValueError(f"{where}: want a regular expression, got {text!r}: {error}") from None
