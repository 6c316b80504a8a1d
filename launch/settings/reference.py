"""The configuration reference, generated from the dataclasses: a page of Markdown (``docs/configuration.md``) and a JSON Schema.

Types and defaults are those of the fields, sentences are the strings below them, and allowed values are in the errors that the
dataclasses raise for a wrong one. Knows no setting by name, except those that are checked outside of their dataclass.
"""

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.wiring import ENGINES
from tidemill.learner.algorithms.config import unset_names

HEAD = """# Configuration reference

Every setting of a run's configuration file: {count} of them. This page is generated from the code; do not edit it:

```
tidemill config --reference > docs/configuration.md     # this page
tidemill config --schema > tidemill.schema.json         # the same as JSON Schema, for completion and checks in an editor
```

How values from files, `--set` and the environment combine, the checks before a start, and usual mistakes with their messages:
[configuring.md](configuring.md). Formulas and choices of the algorithm: [algorithms.md](algorithms.md). An editor with a YAML
language server finds the schema by the first line of a file: `# yaml-language-server: $schema=tidemill.schema.json`.

"Allowed" lists the choices and bounds that the loader checks for one key. Settings that contradict each other are refused as well,
with the reason. The default `preset` means the value of the preset that `learner.algorithm.correction` names.
"""
ELSEWHERE: Mapping[str, tuple[str, ...]] = {"engine.kind": ENGINES}
"""Choices of the settings that are checked outside of their dataclass."""
NONSENSE: Mapping[type, tuple[object, ...]] = {int: (-(10**9), 1, 10**15), float: (-1e9, 1e15), str: ("no such",)}
"""Trial values by type: a field with a bound or choices refuses one of them with an error that names the bound or choices."""
IMPORT_PATH = "module:function"
"""Entry among choices for a function of the user's own."""
NUMBER_AS_TEXT = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
"""Pattern of numbers that may be text: YAML 1.1 reads 1e-3 as text, the loader converts it."""
_BOUND = re.compile(r"(>=|>|<=|<) (-?[\d.]+)")
_RANGE = re.compile(r"0 < \w+ <= (\d+)")
_NONE = type(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One setting, or one section."""

    path: str
    kind: Any
    """Type of the field, without None."""
    nullable: bool
    section: type | None
    """Dataclass of a section; None for a setting."""
    default: object
    allowed: str
    """Choices or bounds, as the error for a wrong value states them; empty = none are known."""
    choices: tuple[object, ...]
    """All allowed values, if they are a closed list."""
    sentence: str


def entries(section: type = RunConfig, prefix: str = "") -> Iterator[Entry]:
    """Yield every section and setting below ``section``, in the order of the dataclasses."""
    kinds, sentences = typing.get_type_hints(section), _sentences(section)
    for field in fields(section):
        path, kind = prefix + field.name, kinds[field.name]
        inner = next((one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and is_dataclass(one)), None)
        bare = next(one for one in typing.get_args(kind) if one is not _NONE) if isinstance(kind, types.UnionType) else kind
        texts = () if inner else tuple(_refusals(section, field.name, path, bare))
        choices = () if inner else ELSEWHERE.get(path) or next(filter(None, (_choices(section, field, bare, text) for text in texts)), ())
        yield Entry(
            path=path,
            kind=bare,
            nullable=_NONE in typing.get_args(kind),
            section=inner,
            default=_default(field),
            allowed=", ".join(f"`{one}`" for one in choices) or "; ".join(texts),
            choices=choices,
            sentence=sentences.get(field.name, ""),
        )
        if inner is not None:
            yield from entries(inner, f"{path}.")


def page() -> str:
    """Return ``docs/configuration.md``: a table for each section."""
    found = list(entries())
    settings = [one for one in found if one.section is None]
    parts = [HEAD.format(count=len(settings))]
    parts.append(_chapter("The run itself", "Keys at the top of the file.", [one for one in settings if "." not in one.path]))
    for entry in found:
        if entry.section is not None:
            within = [one for one in settings if one.path.rpartition(".")[0] == entry.path]
            parts.append(_chapter(entry.path, f"{_first_words(entry.section)} {_default_of_section(entry)}".strip(), within))
    return "\n".join(parts)


def schema() -> JsonObject:
    """Return the JSON Schema (draft 2020-12) of a configuration file: types, choices, bounds, defaults, sentences; no unknown keys."""
    found = list(entries())
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A run of Tidemill"}
    return top | _object("", found, _first_words(RunConfig)) | {"type": "object"}


# ---- the page


def _chapter(title: str, text: str, settings: Sequence[Entry]) -> str:
    rows = [_row(one) for one in settings]
    name = title if " " in title else f"`{title}`"
    head = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"] if rows else []
    return "\n".join([f"## {name}", "", text, "", *head, *rows, *([""] if rows else [])])


def _row(one: Entry) -> str:
    return f"| `{one.path}` | {_kind_words(one.kind)} | {_default_cell(one)} | {_cell(one.allowed)} | {_cell(one.sentence)} |"


def _default_of_section(entry: Entry) -> str:
    return "Left out, or `null`: nothing is made." if entry.nullable else ""


def _default_cell(entry: Entry) -> str:
    if entry.default is None:
        return "preset" if entry.path.removeprefix("learner.algorithm.") in unset_names() else "`null`"
    value = list(entry.default) if isinstance(entry.default, tuple) else entry.default
    return f"`{yaml_file.dump(value, flow=True)}`"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", r"\|")


def _kind_words(kind: Any) -> str:
    bare = typing.get_origin(kind) or kind
    if bare is tuple and typing.get_args(kind)[0] is int:
        return "list of whole numbers"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", tuple: "list of texts", dict: "map"}[bare]


# ---- the schema


def _object(path: str, found: Sequence[Entry], sentence: str) -> JsonObject:
    within = [one for one in found if one.path.rpartition(".")[0] == path]
    properties = {one.path.rpartition(".")[2]: _object(one.path, found, one.sentence) if one.section else _value(one) for one in within}
    return {"type": ["object", "null"], "description": _plain(sentence), "properties": properties, "additionalProperties": False}


def _value(entry: Entry) -> JsonObject:
    """Return the schema of a key: it accepts all that ``launch/settings/config_loader.py`` accepts, and no type that it refuses."""
    value = _typed(entry) | _bounds(entry)
    if entry.nullable:
        value = {"anyOf": [value, {"type": "null"}]}
    about = {"description": _plain(entry.sentence)}
    default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
    return value | about | ({} if default is None else {"default": default})


def _typed(entry: Entry) -> JsonObject:
    bare = typing.get_origin(entry.kind) or entry.kind
    if IMPORT_PATH in entry.choices:
        closed = [one for one in entry.choices if one != IMPORT_PATH]
        return {"anyOf": [{"enum": closed}, {"type": "string", "pattern": ":"}]}
    if entry.choices:
        return {"enum": list(entry.choices)}
    if bare is tuple:
        items = "integer" if typing.get_args(entry.kind)[0] is int else ["string", "number"]
        return {"type": "array", "items": {"type": items}}
    if bare is float:
        return {"type": ["number", "string"], "pattern": NUMBER_AS_TEXT}
    return {"type": {int: "integer", bool: "boolean", str: ["string", "number"], dict: "object"}[bare]}


def _bounds(entry: Entry) -> JsonObject:
    """Return the bounds that are plain numbers and do not depend on other settings."""
    result: dict[str, object] = {}
    names = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}
    for text in entry.allowed.split("; "):
        if plain := _BOUND.fullmatch(text):
            result[names[plain[1]]] = float(plain[2]) if "." in plain[2] else int(plain[2])
        elif both := _RANGE.fullmatch(text):
            result |= {"exclusiveMinimum": 0, "maximum": int(both[1])}
    return result if entry.kind in (int, float) else {}


def _plain(text: str) -> str:
    return text.replace("``", "")


# ---- reading the dataclasses


@functools.cache
def _sentences(section: type) -> Mapping[str, str]:
    """Return the attribute docstrings: the string below each field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    result = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                result[name] = " ".join(sentence.split())
    return result


def _first_words(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


def _default(field: "Field[object]") -> object:
    if field.default_factory is not MISSING:
        made = field.default_factory()
        return None if is_dataclass(made) else made
    return field.default


def _refusals(section: type, name: str, path: str, kind: Any) -> Iterator[str]:
    """Yield the bounds and choices of the field ``name``, from the errors for wrong values."""
    seen: dict[str, None] = {}
    for value in NONSENSE.get(kind, ()):
        for refused in (_wanted(section, {name: value}, name), _wanted_of_run(path, value)):
            if refused and (kind is str or re.match(r"[<>]|0 <|\d+ (or|to) |\d+ <", refused)):
                seen[refused] = None
    yield from seen


def _wanted(section: type, values: Mapping[str, object], *names: str) -> str:
    """Return the text between ``want`` and ``got`` of the error about one of ``names``; empty if there is none."""
    try:
        section(**values)
    except ValueError as bad:
        for clause in re.finditer(r"(?:^|; )([\w., ]+): want (.+?)(?=, got |; [a-z]|, such as|$)", str(bad)):
            if set(clause[1].split(", ")) & set(names):
                return re.sub(r" = [-\d.e+]+(?= |$)", "", re.sub(r" \((?!for ).*", "", clause[2]))
    return ""


def _wanted_of_run(path: str, value: object) -> str:
    """Return the same text from the checks of settings against each other, with all others at their defaults."""
    try:
        return _wanted(RunConfig, _nested(RunConfig, path.split("."), value), path)
    except ValueError:
        return ""  # its own section has refused it already


def _nested(section: type, keys: Sequence[str], value: object) -> dict[str, object]:
    key, *below = keys
    if not below:
        return {key: value}
    kind = typing.get_type_hints(section)[key]
    inner = next(one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and is_dataclass(one))
    return {key: inner(**_nested(inner, below, value))}


def _choices(section: type, field: "Field[object]", kind: Any, text: str) -> tuple[object, ...]:
    """Return the values in ``a, b or c`` or ``a | b | c`` if each of them is allowed by itself; else nothing."""
    words = re.split(r" \| |, | or ", text.removeprefix("one of "))
    values: list[object] = [int(word) if kind is int and word.isdecimal() else word for word in words]
    if len(values) < 2 or not all(isinstance(value, kind) for value in values):
        return ()
    return () if any(_wanted(section, {field.name: value}, field.name) == text for value in values) else tuple(values)
