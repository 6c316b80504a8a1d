"""YAML 1.2 as plain values, with the line and the characters of each. Every defect is a SettingsError of one line."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tidemill.bus import exit_codes
from tidemill.bus.section import shown
from tidemill.launch.settings.run_paths import cure, set_base

# Most values of a text, each counted at every reference: a few lines of references can expand to more than the memory
# holds.
MOST_NODES = 100_000
_BRACKETED = re.compile(r"\[(?=[^]]*:[^]]*:)[0-9A-Fa-f:.]+(%\w+)?\](:\d+)?")
_TAG = "tag:yaml.org,2002:"
# Scalars that are no text, in the core schema of YAML 1.2.2 (section 10.3.2), and the merge key. The parser's own
# schema is that of YAML 1.1, in which 010 is 8, 12:30 is 750, and no is false.
_SCALARS = {
    "null": r"(~|null|Null|NULL|)\Z",
    "bool": r"(true|True|TRUE|false|False|FALSE)\Z",
    "int": r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z",
    "float": r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z",
    "merge": r"<<\Z",
}


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or in contradiction to another one."""

    exit_code = exit_codes.CONFIG


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10))


def _number(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(?=[inIN])", "", node.value))  # .inf and .nan


class _Schema(yaml.resolver.BaseResolver):
    """The schema, for the loader and the writer alike: a text that looks like another value is written in quotes."""

    yaml_implicit_resolvers = {None: [(f"{_TAG}{kind}", re.compile(pattern)) for kind, pattern in _SCALARS.items()]}  # noqa: RUF012


class _Loader(_Schema, yaml.SafeLoader):
    """Loads only values that JSON has, too: a date stays text, and other tags are refused."""

    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag in {f"{_TAG}{kind}" for kind in (*_SCALARS, "str", "seq", "map")}
    } | {f"{_TAG}int": _integer, f"{_TAG}float": _number}


class _Dumper(_Schema, yaml.SafeDumper):
    """Writes values as the loader reads them."""


@dataclass(frozen=True, slots=True)
class Written:
    """A value as it stands in its text."""

    line: int
    # Its characters, which for a number are lost in the value (007, 1.50); None for a list or a map.
    scalar: str | None = None


def read(file: Path) -> tuple[Any, dict[str, Written]]:
    """Return the content of a YAML file, and how each value is written, by its dotted path. Raises SettingsError.

    Relative paths in the configuration of a run are those of the run's working directory
    (``tidemill.launch.settings.run_paths``).
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise SettingsError(f"{file}: {cure(str(file))}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        got = f"the byte 0x{data[error.start]:02x}"
        raise SettingsError(f"{file}:{line}: want text in UTF-8, got {got}; save it as UTF-8") from None
    values, written = _parse(text, lambda line: f"{file}:{line}")
    if isinstance(values, dict):
        set_base(values, file)
    return values, written


def value(text: str, where: str, path: str = "") -> tuple[Any, dict[str, Written]]:
    """Return the value of a YAML text, and how each part is written, below ``path``.

    An IPv6 address in brackets is text, where YAML would read a list. Raises SettingsError that begins with ``where``.
    """
    if _BRACKETED.fullmatch(text.strip()):
        return text.strip(), {}
    return _parse(text, lambda _: where, path)


def dump(values: object, *, flow: bool = False) -> str:
    """Return plain values as YAML text; ``flow``: in one line, keys in order, without a line end."""
    text: str = yaml.dump(
        values, Dumper=_Dumper, sort_keys=flow, default_flow_style=flow, width=100_000 if flow else None
    )
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def _parse(text: str, at: Callable[[int], str], path: str = "") -> tuple[Any, dict[str, Written]]:
    written: dict[str, Written] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, written
            _Recorder(written, at).note(node, path, ())
            return loader.construct_document(node), written
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        at_end = error.problem_mark is not None and not text[error.problem_mark.index :].strip()
        mark = (error.context_mark if at_end else None) or error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        reason = reason.replace("'<stream end>'", "the end of the text")
        raise SettingsError(f"{at(mark.line + 1 if mark else 1)}: not YAML: {reason}; {_hint(text, mark)}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        got = f"the character {error.character!r}"
        raise SettingsError(f"{at(line)}: not YAML: want printable text, got {got}; remove it") from None
    except RecursionError:
        reason = "maps or lists nested too deeply; write them flatter"
        raise SettingsError(f"{at(1)}: not usable as settings: {reason}") from None
    except (ValueError, KeyError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{at(1)}: not YAML: {error}; put the value in quotes") from None


def _hint(text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
    return f"look at {shown(line)}, and at brackets, quotes and blanks before it"


class _Recorder:
    """Records how each value is written, and refuses YAML that the parser accepts but settings cannot use."""

    def __init__(self, written: dict[str, Written], at: Callable[[int], str]) -> None:
        self._written, self._at, self._nodes = written, at, 0

    def note(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> None:
        """Record a node. Raises SettingsError for a repeated key (YAML drops the first) or a node inside itself."""
        self._nodes += 1
        line = node.start_mark.line + 1
        key_line = self._written.get(path, Written(line)).line
        self._written[path] = Written(key_line, node.value if isinstance(node, yaml.ScalarNode) else None)
        if any(node is outer for outer in above):
            self._refuse(line, path, "want a value, got a reference to what it is in; write it out")
        if self._nodes > MOST_NODES:
            self._refuse(line, path, f"want <= {MOST_NODES} values, got more; are these references to references?")
        if isinstance(node, yaml.SequenceNode):
            for place, item in enumerate(node.value):
                self.note(item, f"{path}[{place}]", (*above, node))
        elif isinstance(node, yaml.MappingNode):
            self._note_map(node, path, (*above, node))

    def _refuse(self, line: int, path: str, reason: str) -> NoReturn:
        raise SettingsError(f"{self._at(line)}: {path}: {reason}")

    def _note_map(self, node: yaml.MappingNode, path: str, above: tuple[yaml.Node, ...]) -> None:
        first_lines: dict[str, int] = {}
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(line, path or "the file", "want names as keys, got a list or a map; write name: value")
            child = f"{path}.{key.value}" if path else str(key.value)
            if key.value in first_lines:
                self._refuse(line, child, f"given twice, first in line {first_lines[key.value]}; keep one of them")
            first_lines[key.value] = line
            self._written[child] = Written(line)
            self.note(item, child, above)
