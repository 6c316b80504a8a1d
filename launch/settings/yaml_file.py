"""YAML as plain values with the line of each. Every defect of a text is one SettingsError of one line, whichever error the parser has."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bus import exit_codes

MOST_NODES = 100_000
"""Most values of a text, each counted at every reference: a few lines of references can expand to more than the memory holds."""
SHOWN_CHARACTERS = 120
"""Most characters of a value in a message."""
_BRACKETED = re.compile(r"\[(?=[^]]*:[^]]*:)[0-9A-Fa-f:.]+(%\w+)?\](:\d+)?")
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge", "value")}


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or in contradiction to another one."""

    exit_code = exit_codes.CONFIG


class _Loader(yaml.SafeLoader):
    """Loads only values that JSON has, too: a date stays text, and other tags are refused."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as yaml declares it
        first: [(tag, pattern) for tag, pattern in each if tag in PLAIN] for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in PLAIN
    }


def read(file: Path) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of every key by its dotted path. Raises SettingsError with the line."""
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SettingsError(f"{file}:{line}: want text in UTF-8, got the byte 0x{data[error.start]:02x}; save it as UTF-8") from None
    return _parse(text, lambda line: f"{file}:{line}")


def value(text: str, where: str) -> Any:
    """Return the value of a YAML text. An IPv6 address in brackets is text, where YAML would read a list.

    Raises SettingsError that begins with ``where``.
    """
    if _BRACKETED.fullmatch(text.strip()):
        return text.strip()
    return _parse(text, lambda _: where)[0]


def shown(value: object) -> str:
    """Return a value in YAML notation, shortened."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, TypeError):
        text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _parse(text: str, at: Callable[[int], str]) -> tuple[Any, dict[str, int]]:
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _LineRecorder(lines, at).note(node, "", ())
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        at_end = error.problem_mark is not None and not text[error.problem_mark.index :].strip()
        mark = (error.context_mark if at_end else None) or error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part).replace("'<stream end>'", "the end of the text")
        raise SettingsError(f"{at(mark.line + 1 if mark else 1)}: not YAML: {reason}; {_hint(text, mark)}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise SettingsError(f"{at(line)}: not YAML: want printable text, got the character {error.character!r}; remove it") from None
    except RecursionError:
        raise SettingsError(f"{at(1)}: not usable as settings: maps or lists nested too deeply; write them flatter") from None
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{at(1)}: not YAML: {error}; put the value in quotes") from None


def _hint(text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
    return f"look at {shown(line)}, and at brackets, quotes and blanks before it"


class _LineRecorder:
    """Records the line of every key, and refuses YAML that the parser accepts but settings cannot use."""

    def __init__(self, lines: dict[str, int], at: Callable[[int], str]) -> None:
        self._lines, self._at, self._nodes = lines, at, 0

    def note(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> None:
        """Record the lines of a node. Raises SettingsError for a key twice in a map (YAML drops the first) and a node inside itself."""
        self._nodes += 1
        line = node.start_mark.line + 1
        self._lines.setdefault(path, line)
        if any(node is one for one in above):
            raise SettingsError(f"{self._at(line)}: {path}: want a value, got a reference to what it is in; write it out")
        if self._nodes > MOST_NODES:
            raise SettingsError(f"{self._at(line)}: {path}: want <= {MOST_NODES} values, got more; are these references to references?")
        if isinstance(node, yaml.SequenceNode):
            for place, item in enumerate(node.value):
                self.note(item, f"{path}[{place}]", (*above, node))
        elif isinstance(node, yaml.MappingNode):
            self._note_map(node, path, (*above, node))

    def _note_map(self, node: yaml.MappingNode, path: str, above: tuple[yaml.Node, ...]) -> None:
        seen: dict[str, int] = {}
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise SettingsError(f"{self._at(line)}: {path or 'the file'}: want names as keys, got a list or a map; write name: value")
            child = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                raise SettingsError(f"{self._at(line)}: {child}: given twice, first in line {seen[key.value]}; keep one of them")
            seen[key.value] = self._lines[child] = line
            self.note(item, child, above)
