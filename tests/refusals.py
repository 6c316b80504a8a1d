"""``refusal``: an error that a test expects, by the values in its fields, so that its wording may change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Error = TypeVar("Error", bound=BaseException)
_HOUSE_FORM = re.compile(r"(?:(?P<place>[^\n]*?): )?want [^\n]*, got (?P<got>[^;\n]*)|(?P<of_other>[^\n]*?): ")
"""Text of an error: ``PLACE: want WANT, got GOT; CURE``, or ``PLACE: DEFECT``."""


@contextmanager
def refusal(kind: type[Error], /, **fields: object) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expect an error of this class with these fields: each a value, or the pattern of a part of it.

    ``place``, the setting or thing at fault, and ``got`` are read in the error's reason, or in its message, where its
    class does not declare them.
    """
    with pytest.raises(kind) as caught:
        yield caught
    form = _HOUSE_FORM.match(str(getattr(caught.value, "reason", caught.value)))
    of_message = {"place": form["place"] or form["of_other"], "got": form["got"]} if form else {}
    found = {name: getattr(caught.value, name, of_message.get(name)) for name in fields}
    same = {name: _is(value, found[name]) for name, value in fields.items()}
    assert all(same.values()), f"want {fields}, got {found} of {type(caught.value).__name__}: {caught.value}"


def _is(value: object, found: object) -> bool:
    return bool(value.search(str(found))) if isinstance(value, re.Pattern) else value == found
