"""JSON schemas of tools, from the annotations, defaults and docstrings of functions; and arguments of calls as the
annotated types.

def find(city: str, unit: Literal["C", "F"] = "C") -> str:
    \"\"\"Find the weather.

    Args:
        city: Name of a city, in English.
    \"\"\"
"""

import collections.abc
import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

PLAIN: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
ABC = collections.abc
ARRAYS = (list, tuple, set, frozenset, ABC.Sequence, ABC.Iterable, ABC.Set, ABC.Collection)
MAPS = (dict, ABC.Mapping, ABC.MutableMapping)
_HEADING = re.compile(
    r"^(?:(?:Args|Arguments|Parameters|Params|Returns?|Raises|Yields|Examples?|Notes?|Attributes|See "
    r"Also):|:\w+.*|-{3,})\s*$"
)
"""A line behind which a docstring has a section, or the line under its title (NumPy)."""
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters|Params):\s*$")
_GOOGLE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY = re.compile(r"^(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
_REST = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")


def schema_of(name: str, function: Callable[..., Any], hidden: Collection[str]) -> dict[str, Any]:
    """Return the JSON schema of a function: its first docstring paragraph, its parameters without ``hidden`` ones."""
    hints, (summary, described) = hints_of(function), documented(function.__doc__ or "")
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and parameter.name not in hidden
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": summary,
            "parameters": {
                "type": "object",
                "properties": {
                    key: _property(parameter, hints.get(key), described.get(key, ""))
                    for key, parameter in parameters.items()
                },
                "required": [key for key, parameter in parameters.items() if parameter.default is parameter.empty],
            },
        },
    }


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters by name, where they can be resolved."""
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        hints = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
        empty = inspect.Parameter.empty
        return {name: hint for name, hint in hints.items() if hint is not empty and not isinstance(hint, str)}


def _property(parameter: inspect.Parameter, hint: Any, description: str) -> dict[str, Any]:
    default = parameter.default
    if hint is None and default is not parameter.empty and default is not None:
        hint = type(default)
    schema = schema_for(hint)
    if description := description or schema.get("description", ""):
        schema["description"] = description
    if isinstance(default, enum.Enum):
        default = default.value
    if default is not parameter.empty and _is_json(default):
        schema["default"] = default
    return schema


def _is_json(value: object) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def schema_for(hint: Any, above: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the JSON schema of a type; empty = any value. ``above``: the classes around it, which may recur in it."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        texts = [note if isinstance(note, str) else getattr(note, "description", None) for note in hint.__metadata__]
        text = next((text for text in texts if isinstance(text, str)), "")
        return schema_for(args[0], above) | ({"description": text} if text else {})
    if origin is Literal:
        return _choices(list(args))
    if origin in (Union, types.UnionType):
        return _union([schema_for(member, above) for member in args])
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return _choices([member.value for member in origin])
    if isinstance(origin, type) and not args and origin in PLAIN:
        return {"type": PLAIN[origin]}
    if origin in ARRAYS:
        return _array(origin, args, above)
    if origin in MAPS:
        values = schema_for(args[1], above) if len(args) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if fields := fields_of(hint):
        if hint in above:
            return {"type": "object"}
        inner = {name: schema_for(kind, (*above, hint)) for name, (kind, _) in fields.items()}
        return {
            "type": "object",
            "properties": inner,
            "required": [name for name, (_, required) in fields.items() if required],
        }
    supertype = getattr(hint, "__supertype__", None)  # of NewType
    return schema_for(supertype, above) if supertype is not None else {}


def fields_of(hint: Any) -> dict[str, tuple[Any, bool]]:
    """Return type, and whether it is required, of each field of a dataclass or TypedDict; none for any other type."""
    if not isinstance(hint, type) or not (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        return {}
    hints = get_type_hints(hint)
    if typing.is_typeddict(hint):
        return {name: (kind, name in hint.__required_keys__) for name, kind in hints.items()}  # type: ignore[attr-defined]
    missing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is field.default_factory is missing)
        for field in dataclasses.fields(hint)
        if field.init
    }


def _choices(values: list[Any]) -> dict[str, Any]:
    values = [value.value if isinstance(value, enum.Enum) else value for value in values]
    kinds = list(dict.fromkeys(PLAIN.get(type(value), "") for value in values))
    kind: dict[str, Any] = {} if "" in kinds else {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {**kind, "enum": values}


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    null = {"type": "null"}
    members = [schema for place, schema in enumerate(schemas) if schema != null and schema not in schemas[:place]]
    if {} in members:
        return {}
    if len(members) == 1 and null not in schemas:
        return members[0]
    if len(members) != 1 or "type" not in members[0]:
        return {"anyOf": members + [null] * (null in schemas)}
    kind, choices = members[0]["type"], members[0].get("enum")
    kinds = [*(kind if isinstance(kind, list) else [kind]), "null"]
    return {**members[0], "type": kinds, **({"enum": [*choices, None]} if choices is not None else {})}


def _array(origin: Any, args: tuple[Any, ...], above: tuple[Any, ...]) -> dict[str, Any]:
    if origin is tuple and args and args[-1] is not Ellipsis:
        items = [schema_for(item, above) for item in args]
        return {"type": "array", "prefixItems": items, "minItems": len(args), "maxItems": len(args)}
    item = schema_for(args[0], above) if args else {}
    unique = {"uniqueItems": True} if origin in (set, frozenset, ABC.Set) else {}
    return {"type": "array", **({"items": item} if item else {}), **unique}


def typed(value: Any, hint: Any) -> Any:
    """Return a value of a call as its annotated type, where that is an enum or a dataclass, or has some inside; else as
    it is.

    Raises ValueError or TypeError for a value that is none.
    """
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return typed(value, args[0])
    if origin in (Union, types.UnionType) and value is not None:
        members = [member for member in args if member is not type(None)]
        return typed(value, members[0]) if len(members) == 1 else value
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin(value)
    if origin in (list, ABC.Sequence) and args and isinstance(value, list):
        return [typed(item, args[0]) for item in value]
    if origin in MAPS and len(args) == 2 and isinstance(value, Mapping):
        return {key: typed(item, args[1]) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        fields = fields_of(hint)
        return hint(**{name: typed(item, fields.get(name, (None, False))[0]) for name, item in value.items()})
    return value


def documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph and the text of each parameter, in Google's, NumPy's or Sphinx's style."""
    lines = inspect.cleandoc(docstring).splitlines()
    sections = [place for place, line in enumerate(lines) if _HEADING.match(line)]
    first = min([place - lines[place].startswith("---") for place in sections], default=len(lines))
    summary = "\n".join(lines[:first]).strip().partition("\n\n")[0]
    return summary, _sphinx(lines) | _sections(lines)


def _sphinx(lines: list[str]) -> dict[str, str]:
    descriptions: dict[str, str] = {}
    name = ""
    for line in lines:
        if matched := _REST.match(line):
            name, descriptions[matched[1]] = matched[1], matched[2].strip()
        elif line[:1].isspace() and name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
        else:
            name = ""
    return descriptions


def _sections(lines: list[str]) -> dict[str, str]:
    """Return the texts in a section of parameters: entries with text behind a colon, or below unindented names."""
    sections: dict[str, str] = {}
    for place, line in enumerate(lines):
        underlined = (
            place > 0 and line.startswith("---") and lines[place - 1].strip() in ("Parameters", "Other Parameters")
        )
        if underlined or _ARGS.match(line):
            sections |= _entries(_section(lines[place + 1 :], underlined=underlined), _NUMPY if underlined else _GOOGLE)
    return sections


def _section(lines: list[str], *, underlined: bool) -> list[str]:
    """Return the lines of a section: to the next line that is not indented, or to the next underlined title."""
    for place, line in enumerate(lines):
        ends = line.startswith("---") if underlined else line.strip() and not line[0].isspace()
        if ends:
            return lines[: place - underlined]
    return lines


def _entries(lines: list[str], entry: re.Pattern[str]) -> dict[str, str]:
    """Return the text of each entry of a section; lines that are indented more belong to the entry above."""
    entries: dict[str, str] = {}
    names: list[str] = []
    text = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
    for line in text:
        if not line[:1].isspace() and (matched := entry.match(line)):
            names = [name.strip().lstrip("*") for name in matched[1].split(",")]
            entries |= dict.fromkeys(names, matched[2].strip() if entry.groups > 1 else "")
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}".strip() for name in names}
    return entries
