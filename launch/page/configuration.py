"""The settings of a run for its page: from the row ``run/config``, beside their defaults and meanings.

Secrets are never settings: they come from the environment. What a user has put into an option of a reward or a rollout
all the same, an address with a password or an ``api_key``, is hidden here.
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
    r"(?i)(?:^|[_.-])(?:pass|passwd|password|passphrase|secret|token|api_?key|access_?key|private_?key|credentials?"
    r"|authorization|auth_?key|cookie)$"
)


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
                "path": safe(path[:MAX_VALUE]),
                "value": _shown(path, value),
                "default": _default_texts().get(path),
                "changed": changed,
                "meaning": meanings.get(path) or meanings.get(_of_map(path), ""),
            }
        )
        if len(settings) == MAX_SETTINGS:
            break
    return {"settings": sorted(settings, key=lambda setting: not setting["changed"])}


def _shown(path: str, value: Any) -> str:
    return safe(masked(yaml_file.dump(_without_secrets(path, value), flow=True)))[:MAX_VALUE]


def _without_secrets(path: str, value: Any) -> Any:
    """Return the value with ``HIDDEN`` in the place of texts with the name of a secret."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(f"{path}.{name}", part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_secrets(path, part) for part in value[:MAX_PARTS]]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET_NAME.search(path) else value[:MAX_VALUE]


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


def _of_map(path: str) -> str:
    """Return the path of the reference for a setting of a map's entry: ``rollouts.NAME.use``."""
    parts = path.split(".")
    names = (".".join([*parts[:place], "NAME", *parts[place + 1 :]]) for place in range(1, len(parts)))
    above = (".".join(parts[:place]) for place in range(len(parts) - 1, 0, -1))
    known = _meanings()
    return next((name for name in (*names, *above) if known.get(name)), "")
