"""Errors with declared fields: attributes, text, pickling, and wrong arguments."""

import inspect
import pickle

import pytest

from tests.refusals import refusal
from tidemill.bus import errors
from tidemill.bus.errors import DetailedError

_EVERY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DetailedError) and kind.template
]


class _OutOfRange(DetailedError):
    """A setting outside of its bounds."""

    setting: str
    got: int
    least: int = 0
    template = "{setting}: want >= {least}, got {got}{remark}"

    @property
    def remark(self) -> str:
        """A remark behind the value."""
        return "" if self.got else " (none)"


class _FarOutOfRange(_OutOfRange):
    """A further field behind the fields of the base class."""

    line: int
    template = "line {line}: {setting}"


def test_fields_are_attributes_and_stand_in_the_text() -> None:
    error = _OutOfRange("steps", got=0, least=1)
    assert (error.setting, error.got, error.least, error.args) == ("steps", 0, 1, ("steps", 0, 1))
    assert str(error) == "steps: want >= 1, got 0 (none)"
    assert str(_OutOfRange("steps", -1)) == "steps: want >= 0, got -1"


def test_a_subclass_adds_its_fields_behind_those_of_its_base() -> None:
    assert _FarOutOfRange("steps", -1, 1, 7).args == ("steps", -1, 1, 7)
    assert str(_FarOutOfRange("steps", -1, line=7)) == "line 7: steps"


def test_an_error_can_be_pickled_however_it_was_made() -> None:
    error = pickle.loads(pickle.dumps(_FarOutOfRange(setting="steps", got=-1, line=7)))
    assert (type(error), error.args, error.line) == (_FarOutOfRange, ("steps", -1, 0, 7), 7)


@pytest.mark.parametrize(
    ("values", "named"), [((), {}), (("a", 1, 2, 3), {}), (("a", 1), {"got": 2}), (("a", 1), {"other": 2})]
)
def test_wrong_fields_are_refused(values: tuple[object, ...], named: dict[str, object]) -> None:
    with refusal(TypeError, place="_OutOfRange"):
        _OutOfRange(*values, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", _EVERY)
def test_every_template_names_attributes_of_its_class(kind: type[DetailedError]) -> None:
    error = kind(*[1 if "int" in str(annotation) else "TM_RUN" for annotation in _annotations(kind)])
    assert str(pickle.loads(pickle.dumps(error))) == str(error) != ""


def _annotations(kind: type) -> list[object]:
    tree = [base for base in reversed(kind.__mro__) if issubclass(base, DetailedError) and base is not DetailedError]
    return [annotation for base in tree for annotation in inspect.get_annotations(base).values()]
