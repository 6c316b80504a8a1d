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
    "rollouts": "code",
}
"""Setting -> the kind of thing it names, for each entry of a map. Allowed are defaults, numbers and built-in rewards,
but for rewards with options that name servers, variables or programs.
"""

ROLLOUTS = {"use": "code", "python": "a program"}
"""Settings of each entry of ``rollouts``, a section for actors, and the kind of thing they name."""
_OWN = {"actor": ActorConfig(), "engine": EngineConfig()}
_REWARDS = frozenset({"reward", "reward_parts", "group_reward"})
"""Settings of the section ``actor`` that scorers load, and actors only where the run has no scorers."""


def checked(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns, ``SETTING=VALUE`` each, with ``*`` for anything. Raises ValueError for a useless one."""
    for pattern in patterns:
        name, equals, _ = pattern.partition("=")
        if not equals or not any(fnmatchcase(path, name) or name.startswith(f"{path}.") for path in GUARDED):
            want = f"want SETTING=VALUE (* for anything) with a setting of {', '.join(GUARDED)}"
            raise ValueError(f"--allow: {want}, got {pattern!r}")
    return tuple(patterns)


def refuse_foreign(
    row: Mapping[str, object], role: str, allowed: Sequence[str], *, where: str, changed: Iterable[str] = ()
) -> None:
    """Raise NotAllowed for settings of ``role`` (actor, engine or scorer) in ``row`` that fit no pattern in
    ``allowed``. ``changed``: settings, by path, that this machine replaces after the check.
    """
    if any(path == "actor" or path.startswith("actor.scorers") for path in changed):
        row = _without_scorers(row)  # the row's setting of them does not count
    refused = {
        setting: what
        for setting, what in ((f"{path}={text}", what) for path, what, text in _guarded(row, role))
        if not any(pattern == setting or fnmatchcase(setting, pattern) for pattern in allowed)
    }
    if refused:
        named = "; ".join(f"{setting} names {what}" for setting, what in refused.items())
        raise NotAllowed(where, named, " ".join(f"--allow {shlex.quote(setting)}" for setting in refused))


def _guarded(row: Mapping[str, object], role: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, kind of thing, value as text) of every guarded setting of the row that is not always allowed."""
    rollouts = row.get("rollouts")
    for name, entry in rollouts.items() if role == "actor" and isinstance(rollouts, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("use") == DATASET:  # no actor runs anything for it
            continue
        for setting, what in ROLLOUTS.items():
            if text := entry.get(setting) if isinstance(entry, Mapping) else entry:
                yield f"rollouts.{name}.{setting}", what, str(text)
        # Options of a program that ships name tools, environments and harnesses by import path.
        options = entry.get("options") if isinstance(entry, Mapping) else None
        for option, option_value in options.items() if isinstance(options, Mapping) else ():
            if not isinstance(option_value, int | float | None):
                text = (
                    option_value
                    if isinstance(option_value, str)
                    else json.dumps(option_value, sort_keys=True, default=str)
                )
                yield f"rollouts.{name}.options.{option}", "code", text
    for path, what in GUARDED.items():
        section, _, setting = path.partition(".")
        loads = role in _loading_rewards(row) if setting in _REWARDS else role == section
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
                yield place, what, entry if isinstance(entry, str) else json.dumps(entry, sort_keys=True, default=str)


def _without_scorers(row: Mapping[str, object]) -> Mapping[str, object]:
    actor = row.get("actor")
    return {**row, "actor": {**actor, "scorers": {}}} if isinstance(actor, Mapping) else row


def _loading_rewards(row: Mapping[str, object]) -> tuple[str, ...]:
    """Return the roles that load the rewards of a run: actors, unless ``actor.scorers.enabled`` is exactly true."""
    actor = row.get("actor")
    scorers = actor.get("scorers") if isinstance(actor, Mapping) else None
    return ("scorer",) if isinstance(scorers, Mapping) and scorers.get("enabled") is True else ("actor", "scorer")


def _harmless(path: str, value: object, default: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    named = value.get("reward") if isinstance(value, Mapping) and path.startswith("actor.reward_parts.") else value
    ours = TABLE.keys() - NAMING
    tables = {"actor.reward": ours, "actor.reward_parts": ours, "actor.group_reward": OF_GROUPS.keys() - ASKING}
    is_builtin = isinstance(named, str) and any(path.startswith(start) and named in tables[start] for start in tables)
    return value is None or value == default or is_number or is_builtin
