"""Equality of short mathematical answers: numbers, fractions, expressions, tuples, sets, intervals, and text.

An expression is evaluated at given values of its letters, in complex floats. Two that agree at several arbitrary points
are taken as equal (Schwartz 1980, Zippel 1979: a polynomial that is not 0 is 0 at few points).

Bounded in time: one pass over each text, and expressions of bounded length. Source of the normal form: the MATH
benchmark (Hendrycks et al. 2021, arXiv 2103.03874): units, degrees, text and spaces do not matter.
"""

import cmath
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.bus.wire.json_object import is_number
from tidemill.rewards.builtin.math_answer import (
    ASSIGNED,
    BLANKS,
    WRAPPED,
    last_boxed,
    number_in_box,
    to_number,
    ungrouped,
)
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

MAX_CHARACTERS = 300
MAX_DEPTH = 40
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|\\([a-zA-Z]+)|([a-zA-Z])|(.))", re.DOTALL)
_FUNCTIONS = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "ln": cmath.log,
    "log": cmath.log10,
    "exp": cmath.exp,
}
_FRACTIONS = ("frac", "dfrac", "tfrac")
_TIMES = {"cdot": "*", "times": "*", "div": "/"}
_SILENT = ("left", "right", "displaystyle")
_NAMES = {"pi": cmath.pi, "infty": complex("inf")}


class NoExpression(ValueError):
    """The text is no expression that this module reads, or has no finite value."""


def letters(text: str) -> set[str]:
    """Return the variables of an expression: single letters, without ``e`` and ``i``, which are numbers."""
    return {match.group(3) for match in _TOKEN.finditer(text) if match.group(3)} - {"e", "i"}


def value(text: str, variables: Mapping[str, complex]) -> complex:
    """Return the value of an expression. Raises NoExpression."""
    if len(text) > MAX_CHARACTERS:
        raise NoExpression(f"{len(text)} characters")
    parser = _Parser(text, variables)
    try:
        result = parser.sum(0)
    except (ArithmeticError, ValueError) as error:
        raise NoExpression(str(error)) from None
    if parser.next() or not cmath.isfinite(result):
        raise NoExpression("no expression, or no finite value")
    return result


class _Parser:
    r"""Recursive descent: sum of products of powers of atoms. A product needs no sign: ``2\sqrt{3}``, ``(x+1)y``."""

    def __init__(self, text: str, variables: Mapping[str, complex]) -> None:
        self._tokens = [token for match in _TOKEN.finditer(text) if (token := _token(match))]
        self._place, self._variables = 0, variables

    def next(self) -> str:
        """Return the next token without taking it; empty at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def sum(self, depth: int) -> complex:
        if depth > MAX_DEPTH:
            raise NoExpression("too deep")
        total = self._product(depth)
        while self.next() in ("+", "-"):
            sign = self._take()
            total += self._product(depth) if sign == "+" else -self._product(depth)
        return total

    def _product(self, depth: int) -> complex:
        sign = 1
        while self.next() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        product = self._power(depth)
        while (token := self.next()) and token not in "+-)}]^,=":
            if token in "*/":
                self._take()
                factor = self._signed(depth)
                product = product * factor if token == "*" else product / factor
            else:
                product *= self._power(depth)
        return sign * product

    def _signed(self, depth: int) -> complex:
        if self.next() in ("+", "-"):
            return -self._power(depth) if self._take() == "-" else self._power(depth)
        return self._power(depth)

    def _power(self, depth: int) -> complex:
        base = self._atom(depth)
        if self.next() != "^":
            return base
        self._take()
        if depth > MAX_DEPTH:
            raise NoExpression("too deep")
        exponent = self._group(depth) if self.next() == "{" else self._signed(depth + 1)
        return complex(base) ** complex(exponent)

    def _atom(self, depth: int) -> complex:
        token = self._take()
        if token in ("(", "["):
            return self._rest(depth, ")" if token == "(" else "]")
        if token == "{":
            return self._rest(depth, "}")
        if token[:1] == "\\":
            return self._command(token[1:], depth)
        if token[0].isdigit() or token[0] == ".":
            return float(token)
        if token in self._variables:
            return self._variables[token]
        if token in ("e", "i"):
            return cmath.e if token == "e" else 1j
        raise NoExpression(f"unexpected {token!r}")

    def _command(self, name: str, depth: int) -> complex:
        if name in _FRACTIONS:
            above = self._group(depth)
            return above / self._group(depth)
        if name == "sqrt":
            root = 2 + 0j
            if self.next() == "[":
                self._take()
                root = complex(self._rest(depth, "]"))
            return complex(self._group(depth)) ** (1 / root)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](self._power(depth + 1))
        if name in _NAMES:
            return _NAMES[name]
        raise NoExpression(f"unknown \\{name}")

    def _group(self, depth: int) -> complex:
        r"""Take ``{...}``, or one token: ``\frac12`` has two, one for each digit."""
        token = self._take()
        if token in ("{", "("):
            return self._rest(depth, "}" if token == "{" else ")")
        if token.isdigit():
            if len(token) > 1:
                self._place -= 1
                self._tokens[self._place] = token[1:]
            return float(token[0])
        self._place -= 1
        return self._atom(depth + 1)

    def _rest(self, depth: int, end: str) -> complex:
        inner = self.sum(depth + 1)
        if self._take() != end:
            raise NoExpression(f"want {end}")
        return inner

    def _take(self) -> str:
        token = self.next()
        if not token:
            raise NoExpression("it ends too early")
        self._place += 1
        return token


def _token(match: re.Match[str]) -> str:
    number, command, letter, sign = match.groups()
    if command:
        return "" if command in _SILENT else _TIMES.get(command, f"\\{command}")
    return str(number or letter or sign or "").strip()


# Values for the first four letters of two expressions that are compared
_POINTS = ((1.37, 0.61, -0.83, 2.29), (0.47, -1.93, 1.61, 0.71), (2.71, 1.13, 0.37, -1.49))
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


with contextlib.suppress(
    ImportError
):  # here, too: the keeper of the child processes imports it once for all workers, sympy takes a second
    import math_verify as _preloaded  # noqa: F401


def math_verify(request: RewardRequest, *, boxed: bool = False, precision: int = 6) -> float:
    r"""Return 1.0 if the answer that math-verify finds in the response equals the label (or one of the labels), else
    0.0.

    ``boxed``: only the last ``\boxed{}`` counts. ``precision``: digits behind the point in which numbers must agree.
    Raises RewardFailed for a label in which no answer is found, ModuleNotFoundError without the library.
    """
    labels = request.label if isinstance(request.label, list | tuple) and request.label else [request.label]
    golds = [_gold(label) for label in labels]
    text = request.response
    if boxed:
        boxed_answer = last_boxed(text)
        if boxed_answer is None:
            return 0.0
        text = rf"\boxed{{{boxed_answer}}}"
    return float(_is_one_of(text, golds, precision))


def same_by_library(answer: str, golds: Sequence[str], *, precision: int = 6) -> bool:
    """Return whether math-verify finds an answer equal to one of the labels' answers, as far as it reads them.

    It can take for ever: call it in a process with a limit. Raises ModuleNotFoundError without the library.
    """
    return _is_one_of(rf"\boxed{{{answer}}}", [gold for gold in map(_parsed, golds) if gold], precision)


def _is_one_of(text: str, golds: Sequence[Any], precision: int) -> bool:
    library = _library()
    answer = library.parse(text, parsing_timeout=None)
    return any(library.verify(gold, answer, float_rounding=precision, timeout_seconds=None) for gold in golds)


def _gold(label: object) -> Any:
    if not (isinstance(label, str) or is_number(label)):
        raise RewardFailed("math_verify", f"label: want a text or a number, got {label!r}"[:300])
    gold = _parsed(str(label))
    if not gold:
        raise RewardFailed("math_verify", f"label: no answer found in {str(label)!r}"[:300])
    return gold


def _parsed(label: str) -> Any:
    text = label if "\\boxed" in label or "$" in label else f"${label}$"
    return _library().parse(text, parsing_timeout=None)


def _library() -> Any:
    import math_verify as library

    logger = logging.getLogger("math_verify")
    if logger.level != logging.ERROR:  # it warns that its own time limit is off: the process has one
        logger.setLevel(logging.ERROR)
    return library
