"""Equality of short mathematical answers: numbers, fractions, expressions, tuples, sets, intervals, and text.

Bounded in time: one pass over each text, and expressions of bounded length. Source of the normal form: the MATH
benchmark (Hendrycks et al. 2021, arXiv 2103.03874): units, degrees, text and spaces do not matter.
"""

import re

from tidemill.rewards.builtin.math_answer import ASSIGNED, BLANKS, WRAPPED, number_in_box, to_number, ungrouped
from tidemill.rewards.builtin.math_expression import MAX_CHARACTERS, NoExpression, letters, value

_POINTS = ((1.37, 0.61, -0.83, 2.29), (0.47, -1.93, 1.61, 0.71), (2.71, 1.13, 0.37, -1.49))
"""Values for the first four letters of two expressions that are compared."""
_TOLERANCE = 1e-9
_DROPPED = re.compile(r"\^\{?\\circ\}?|\\degree|\\?[$%]")
_UNITS = re.compile(
    r"(?<=[0-9}])\s*(?:square\s+|cubic\s+)?(?:degrees?|cm|mm|km|meters?|metres?|m|feet|foot|ft|inch(?:es)?|units?|dollars?|cents?|hours?|minutes?|"
    r"seconds?|days?|points?|kg|grams?|miles?|mph|percent)(?:\^\{?[23]\}?)?\s*$"
)
_MIXED = re.compile(r"^(-?[0-9]+)\s*\\[dt]?frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}$|^(-?[0-9]+)\s+([0-9]+)/([0-9]+)$")
_LISTED = re.compile(r" {1,9}(?:and|or) {1,9}")
_OPEN, _CLOSE = "([{", ")]}"


def same_math(answer: str, gold: str) -> bool:
    """Return whether two answers are the same number, expression, list of them, or text."""
    first, second = plain(answer), plain(gold)
    if not first or not second:
        return False
    if BLANKS.sub("", first).casefold() == BLANKS.sub("", second).casefold() or _equal(first, second, depth=0):
        return True
    number = number_in_box(answer, words=False)
    return number is not None and number == number_in_box(gold, words=False)


def plain(text: str) -> str:
    r"""Return an answer without ``$``, ``\left``, ``\text{}``, units, ``x =`` and a final full stop."""
    text = ungrouped(WRAPPED.sub(r"\1", text[: 10 * MAX_CHARACTERS])).replace("\N{GREEK SMALL LETTER PI}", r"\pi")
    text = _DROPPED.sub("", text).replace(r"\{", "{").replace(r"\}", "}").replace(r"\cup", "U").strip()
    text = _LISTED.sub(", ", ASSIGNED.sub("", text.removesuffix(".").strip())).replace("**", "^")
    return _UNITS.sub("", text).strip()


def _equal(first: str, second: str, depth: int) -> bool:
    parts, second_parts = _parts(first), _parts(second)
    if parts is None and second_parts is None:
        return _same_value(first, second)
    if parts is None or second_parts is None or depth > 3 or parts[0] != second_parts[0]:
        return False
    brackets, members, unmatched = *parts, second_parts[1]
    if len(members) != len(unmatched):
        return False
    if brackets not in ("{}", ""):
        return all(_equal(*pair, depth + 1) for pair in zip(members, unmatched, strict=True))
    for member in members:  # of a set, or of a list without brackets: in any order
        partner = next((candidate for candidate in unmatched if _equal(member, candidate, depth + 1)), None)
        if partner is None:
            return False
        unmatched.remove(partner)
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and members of ``(1, 2)``, ``[0, 1)``, ``{1}`` or ``1, 2``; None for a single value."""
    is_wrapped = text[:1] in _OPEN and text[-1:] in _CLOSE and _wraps(text)
    brackets, inner = (text[0] + text[-1], text[1:-1]) if is_wrapped else ("", text)
    members, depth, begin = [], 0, 0
    for place, letter in enumerate(inner):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth == 0:
            members.append(inner[begin:place].strip())
            begin = place + 1
    members.append(inner[begin:].strip())
    return (brackets, members) if len(members) in range(2, 33) or brackets == "{}" else None


def _wraps(text: str) -> bool:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if depth == 0:
            return place == len(text) - 1
    return False


def _same_value(first: str, second: str) -> bool:
    numbers = to_number(first), to_number(second)
    if None not in numbers:
        return numbers[0] == numbers[1]
    first, second = _unmixed(first), _unmixed(second)
    names = sorted(letters(first) | letters(second))
    if len(names) > len(_POINTS[0]):
        return False
    try:
        for point in _POINTS[: 3 if names else 1]:
            variables = dict(zip(names, point, strict=False))
            values = value(first, variables), value(second, variables)
            if abs(values[0] - values[1]) > _TOLERANCE * max(1.0, *map(abs, values)):
                return False
    except NoExpression:
        return False
    return True


def _unmixed(text: str) -> str:
    r"""Return ``1\frac{1}{2}`` and ``1 1/2`` as a sum."""
    mixed = _MIXED.match(text)
    if mixed is None:
        return text
    integer, above, below = mixed.groups()[:3] if mixed.group(1) else mixed.groups()[3:]
    return f"{integer}{'-' if integer.startswith('-') else '+'}{above}/{below}"
