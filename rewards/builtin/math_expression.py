r"""Values of mathematical expressions in LaTeX or plain text (``\frac{3}{4}x^2 - 2\sqrt{3}``), to compare answers.

An expression is evaluated at given values of its letters, in complex floats. Two that agree at several arbitrary points
are taken as equal (Schwartz 1980, Zippel 1979: a polynomial that is not 0 is 0 at few points). Length and depth are
bounded, so time is, too.
"""

import cmath
import re
from collections.abc import Mapping

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
        """Take a sum."""
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
