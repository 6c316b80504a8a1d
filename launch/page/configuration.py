"""The settings of a run for its page: from the row ``run/config``, beside their defaults and meanings.

Secrets come from the environment. What a user has put into an option of a reward or a rollout all the same is hidden
here under known names of secrets (``api_key``), as are the users of addresses; under another name it is shown.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.page.texts import safe
from tidemill.launch.settings import reference, yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.config import masked

HIDDEN = "(hidden)"
MAX_VALUE = 2000  # Characters of one value
MAX_SETTINGS, MAX_PARTS = 2000, 200  # Settings of an answer, and parts of a list
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:passw(?:or)?d|passphrase|pwd|secret|credential|bearer|authorization|cookie"
    r"|(?:api|access|private|secret|auth|account)_?key)s?(?:_|$)|(?:^|_)(?:pass|auth)s?$|(?:token|password|secret|key)s?$"
)
"""Names of secrets as words in small letters, joined by ``_``."""
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # ``X-Api-Key``, ``authToken`` and ``api_key2`` have two
_NAME = re.compile(r"[A-Za-z][\w-]*")
_ASSIGNED = re.compile(r"""["']?\s*[=:]\s*(?:(?i:basic|bearer) )?("[^"]{0,999}"|'[^']{0,999}'|[^\s"',}\]]+)""")
_BEHIND = re.compile(r"""\s+(?!-)("[^"]{0,999}"|'[^']{0,999}'|\S+)""")
_COUNT = re.compile(r"[\d._]*")


def configuration_of(row: Mapping[str, Any]) -> JsonObject:
    """Return path, value, default and meaning of each setting, those that differ from their default first.

    ``value`` and ``default`` are as in a configuration file; a default of null = a map's entry, which has none.
    Blocks: the first call makes the reference of all settings.
    """
    defaults, meanings = _defaults(), _meanings()
    settings = []
    for path, value in _leaves(row):
        changed = path not in defaults or value != defaults[path]
        settings.append(
            {
                "path": safe(masked(path)[:MAX_VALUE]),
                "value": _shown(path, value),
                "default": _default_texts().get(path),
                "changed": changed,
                "meaning": next(filter(None, map(meanings.get, _in_reference(path))), ""),
            }
        )
        if len(settings) == MAX_SETTINGS:
            break
    return {"settings": sorted(settings, key=lambda setting: not setting["changed"])}


def _shown(path: str, value: Any) -> str:
    return safe(masked(yaml_file.dump(_without_secrets(path, value), flow=True)))[:MAX_VALUE]


def _without_secrets(path: str, value: Any) -> Any:
    """Return the value with ``HIDDEN`` in the place of what has the name of a secret; texts are cut."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(f"{path}.{name}", part) for name, part in value.items()}
    if not any(name in _meanings() for name in _names_of_maps(path)) and _is_secret(path, value):
        return HIDDEN
    if isinstance(value, list):
        options = ["", *value]
        return [
            HIDDEN if _is_value(option, part) and _is_secret(option, part) else _without_secrets(path, part)
            for option, part in zip(options, value[:MAX_PARTS], strict=False)
        ]
    return masked(_hidden_in(value))[:MAX_VALUE] if isinstance(value, str) else value


def _is_value(option: Any, part: Any) -> bool:
    """Return whether a part of a list is the value of the option of a command before it."""
    is_option = isinstance(option, str) and option.startswith("-") and "=" not in option
    return is_option and not str(part).startswith("--")


def _hidden_in(text: str) -> str:
    """Return a text with ``HIDDEN`` for what follows the name of a secret (``NAME=``, ``NAME:``, ``--NAME``)."""
    pieces, end = [], 0
    for name in _NAME.finditer(text):
        if name.start() < end or not _is_secret(name[0], "x"):
            continue
        value = _ASSIGNED.match(text, name.end())
        if value is None and (text[max(0, name.start() - 1) : name.start()] == "-" or name[0].lower() == "bearer"):
            value = _BEHIND.match(text, name.end())
        if value is not None and _is_secret(name[0], value[1]):
            pieces += [text[end : value.start(1)], HIDDEN]
            end = value.end(1)
    return "".join([*pieces, text[end:]])


def _is_secret(path: str, value: Any) -> bool:
    """Return whether a part of the path names a secret; a number of tokens is none."""
    if not value or isinstance(value, bool):
        return False
    names = ("_".join(_NAME_WORD.findall(name)).lower() for name in path.split("."))
    found = [name for name in names if _SECRET_NAME.search(name)]
    return bool(found) and not (found[-1].endswith("tokens") and _COUNT.fullmatch(str(value)))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted path; an empty map is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@cache
def _defaults() -> Mapping[str, Any]:
    return dict(_leaves(to_map(RunConfig())))


@cache
def _default_texts() -> Mapping[str, str]:
    return {path: _shown(path, value) for path, value in _defaults().items()}


@cache
def _meanings() -> Mapping[str, str]:
    return {entry.path: entry.sentence for entry in reference.entries()}


def _in_reference(path: str) -> Iterator[str]:
    """Yield the paths of the reference that may describe a setting, the nearest first."""
    yield from _names_of_maps(path)
    parts = path.split(".")
    yield from (".".join(parts[:place]) for place in range(len(parts) - 1, 0, -1))


def _names_of_maps(path: str) -> Iterator[str]:
    """Yield the path, and it as the entry of a map: ``rollouts.NAME.use``."""
    yield path
    parts = path.split(".")
    yield from (".".join([*parts[:place], "NAME", *parts[place + 1 :]]) for place in range(1, len(parts)))
