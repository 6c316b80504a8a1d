"""Sections of settings: frozen dataclasses, checked by pydantic, and one form of error for all. Knows no setting.

The JSON Schema of a section, and so the reference, follow from its types (``launch/settings/reference.py``).
"""

import dataclasses
import difflib
import functools
import inspect
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Generic, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ArgsKwargs, CoreSchema, PydanticCustomError, core_schema

from tidemill.bus.errors import DetailedError

SHOWN_CHARACTERS = 120
AUTO = "auto"
BASIC = Field(json_schema_extra={"advanced": False})  # Mark of a setting that most runs set; all others are advanced
IMPORT_PATH = "module:function"  # Choice of a function of the user's own
_CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# Texts behind ``want``, by pydantic's type of the error
_KINDS: Mapping[str, str] = {
    "int_type": "a whole number, such as 3",
    "float_type": "a number, such as 0.5",
    "bool_type": "true or false",
    "string_type": "text, in quotes if it looks like something else",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "a map, such as {{name: value}}",
    "finite_number": "a finite number",
    "missing": "a value",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:g}",
    "less_than_equal": "<= {le:g}",
    "string_too_long": "text of <= {max_length} characters",
    "string_too_short": "text of >= {min_length} characters",
    "too_long": "<= {max_length} entries",
    "too_short": ">= {min_length} entries",
    "string_pattern_mismatch": "text like {pattern}",
    "wanted": "{want}",
}
_CURES: Mapping[str, str] = {"finite_number": "; remove the setting to use its default"}

Section = TypeVar("Section")
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ShortName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]  # Name that is a part of metrics and reasons


def section(cls: type[Section]) -> type[Section]:
    """Check the values of a keyword-only dataclass when it is made. Raises ValueError naming each wrong field."""
    cls.__pydantic_config__ = _CONFIG  # type: ignore[attr-defined]
    unchecked = typing.cast(Any, cls.__init__)
    has_defaults = all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING or not field.init
        for field in dataclasses.fields(typing.cast(Any, cls))
    )

    def init(self: Any, /, **values: object) -> None:
        if has_defaults and not values:
            # Defaults are not checked either way, and each section that is made by its default would need a validator:
            # half of the time in which a process reads its settings.
            unchecked(self)
            return
        try:
            _adapter(typing.cast(Any, cls)).validator.validate_python(ArgsKwargs((), values), self_instance=self)
        except ValidationError as refused:
            raise _direct(refused, cls) from None

    init.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    cls.__init__ = init  # type: ignore[assignment]
    return cls


def read(kind: Any, values: object, where: str = "") -> Any:
    """Return the section, or ``Sections``, that plain values as JSON has them stand for. Raises SectionRefused.

    ``where``: path before the names of settings in errors.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values))
    except ValidationError as refused:
        raise SectionRefused(tuple(_problems(refused, kind, where))) from None


def schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of a section, with the strings below its fields as descriptions."""
    # Not for values: the sources of all sections would be parsed, which takes longer than all else at the start of a
    # process.
    _CONFIG["use_attribute_docstrings"] = True
    try:
        return TypeAdapter(cls).json_schema()
    finally:
        del _CONFIG["use_attribute_docstrings"]


def refusal(want: str) -> PydanticCustomError:
    """Return the error of a validator of one field; field and value are added to it."""
    return PydanticCustomError("wanted", "want {want}", {"want": want})


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Mark of a value that is one of ``names``, or, with ``by_path``, the import path of a function."""

    names: tuple[Any, ...]
    by_path: bool = False
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Reasons by value, for values that a user may expect."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, checked: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        names = {"enum": list(self.names)}
        return {"anyOf": [names, {"type": "string", "pattern": ":"}]} if self.by_path else names

    def _check(self, value: Any) -> Any:
        if value in self.names or (self.by_path and ":" in value):
            return value
        near = difflib.get_close_matches(value, self.names, n=1) if isinstance(value, str) else []
        hint = f" (nearest: {near[0]})" if near else ""
        raise refusal(_listed((*self.names, *([IMPORT_PATH] if self.by_path else []))) + self.refused.get(value, hint))


@dataclasses.dataclass(frozen=True)
class OrAuto:
    """Mark of a whole number above 0 that may also be ``auto``."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(Positive))

    def __get_pydantic_json_schema__(self, checked: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": [AUTO]}, {"type": "integer", "exclusiveMinimum": 0}]}

    def _check(self, value: Any, number: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return value if value == AUTO else number(value)
        except ValidationError:
            raise refusal(f"{AUTO}, or a whole number > 0") from None


@dataclasses.dataclass(frozen=True)
class Derived:
    """Mark of a field that follows from the setting ``source``, so that it is no setting of its own."""

    source: str


@functools.cache
def derived(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the paths of the derived fields of a section, inner ones included: path -> the setting it follows from."""
    result = {}
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        marks = typing.get_args(kind) if typing.get_origin(kind) is Annotated else ()
        if mark := next((mark for mark in marks if isinstance(mark, Derived)), None):
            result[prefix + name] = mark.source
        if (inner := section_of(kind)) is not None:
            result |= derived(inner, f"{prefix}{name}.")
    return result


def short(key: str, entry: type) -> BeforeValidator:
    """Return the mark of an entry of a map that may be one text alone, which stands for a map with this key."""
    return BeforeValidator(
        lambda value: {key: value} if isinstance(value, str) else value, json_schema_input_type=str | entry
    )


class Sections(dict[str, Section], Generic[Section]):
    """Sections by name, in their order. Sections with a field ``name`` have it there."""

    names: typing.ClassVar[Any] = Name

    def __init__(
        self,
        entries: Iterable[tuple[str, Section]] | Mapping[str, Section] = (),
        given: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(entries)
        # The map as it was written, for the digest of the run and to be stored
        self.given: dict[str, Any] = dict(given or {})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        [entry] = typing.get_args(source)
        kind, *marks = typing.get_args(entry) if typing.get_origin(entry) is Annotated else (entry,)
        named = dict[cls.names, Annotated[(kind, BeforeValidator(functools.partial(_made, kind)), *marks)]]  # type: ignore[valid-type, name-defined]
        return core_schema.no_info_wrap_validator_function(cls._read, handler(named))

    @classmethod
    def _read(cls, values: object, handler: core_schema.ValidatorFunctionWrapHandler) -> "Sections[Any]":
        if isinstance(values, Sections):
            return values
        entries = handler(values)
        for name, entry in entries.items():
            if hasattr(entry, "name"):
                object.__setattr__(entry, "name", name)
        assert isinstance(values, Mapping)
        return cls(entries, {name: _fields(entry) for name, entry in values.items()})


def _fields(entry: Any) -> Any:
    """Return an entry of a map as it is written: one that was made by a call has all its fields."""
    if not dataclasses.is_dataclass(entry) or isinstance(entry, type):
        return entry
    values = dataclasses.asdict(entry)
    return {field.name: values[field.name] for field in dataclasses.fields(entry) if field.init}


def _made(cls: type, value: object, info: ValidationInfo) -> object:
    """Return a section for a map in a call: pydantic takes maps for sections from JSON alone."""
    return cls(**value) if info.mode == "python" and isinstance(value, Mapping) else value


class ShortNamed(Sections[Section]):
    """Sections with names that are parts of metrics and reasons."""

    names = ShortName


# ---- errors


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting, or settings that contradict each other."""

    paths: tuple[str, ...]
    """The settings, with dots."""
    text: str
    """The settings, the value wanted, the value that came, and the cure."""
    unknown: bool = False
    place: tuple[int | str, ...] = ()
    """Keys on the way to a value that is wanted as text."""


class SectionRefused(DetailedError, ValueError):
    """Values that are no section, with every problem."""

    problems: tuple[Problem, ...]
    template = "{text}"

    @property
    def text(self) -> str:
        return "\n".join(problem.text for problem in self.problems)


def _problems(refused: ValidationError, kind: Any, above: str = "") -> Iterator[Problem]:
    """Yield every problem that pydantic has found. ``above``: path of the section."""
    for error in refused.errors(include_url=False):
        where, cause = error["loc"], error["type"]
        is_key = bool(where) and where[-1] == "[key]"
        path = dotted([above, *where[:-1]] if is_key else [above, *where])
        if cause == "value_error":  # of a section, whose own names are at the beginning of the text
            text = str(error["ctx"]["error"])
            prefix = f"{path}." if path else ""
            yield Problem(tuple(prefix + name for name in text.partition(":")[0].split(", ")), prefix + text)
        elif cause == "unexpected_keyword_argument":
            yield Problem((path,), f"{path}: {_unknown(_kind_at(kind, where[:-1]), path)}", unknown=True)
        elif is_key:
            pattern = error.get("ctx", {}).get("pattern", "text")
            yield Problem((path,), f"{path}: want a name like {pattern}, got {shown(error['input'])}")
        else:
            got = "nothing" if cause == "missing" else shown(error["input"])
            text = f"{path}: want {_want(error, kind)}, got {got}{_CURES.get(cause, '')}"
            yield Problem((path,), text, place=where if cause == "string_type" else ())


def shown(value: object) -> str:
    """Return a value in YAML notation, shortened."""
    try:
        text = repr(value) if isinstance(value, str | float) else json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, TypeError):
        text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def section_of(kind: object) -> type | None:
    """Return the dataclass that a field holds, None for a field with a value."""
    kind = _plain(kind)
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _direct(refused: ValidationError, cls: type) -> ValueError:
    """Return the error of a section that is made by a call: of its own check, if there is one."""
    first = refused.errors(include_url=False)[0]
    if first["type"] == "value_error" and not first["loc"]:
        return typing.cast(ValueError, first["ctx"]["error"])
    return ValueError("\n".join(problem.text for problem in _problems(refused, cls)))


def _want(error: Any, cls: type) -> str:
    kind, values = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return _listed(typing.get_args(_kind_at(cls, error["loc"])))
    if kind.startswith("dataclass"):
        first = next(field.name for field in dataclasses.fields(_kind_at(cls, error["loc"])) if field.init)
        return f"a map of settings, such as {{{first}: ...}}"
    return _KINDS[kind].format(**values) if kind in _KINDS else str(error["msg"])


def _listed(names: Iterable[object]) -> str:
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def _unknown(kind: Any, path: str) -> str:
    prefix, _, key = path.rpartition(".")
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {dotted([prefix, near[0]])}?" if near else f"there are {', '.join(names)}"
    return f"no such setting; {hint}"


def _kind_at(kind: Any, where: Iterable[int | str]) -> Any:
    """Return the type at a place in a section, without None and marks."""
    for key in where:
        kind = _plain(kind)
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind)[str(key)]
        else:  # an entry of a map, or of a list
            kind = typing.get_args(kind)[-1 if isinstance(key, str) else 0]
    return _plain(kind)


def _plain(kind: Any) -> Any:
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        kind = next(argument for argument in typing.get_args(kind) if argument is not type(None))
    return kind


def dotted(where: Iterable[int | str]) -> str:
    """Return the path of a setting: names with dots between them, places in lists in brackets."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where if key != "").removeprefix(".")
