r"""Reward for questions with a short final answer (GSM8K, MATH): correctness of the answer, and its format.

The module finds the answer (``#### 18``, ``\boxed{18}``, or the last number of the text) and compares it as a number or as text.
Everything takes time linear in the response, because an untrained policy often repeats one token up to the length limit.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from rewards.errors import RewardFailed
from rewards.port import RewardRequest

MARKER = "####"

# A sign belongs to the number only if no word or bracket stands before it: the last number of "10-3" is 3, of "x = -3" it is -3.
# A comma belongs to it only between groups of three digits.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:/[0-9]+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]{1,3}")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_MIXED = re.compile(r"([-+]?)([0-9]+)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_BRACE = re.compile(r"(\\boxed\s{0,3})?\{|\}")
_MAX_DIGITS = 1000
"""A longer "number" is compared as text, because Python refuses to convert more than 4300 digits."""


def math_answer(request: RewardRequest, *, correct_weight: float = 1.0, format_weight: float = 0.1) -> dict[str, float]:
    """Return ``score``, ``correct`` and ``format`` of a response; ``score = correct_weight * correct + format_weight * format``.

    ``correct`` is 0 or 1. ``format`` is the share of these that hold: ``####`` occurs, exactly once, a number follows it, and nothing
    follows the number. The label is the answer itself or a worked solution that ends in ``#### answer``.
    Raises RewardFailed for a label that is neither text nor a number: every response would be scored as wrong.
    """
    correct = float(same_answer(find_answer(request.response), find_gold(request.label)))
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


def find_answer(response: str) -> str | None:
    r"""Return the line after the last ``####``, else the content of the last ``\boxed{}``, else the last number, else None."""
    _, marker, tail = response.rpartition(MARKER)
    if marker and tail.strip():  # a response cut off after #### has its answer before it, if anywhere
        return tail.strip().partition("\n")[0].strip()
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    numbers = _NUMBER.findall(response)
    return numbers[-1] if numbers else None


def same_answer(answer: str | None, gold: str) -> bool:
    """Return whether ``answer`` (``18``, ``$18.00``, ``18 eggs``) is the number ``gold`` or, if ``gold`` is not a number, the same text."""
    if answer is None or not gold:
        return False
    want = to_number(gold)
    if want is None:
        return _plain(answer).casefold() == _plain(gold).casefold()
    got = to_number(answer)
    # The first number: an answer found by its marker or box begins with it, and units or an explanation follow ("18 eggs of 20").
    if got is None and (first := _NUMBER.search(answer)):
        got = to_number(first.group())
    return got == want


def to_number(text: str) -> Fraction | None:
    r"""Parse ``1,234.50``, ``$5``, ``50%`` (as 50), ``3/4``, ``\frac{3}{4}``, ``1\frac{3}{4}``, ``-.5``, ``1e2`` exactly; else None."""
    if len(text) > _MAX_DIGITS:
        return None
    plain = _plain(text)
    mixed = _MIXED.fullmatch(plain)
    if mixed is not None:
        sign, whole, above, below = mixed.groups()
        number = to_number(f"{above}/{below}")
        return None if number is None else (Fraction(whole) + number) * (-1 if sign == "-" else 1)
    plain = _THOUSANDS.sub("", _FRACTION.sub(r"\1/\2", plain))
    if _SCIENTIFIC.fullmatch(plain):
        return Fraction(plain)
    if not _PLAIN_NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def format_share(response: str) -> float:
    """Return the share of the four format criteria that a response meets (see ``math_answer``); 0 without any ``####``."""
    _, marker, tail = response.rpartition(MARKER)
    if not marker:
        return 0.0
    number = _NUMBER.match(tail.strip())
    ends = number is not None and tail.strip()[number.end() :] in ("", "%", ".")
    return (1 + (response.count(MARKER) == 1) + (number is not None) + ends) / 4


def _plain(text: str) -> str:
    """Remove everything that does not change an answer: blanks, currency, percent, a final full stop, TeX wrappers."""
    text = _WRAPPER.sub(r"\1", text).replace("\N{MINUS SIGN}", "-").replace("\\$", "").replace("\\%", "").replace("\\!", "")
    return re.sub(r"[\s$%]", "", text).removesuffix(".")


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
