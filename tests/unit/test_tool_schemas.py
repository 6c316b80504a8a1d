"""JSON schemas of tools: types, defaults and texts of parameters; and arguments as the annotated types."""
# ruff: noqa: UP007, UP045 - users write both notations

import collections.abc
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NotRequired, Optional, TypedDict, Union

import pytest

from tidemill.actors.episodes.programs.tool_schemas import documented, hints_of, schema_for, schema_of, typed


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Place(TypedDict):
    city: str
    zip: NotRequired[int]


@dataclass
class Order:
    color: Color
    count: int = 1
    parts: list["Order"] = field(default_factory=list)


Name = NewType("Name", str)
ANY_ORDER = {
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "blue"]},
        "count": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["color"],
}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (Any, {}),
        (object, {}),
        (None, {}),
        (Path, {}),
        (Optional[str], {"type": ["string", "null"]}),
        (str | None, {"type": ["string", "null"]}),
        (Optional[list[int]], {"type": ["array", "null"], "items": {"type": "integer"}}),
        (Optional[Literal["a", "b"]], {"type": ["string", "null"], "enum": ["a", "b", None]}),
        (Optional[Any], {}),
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (int | str | None, {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b", None], {"type": ["integer", "string", "null"], "enum": [1, "b", None]}),
        (Literal[Color.RED], {"type": "string", "enum": ["red"]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (list[Color | None], {"type": "array", "items": {"type": ["string", "null"], "enum": ["red", "blue", None]}}),
        (collections.abc.Sequence[float], {"type": "array", "items": {"type": "number"}}),
        (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (
            collections.abc.Mapping[str, list[bool]],
            {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "boolean"}}},
        ),
        (dict[str, Any], {"type": "object"}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (Name, {"type": "string"}),
        (
            Place,
            {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
                "required": ["city"],
            },
        ),
        (Order, ANY_ORDER),
    ],
)
def test_a_type_has_a_schema(hint: Any, schema: dict[str, Any]) -> None:
    assert schema_for(hint) == schema


def find(
    city: str, unit: Literal["C", "F"] = "C", days: Annotated[int, "Ignored where the docstring says more."] = 1,
        color: Color = Color.RED,
    near: list[str] | None = None, ratio=0.5, hidden: str = "", *more: int, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    """Find the weather
    of a city.

    More that the model is not shown.

    Args:
        city: Name of a city,
            in English: without the country.
        unit (str, optional): Unit of temperatures.
        days: Days (1 to 9).

    Returns:
        city: Not a parameter.
    """
    return {}


def test_a_function_has_the_schema_of_its_parameters() -> None:
    assert schema_of("find", find, {"hidden"}) == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find the weather\nof a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of a city, in English: without the country."},
                    "unit": {
                        "type": "string",
                        "enum": ["C", "F"],
                        "description": "Unit of temperatures.",
                        "default": "C",
                    },
                    "days": {"type": "integer", "description": "Days (1 to 9).", "default": 1},
                    "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "near": {"type": ["array", "null"], "items": {"type": "string"}, "default": None},
                    "ratio": {"type": "number", "default": 0.5},
                },
                "required": ["city"],
            },
        },
    }


def test_the_schema_of_a_documented_function_is_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    def add(a: int, names: list[str], of: Literal["x", "y"], table: dict[str, float]) -> int:
        """Add numbers.

        Args:
            a: The first number,
                which is whole.
            names: Names.
            of: One of two.
            table: A table.

        Returns:
            The sum.
        """
        return 0

    theirs = get_json_schema(add)["function"]
    ours = schema_of("add", add, ())["function"]
    assert {name: ours[name] for name in ("name", "description", "parameters")} == {
        name: theirs[name] for name in ("name", "description", "parameters")
    }


WANTED = {"city": "Name of a city, in English.", "days": "Number of days."}


@pytest.mark.parametrize(
    ("docstring", "described"),
    [
        (
            (
                "Find.\n\n    Args:\n        city (str): Name of a city,\n            in English.\n        days: "
                "Number of days.\n    "
            ),
            WANTED,
        ),
        (
            (
                "Find.\n    Arguments:\n      city: Name of a city, in English.\n\n      days (int): Number of "
                "days.\n    Raises:\n      x: y"
            ),
            WANTED,
        ),
        (
            "Find.\n\n    Parameters\n    ----------\n    city : str\n        Name of a city,\n        in English.\n"
            "    days : int, optional\n        Number of days.\n\n    Returns\n    -------\n    str\n        "
            "Text.\n    ",
            WANTED,
        ),
        (
            "Find.\n\n    Parameters\n    ----------\n    city, days : int\n        Both.\n",
            {"city": "Both.", "days": "Both."},
        ),
        (
            (
                "Find.\n\n    Parameters\n    ----------\n    city\n        A city.\n    Notes\n    -----\n    "
                "days\n        Not one.\n"
            ),
            {"city": "A city."},
        ),
        (
            "Find.\n\n    :param city: Name of a city,\n        in English.\n    :param int days: Number of "
            "days.\n    :type city: str\n"
            "    :returns: Text.\n    ",
            WANTED,
        ),
        ("Find.\n    :param city: A city.\n", {"city": "A city."}),
        ("Find.\n\n    Args:\n        *city: All.\n        **days: Others.\n", {"city": "All.", "days": "Others."}),
        ("Find.", {}),
        ("Find.\n\nNote: this: is text.\n", {}),
        ("", {}),
    ],
)
def test_texts_of_parameters_in_three_styles(docstring: str, described: dict[str, str]) -> None:
    summary, found = documented(docstring)
    assert summary == docstring.partition("\n")[0] and {name: found.get(name) for name in described} == described
    assert described or not found


def test_annotations_that_cannot_be_resolved_leave_the_others() -> None:
    def broken(a: "NoSuchName", b: int) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert schema_of("f", broken, ())["function"]["parameters"]["properties"] == {"a": {}, "b": {"type": "integer"}}


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        ("red", Color, Color.RED),
        (2, Level | None, Level.HIGH),
        (None, Optional[Color], None),
        (["red", "blue"], list[Color], [Color.RED, Color.BLUE]),
        ({"a": "red"}, dict[str, Color], {"a": Color.RED}),
        ({"color": "red", "parts": [{"color": "blue"}]}, Order, Order(Color.RED, 1, [Order(Color.BLUE)])),
        ("red", Annotated[Color, "x"], Color.RED),
        ("red", int | Color, "red"),
        ("x", str, "x"),
        ("x", None, "x"),
        ({"city": "x"}, Place, {"city": "x"}),
    ],
)
def test_arguments_are_of_the_annotated_types(value: Any, hint: Any, wanted: Any) -> None:
    assert typed(value, hint) == wanted


def test_hints_are_those_of_the_parameters() -> None:
    assert hints_of(find)["city"] is str and schema_for(hints_of(find)["near"])["type"] == ["array", "null"]
