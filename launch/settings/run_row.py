"""The settings of a run in its row ``run/config``, which processes of other releases read (docs/upgrading.md).

learner writes:  every setting, but for those that the last release did not know and that have their default
worker reads:    every setting; one that it does not know is refused, or left out of a section that only the learner
                 uses
"""

import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings.config_loader import Setting, SettingsError, from_map, setting_paths, to_map
from tidemill.launch.settings.run_config import RunConfig

log = logging.getLogger(__name__)

# Settings that came after the last release (tests/data/settings_of_last_release.txt), sections whole. A release empties
# this list.
NEWER = (
    "bus.auth_shadows",
    "bus.history_steps",
    "bus.monitoring",
    "bus.quota_bytes",
    "bus.sample_shards",
    "bus.tasks_per_s",
    "bus.trained_max_bytes",
    "debug.shadow_of",
    "engine.family",
    "learner.family",
    "learner.fsdp_replicas",
    "learner.mtp_loss_scaling_factor",
    "learner.record",
    "up.dashboard",
    "up.gpu_hour_price",
    "up.webhook",
)
# Sections that decide about data and training alone: an engine, actor, scorer or host does as well without them.
_OF_LEARNER = frozenset({"data", "debug", "eval", "learner", "prepare", "sampling", "staleness", "up"})


def to_row(config: RunConfig) -> JsonObject:
    """Return the settings as the row has them."""
    values, defaults = to_map(config), to_map(RunConfig())
    for path in NEWER:
        *above, name = path.split(".")
        section, default = (functools.reduce(_entry, above, tree) for tree in (values, defaults))
        if isinstance(section, dict) and section.get(name) == default[name]:
            del section[name]
    return values


def from_row(row: Mapping[str, object], run: str, changed: Mapping[str, Setting] | None = None) -> RunConfig:
    """Return the settings of a row for a process that does not train, with those ``changed`` on this machine.

    Raises SettingsError for a setting that this release does not know, unless only the learner uses it.
    """
    origin = f"run {run}, row run/config"
    unknown = sorted(_unknown(row, setting_paths()))
    for path in unknown:
        if path.partition(".")[0] not in _OF_LEARNER:
            cure = "start this process from the learner's release, or take the setting out of the run's"
            raise SettingsError(f"{origin}: {path}: no such setting in this release; cure: {cure}")
    if unknown:
        log.info("settings that only a learner of another release uses are left out: %s", ", ".join(unknown))
    return from_map(_without(row, unknown), origin, changed)


def _unknown(values: Mapping[str, object], known: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the settings that this release does not know."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path not in known:
            yield path
        elif isinstance(value, Mapping) and any(other.startswith(f"{path}.") for other in known):
            yield from _unknown(value, known, f"{path}.")


def _without(values: Mapping[str, Any], paths: list[str], prefix: str = "") -> JsonObject:
    kept = {name: value for name, value in values.items() if f"{prefix}{name}" not in paths}
    return {
        name: _without(value, paths, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in kept.items()
    }


def _entry(section: Any, name: str) -> Any:
    return section[name]
