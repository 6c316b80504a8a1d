"""Settings that name code, programs, environment or files: from the run's row on the bus they are taken only where this
machine allows it.

Otherwise the right to write one row would be the right to run programs on the machine of every engine and actor.
Processes that are started with a configuration file of their own (``tidemill up``) read no row and are not checked.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from tidemill.actors.config import ActorConfig, EngineConfig
from tidemill.actors.errors import NotAllowed
from tidemill.actors.rollout_settings import DATASET
from tidemill.bus.wire.json_object import is_number
from tidemill.rewards.group import ASKING
from tidemill.rewards.group import TABLE as OF_GROUPS
from tidemill.rewards.registry import NAMING, TABLE

GUARDED = {
    "actor.reward": "code",
    "actor.reward_parts": "code",
    "actor.group_reward": "code",
    "engine.sglang.python": "a program",
    "engine.sglang.arguments": "an argument of a program",
    "engine.sglang.environment": "the environment of a program",
    "engine.sglang.log": "a file to write",
    "learner.family": "code",
    "rollouts": "code",
}
"""Setting -> the kind of thing it names. Each entry of a map is checked separately. Defaults, numbers and built-in
rewards are allowed, but for those with options that name servers, variables or programs.
"""

ROLLOUTS = {"use": "code", "python": "a program"}
"""Settings of each entry of ``rollouts``, a section for actors, and the kind of thing they name."""
_ROLES = {"actor": "actor", "engine": "engine", "learner": "engine"}
"""Section of a setting -> the role that acts on it. Engines import the module of ``learner.family``."""
_OWN = {"actor": ActorConfig(), "engine": EngineConfig(), "learner": EngineConfig()}
_REWARDS = frozenset({"reward", "reward_parts", "group_reward"})
"""Settings of the section ``actor`` that scorers load, and actors only where the run has no scorers."""


def checked(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns, ``SETTING=VALUE`` with ``*`` for anything. Raises ValueError if no setting fits."""
    for pattern in patterns:
        name, equals, _ = pattern.partition("=")
        if not equals or not any(fnmatchcase(path, name) or name.startswith(f"{path}.") for path in GUARDED):
            want = f"SETTING=VALUE (* for anything) with a setting of {', '.join(GUARDED)}"
            raise ValueError(f"--allow: want {want}, got {pattern!r}")
    return tuple(patterns)


def refuse_foreign(
    row: Mapping[str, object], role: str, allowed: Sequence[str], *, where: str, changed: Iterable[str] = ()
) -> None:
    """Raise NotAllowed for settings of ``role`` (actor | engine | scorer) in ``row`` that fit none of the patterns in
    ``allowed``.

    ``changed``: settings, by path, that this machine replaces after the check.
    """
    if any(path == "actor" or path.startswith("actor.scorers") for path in changed):
        row = _without_scorers(row)
    refused = {
        f"{path}={text}": what
        for path, what, text in guarded(row, role)
        if not any(pattern == f"{path}={text}" or fnmatchcase(f"{path}={text}", pattern) for pattern in allowed)
    }
    if refused:
        named = "; ".join(f"{setting} names {what}" for setting, what in refused.items())
        raise NotAllowed(where, named, " ".join(f"--allow {shlex.quote(setting)}" for setting in refused))


def guarded(row: Mapping[str, object], role: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, kind of thing it names, text) of every guarded setting of the row that is not always allowed."""
    if role == "actor":
        yield from _guarded_rollouts(row.get("rollouts"))
    for path, what in GUARDED.items():
        section, _, setting = path.partition(".")
        loads = role in _loading_rewards(row) if setting in _REWARDS else role == _ROLES.get(section)
        if section not in _OWN or not loads:
            continue
        default: object = _OWN[section]
        value: object = row.get(section)
        for name in path.split(".")[1:]:
            default = getattr(default, name)
            value = value.get(name) if isinstance(value, Mapping) else value
        entries = value.items() if isinstance(default, dict) and isinstance(value, Mapping) else None
        named = {path: value} if entries is None else {f"{path}.{name}": entry for name, entry in entries}
        for place, entry in named.items():
            if not _harmless(place, entry, default):
                yield place, what, _text_of(entry)


def _guarded_rollouts(rollouts: object) -> Iterator[tuple[str, str, str]]:
    for name, entry in rollouts.items() if isinstance(rollouts, Mapping) else ():
        is_map = isinstance(entry, Mapping)
        if is_map and entry.get("use") == DATASET:  # no actor runs anything for it
            continue
        for setting, what in ROLLOUTS.items():
            if text := entry.get(setting) if is_map else entry:
                yield f"rollouts.{name}.{setting}", what, str(text)
        # Options of a program that ships name tools, environments and harnesses by import path.
        options = entry.get("options") if is_map else None
        for option, value in options.items() if isinstance(options, Mapping) else ():
            if not isinstance(value, int | float | None):
                yield f"rollouts.{name}.options.{option}", "code", _text_of(value)


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _without_scorers(row: Mapping[str, object]) -> Mapping[str, object]:
    actor = row.get("actor")
    return {**row, "actor": {**actor, "scorers": {}}} if isinstance(actor, Mapping) else row


def _loading_rewards(row: Mapping[str, object]) -> tuple[str, ...]:
    """Return the roles that may load the run's rewards: no actors if ``actor.scorers.enabled`` is exactly true."""
    actor = row.get("actor")
    scorers = actor.get("scorers") if isinstance(actor, Mapping) else None
    return ("scorer",) if isinstance(scorers, Mapping) and scorers.get("enabled") is True else ("actor", "scorer")


def _harmless(path: str, value: object, default: object) -> bool:
    named = value.get("reward") if isinstance(value, Mapping) and path.startswith("actor.reward_parts.") else value
    ours = TABLE.keys() - NAMING
    tables = {"actor.reward": ours, "actor.reward_parts": ours, "actor.group_reward": OF_GROUPS.keys() - ASKING}
    of_the_house = any(
        path.startswith(start) and isinstance(named, str) and named in table for start, table in tables.items()
    )
    return value is None or value == default or is_number(value) or of_the_house
