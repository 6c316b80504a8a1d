r"""Reward for questions with a short final answer (GSM8K, MATH): correctness of the answer, and its format.

The answer (``#### 18``, ``\boxed{18}``, or the last number) is compared as a number or as text. Everything takes time
linear in the response, because an untrained policy often repeats one token up to the length limit.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest

MARKER = "####"

# A separator belongs to a number only between groups of three digits; the first group may be shorter.
_GROUPS = r"[1-9][0-9]{0,2}(?:(?:(?:,|\{,\}|\\[,;: ]|\{\\[,;:]\}|~)(?:\\!)?|\\!)[0-9]{3})+(?![0-9])"
_GROUPED = re.compile(r"(?<![0-9])(?<![0-9]\.)" + _GROUPS)
# A sign belongs to the number only if no word or bracket stands before it: the last number of "10-3" is 3, of "x = -3"
# it is -3.
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+\u2212])?\$?(?:(?:{_GROUPS}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:/[0-9]+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]{1,3}")
_NARROW = re.compile(r"\\[,;: ]|~|\\(?:left|right|displaystyle|quad)(?![A-Za-z])")
_SPACED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]*)?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac(?:\{([-+]?)([0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))")
_MIXED = re.compile(r"([-+]?)([0-9]+)(?:\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+))")
WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|operatorname)\s*\{([^{}]*)\}")
ASSIGNED = re.compile(r"^\s*[a-zA-Z]\s*(?:=|\\in)\s*")
_UNIT = re.compile(
    r"(?<=[0-9}])(?:(?:[\s~]|\\[ "
    r",;:!])*\\(?:text|mathrm|textbf|mbox|textit|operatorname)\s*\{[^{}0-9]*\}(?:\^\{?[23]\}?)?"
    r"|(?P<words>[\s~]+[A-Za-z]{2,}(?:[\s-]+[A-Za-z]{2,})*)(?:\^\{?[23]\}?)?|\s*\^\{?\\circ\}?|\s*\\degree)\s*$"
)
_MULTIPLES = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen)", re.IGNORECASE)
# Blanks that may be left out: all but those between two numbers
BLANKS = re.compile(r"(?<!\s)\s++(?![0-9])|(?<![0-9\s])\s++")
_BRACE = re.compile(r"(\\boxed\s{0,3})?\{|\}")
_MAX_DIGITS = 1000  # A longer "number" is compared as text, because Python refuses to convert more than 4300 digits


def math_answer(request: RewardRequest, *, correct_weight: float = 1.0, format_weight: float = 0.1) -> dict[str, float]:
    """Return ``correct`` (0 or 1), ``format`` and ``score``, their sum with the weights.

    ``format`` is the share of these that hold: ``####`` occurs, exactly once, a number follows it, and nothing follows
    the number. The label is the answer itself or a worked solution that ends in ``#### answer``. Raises RewardFailed
    for a label that is neither text nor a number: every response would be scored as wrong.
    """
    correct = float(is_right(request.response, find_gold(request.label)))
    form = format_share(request.response)
    return {"score": correct_weight * correct + format_weight * form, "correct": correct, "format": form}


def find_gold(label: object) -> str:
    """Return the answer in a label: the text after its last ``####``, or the whole label.

    Raises RewardFailed for a label that cannot hold an answer: a map, a list, or none.
    """
    if isinstance(label, Mapping):
        reason = f"want text or a number as label, got a map with keys {sorted(map(str, label))}"
        raise RewardFailed("math_answer", f"{reason}; name the part that is the answer: data.label_key: COLUMN.KEY")
    if label is None or isinstance(label, (list, tuple)):
        got = "none (data.label_key names its column)" if label is None else f"a list of {len(label)}"
        raise RewardFailed("math_answer", f"want text or a number as label, got {got}")
    return str(label).rpartition(MARKER)[2].strip()


def is_right(response: str, gold: str) -> bool:
    answer, is_box = find_answer(response)
    return same_answer(answer, gold, whole=is_box)


def find_answer(response: str) -> tuple[str | None, bool]:
    r"""Return the answer, and whether it is all of a box.

    It is the line after the last ``####`` (or a box in it), else the last ``\boxed{}``, else the last number.
    """
    _, marker, tail = response.rpartition(MARKER)
    line = tail.strip().partition("\n")[0].strip() if marker else ""  # empty in a response that was cut off after ####
    boxed = last_boxed(line or response)
    if boxed is not None:
        return boxed, True
    numbers = [line] if line else _NUMBER.findall(response)
    return (numbers[-1] if numbers else None), False


def same_answer(answer: str | None, gold: str, *, whole: bool = False) -> bool:
    """Return whether ``answer`` (``18``, ``$18.00``, ``18 eggs``) is the number, or else the text, ``gold``.

    ``whole``: all of it must be the number, but for a unit, as in a box. A line begins with the number, and units or an
    explanation follow (``18 eggs of 20``).
    """
    if answer is None or not gold:
        return False
    want = to_number(gold)
    if want is None:
        return plain(answer).casefold() == plain(gold).casefold()
    got = number_in_box(answer) if whole else to_number(answer)
    if got is None and not whole and (first := _NUMBER.search(answer)):
        got = to_number(first.group())
    return got == want


def number_in_box(text: str, *, words: bool = True) -> Fraction | None:
    r"""Return the number that is all of a text but ``x =`` and a unit: ``5\text{ cm}``, with ``words`` ``5 eggs``."""
    if len(text) > _MAX_DIGITS:
        return None
    text = ASSIGNED.sub("", text.strip().removesuffix("."))
    number, unit = to_number(text), _UNIT.search(text)
    if number is not None or unit is None or _MULTIPLES.search(unit.group()) or (unit["words"] and not words):
        return number
    return to_number(text[: unit.start()])


def to_number(text: str) -> Fraction | None:
    r"""Parse ``1,234.50``, ``$5``, ``50%`` (as 50), ``3/4``, ``1\frac{3}{4}``, ``-.5``, ``1e2`` exactly; else None."""
    if len(text) > _MAX_DIGITS:
        return None
    number = plain(text)
    while number[:1] + number[-1:] in ("{}", "()"):
        number = number[1:-1]
    mixed = _MIXED.fullmatch(number)
    if mixed is not None:
        sign, integer, above, below = mixed[1], mixed[2], mixed[3] or mixed[5], mixed[4] or mixed[6]
        part = to_number(f"{above}/{below}")
        return None if part is None else (Fraction(integer) + part) * (-1 if sign == "-" else 1)
    if fraction := _FRACTION.fullmatch(number):
        minus = (fraction[1] == "-") != (fraction[2] == "-")
        number = f"{'-' if minus else ''}{fraction[3] or fraction[4]}/{fraction[5] or fraction[6]}"
    if _SPACED.fullmatch(number):
        number = number.replace(" ", "")
    if _SCIENTIFIC.fullmatch(number):
        return Fraction(number)
    if not _PLAIN_NUMBER.fullmatch(number):
        return None
    numerator, _, denominator = number.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def format_share(response: str) -> float:
    """Return the share of the four format criteria of ``math_answer`` that hold; 0 without any ``####``."""
    _, marker, tail = response.rpartition(MARKER)
    if not marker:
        return 0.0
    number = _NUMBER.match(tail.strip())
    ends = number is not None and tail.strip()[number.end() :] in ("", "%", ".")
    return (1 + (response.count(MARKER) == 1) + (number is not None) + ends) / 4


def plain(text: str) -> str:
    """Remove blanks, currency, percent, a final full stop, TeX wrappers, and the separators of groups of digits."""
    text = ungrouped(WRAPPED.sub(r"\1", text)).replace("\\$", "").replace("\\%", "").replace("{-}", "-")
    return BLANKS.sub("", re.sub(r"[$%€£]", "", text).strip()).removesuffix(".")


def ungrouped(text: str) -> str:
    r"""Return a text with ASCII's minus and blanks, and joined groups of digits: ``1{,}234``, ``1\,234``: 1234."""
    text = text.replace("\N{MINUS SIGN}", "-").replace(r"\!", "")
    return _NARROW.sub(" ", _GROUPED.sub(lambda number: re.sub("[^0-9]", "", number[0]), text))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with closed braces, which may be nested; None without one."""
    first = text.find("\\boxed")
    if first < 0:
        return None
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text, first):  # braces before it close none of its braces
        if brace.group() != "}":
            opened.append((brace.end(), brace.group(1) is not None))
        elif opened:
            begin, boxed = opened.pop()
            if boxed and (last is None or begin > last[0]):
                last = (begin, brace.start())
    return text[last[0] : last[1]] if last else None
