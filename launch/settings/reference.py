"""The configuration reference: ``docs/configuration.md`` and a JSON Schema, both from the types of the settings."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill.bus import section
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.algorithms.config import unset_names

HEAD = """# Configuration reference

Every setting of a run's configuration file: {count} of them, and {entries} of the entries of maps. This page is
generated from the code; do not edit it:

```
tidemill config --reference > docs/configuration.md     # this page
tidemill config --schema > tidemill.schema.json         # JSON Schema, for completion and checks in an editor
```

How values from files, `--set` and the environment combine, the checks before a start, and usual mistakes with their
messages: [configuring.md](configuring.md). Formulas and choices of the algorithm: [algorithms.md](algorithms.md). An
editor with a YAML language server finds the schema by the first line of a file:
`# yaml-language-server: $schema=tidemill.schema.json`.

Settings that contradict each other are refused with the reason. The default `preset` means the value of the preset that
`learner.algorithm.correction` names.
"""
BEGIN = "Most runs set these and nothing else, and `tidemill init` writes a file with them:"
# Pattern of numbers that may be text: an editor with YAML 1.1 reads 1e-3 as text, the loader as a number.
NUMBER_AS_TEXT = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
_WORDS = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text", "object": "map"}


@functools.cache
def schema() -> JsonObject:
    """Return the JSON Schema (draft 2020-12) of a configuration file."""
    whole = section.schema(RunConfig)
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A run of Tidemill"}
    return top | _accepted(whole, whole["$defs"]) | {"type": "object"}


def _accepted(value: JsonObject, types: Mapping[str, JsonObject]) -> JsonObject:
    """Return the schema of what the loader accepts, with the types that it refers to in place."""
    value = types[value["$ref"].rpartition("/")[2]] if "$ref" in value else value
    left_out = ("title", "$defs", "type" if "enum" in value else "")
    result = {name: part for name, part in value.items() if name not in left_out}
    for name in ("properties", "patternProperties"):
        if name in value:
            result[name] = {key: _accepted(part, types) for key, part in value[name].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(value.get(name), dict):
            result[name] = _accepted(value[name], types)
    if "anyOf" in value:
        is_short = any("$ref" in part for part in value["anyOf"])  # a text that stands for a map is no number
        result["anyOf"] = [
            part if is_short and part == {"type": "string"} else _accepted(part, types) for part in value["anyOf"]
        ]
    if "description" in value and "properties" not in value:
        result["advanced"] = value.get("advanced", True)
    if "description" in value:
        result["description"] = " ".join(value["description"].split()).replace("``", "`")
    match result.get("type"):
        case "number":
            result |= {"type": ["number", "string"], "pattern": NUMBER_AS_TEXT}
        case "string" if "pattern" not in value:
            result["type"] = ["string", "number"]
        case "object" if "properties" in value:
            result["type"] = ["object", "null"]
    return result


# ---- the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One setting, or one section."""

    path: str  # With NAME for the name of an entry of a map
    schema: JsonObject  # Its JSON Schema, without null, and without a text that stands for a map
    nullable: bool

    @property
    def is_section(self) -> bool:
        """True if it has settings."""
        return "properties" in self.schema

    @property
    def sentence(self) -> str:
        """Meaning of the setting."""
        return str(self.schema.get("description", ""))

    @property
    def is_basic(self) -> bool:
        """True if most runs set it."""
        return not self.schema.get("advanced", True) and ".critic." not in self.path


def entries(value: JsonObject | None = None, prefix: str = "") -> Iterator[Entry]:
    """Yield every section and setting of a schema in order; settings of a map's entries behind the map."""
    for name, part in (value or schema())["properties"].items():
        choices = [choice for choice in part.get("anyOf", ()) if choice != {"type": "null"}]
        maps = [choice for choice in choices if "properties" in choice]
        inner = {key: value for key, value in part.items() if key != "anyOf"}
        inner |= (maps or choices)[0] if len(maps or choices) == 1 else {"anyOf": choices} if choices else {}
        inner |= {key: part[key] for key in ("description", "default") if key in part and not maps}
        entry = Entry(path=prefix + name, schema=inner, nullable={"type": "null"} in part.get("anyOf", ()))
        yield entry
        if entry.is_section:
            yield from entries(inner, f"{entry.path}.")
        for of_map in inner.get("patternProperties", {}).values():
            yield from entries({"properties": {f"{name}.NAME": of_map}}, prefix)


def repeated() -> dict[str, str]:
    """Return the sections with the keys of an earlier section, and the path of that one."""
    first: dict[str, str] = {}
    sections = {entry.path: json.dumps(entry.schema["properties"]) for entry in entries() if entry.is_section}
    return {path: first[keys] for path, keys in sections.items() if first.setdefault(keys, path) != path}


def page() -> str:
    """Return ``docs/configuration.md``: a table for each section."""
    every, repeats = list(entries()), repeated()
    settings = [entry for entry in every if not entry.is_section and entry.path.rpartition(".")[0] not in repeats]
    of_maps = sum(".NAME." in entry.path for entry in settings)
    parts = [HEAD.format(count=len(settings) - of_maps, entries=of_maps)]
    basic = ", ".join(f"`{entry.path}`" for entry in settings if entry.is_basic)
    parts.append(_chapter("Begin with these", f"{BEGIN} {basic}.", []))
    at_top = [entry for entry in settings if "." not in entry.path]
    parts.append(_chapter("The run itself", "Keys at the top of the file.", at_top))
    for entry in every:
        if entry.is_section:
            text = f"{entry.sentence} {'Left out, or `null`: nothing is made.' if entry.nullable else ''}".strip()
            if entry.path in repeats:
                text = f"{text} Its keys are those of `{repeats[entry.path]}`."
            within = [setting for setting in settings if setting.path.rpartition(".")[0] == entry.path]
            parts.append(_chapter(f"`{entry.path}`", text, within))
    return "\n".join(parts)


def _chapter(title: str, text: str, settings: Sequence[Entry]) -> str:
    rows = [("key", "value", "default", "meaning")]
    rows += [
        (f"`{setting.path}`", _allowed(setting.schema), _default(setting), setting.sentence) for setting in settings
    ]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    table = [lines[0], "|---|---|---|---|", *lines[1:], ""] if settings else []
    return "\n".join([f"## {title}", "", text, "", *table])


def _kind(value: JsonObject) -> str:
    value = next((choice for choice in value.get("anyOf", ()) if choice.get("type") == "integer"), value)
    kind = value.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if "enum" in value:
        kind = "integer" if 1 in value["enum"] else "string"
    return f"list of {_kind(value['items'])}s" if kind == "array" else _WORDS[kind]


def _default(setting: Entry) -> str:
    name = setting.path.removeprefix("learner.algorithm.")
    if setting.schema.get("default") is None and "default" in setting.schema:
        return "preset" if name in unset_names() else "`null`"
    if "default" not in setting.schema:
        return "`{}`" if setting.schema.get("type") == "object" else ""
    return f"`{yaml_file.dump(setting.schema['default'], flow=True)}`"


def _allowed(value: JsonObject) -> str:
    """Return the choices of a setting, or its type and bounds."""
    choices = [value, *value.get("anyOf", ())]
    by_path = [{"enum": ["module:function"]}] * any("pattern" in choice for choice in choices[1:])
    names = [f"`{name}`" for choice in choices + by_path for name in choice.get("enum", ()) if name is not None]
    bounds = [f"{sign} {choice[name]:g}" for choice in choices for name, sign in _BOUNDS.items() if name in choice]
    return ", ".join(names) or " ".join([_kind(value), ", ".join(bounds)]).strip()
