"""Units of systemd as this machine executes them without it: their commands, with specifiers and variables replaced as
systemd.unit(5) and systemd.exec(5) have it. Knows the few that our units use, and refuses others.
"""

import configparser
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

UNITS = Path(__file__).parents[2] / "launch/deploy/systemd"


def unit(file: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(
        strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",), inline_comment_prefixes=()
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
    parser.read(file)
    return parser


def command(line: str, instance: str, state: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the words of an ``ExecStart`` line: ``${NAME}`` is one word, ``$NAME`` as many as it has."""
    line = line.replace("%i", instance).replace("%S", str(state))
    assert "%" not in line, line
    words: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$\w+", word):
            words += shlex.split(environment.get(word[1:], ""))
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), word))
    return words
