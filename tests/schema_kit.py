"""A JSON Schema validator for the keywords that ``launch/settings/reference.py`` uses; any other keyword is an error of
the schema.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_NOTES = ("$schema", "title", "description", "default", "advanced")


def errors(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield every violation of ``schema`` by ``value``, with the path of the place."""
    for keyword, wanted in schema.items():
        match keyword:
            case "type":
                kinds = [wanted] if isinstance(wanted, str) else wanted
                if not any(_TYPES[kind](value) for kind in kinds):
                    yield f"{path}: want {kinds}, got {value!r}"
            case "enum":
                if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted):
                    yield f"{path}: want one of {wanted}, got {value!r}"
            case "anyOf":
                if all(any(errors(value, one, path)) for one in wanted):
                    yield f"{path}: want any of {wanted}, got {value!r}"
            case "pattern":
                if isinstance(value, str) and not re.search(wanted, value):
                    yield f"{path}: want {wanted}, got {value!r}"
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                if _TYPES["number"](value) and not _COMPARED[keyword](value, wanted):
                    yield f"{path}: want {keyword} {wanted}, got {value!r}"
            case "items":
                for place, one in enumerate(value if isinstance(value, list) else ()):
                    yield from errors(one, wanted, f"{path}[{place}]")
            case "properties":
                for key, one in value.items() if isinstance(value, dict) else ():
                    if key in wanted:
                        yield from errors(one, wanted[key], f"{path}.{key}" if path else key)
            case "patternProperties":
                for key, one in value.items() if isinstance(value, dict) else ():
                    for pattern, entry in wanted.items():
                        if re.search(pattern, key):
                            yield from errors(one, entry, f"{path}.{key}")
            case "additionalProperties":
                for key, one in value.items() if isinstance(value, dict) else ():
                    if key in schema.get("properties", ()):
                        continue
                    if wanted is False:
                        yield f"{path}: unknown key {key!r}"
                    elif wanted is not True:
                        yield from errors(one, wanted, f"{path}.{key}")
            case "required":
                for key in wanted if isinstance(value, dict) else ():
                    if key not in value:
                        yield f"{path}: want the key {key!r}"
            case "minLength" | "maxItems":
                sized = str if keyword == "minLength" else list
                if isinstance(value, sized) and (len(value) < wanted if sized is str else len(value) > wanted):
                    yield f"{path}: want {keyword} {wanted}, got {value!r}"
            case _:
                assert keyword in _NOTES, f"a keyword that nothing here checks: {keyword}"
