"""Builds the typed tree of dataclasses from defaults, YAML files, ``--set path.to.key=value``, the environment and derived values.

Every value keeps its origin; every error states location, expected and actual value, and the nearest name.
"""

import contextlib
import copy
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.actors.rollout_settings import DATASET
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.yaml_file import SettingsError, Written, shown
from tidemill.learner.algorithms.config import unset_names

ENVIRONMENT_PREFIX = "TIDEMILL_"
NOT_SETTINGS = ("TIDEMILL_BUS_USER", "TIDEMILL_BUS_PASSWORD", "TIDEMILL_BUS_CREDENTIALS", "TIDEMILL_ALLOW")
"""Secrets, and the permissions of this machine: read by ``launch/run/access.py``, never part of a configuration."""
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_-]+")
"""Characters that a run's name cannot have."""
REMOVED: Mapping[str, str] = {"weights.deltas": "engines that are behind load whole weights (docs/decisions/018-no-deltas.md)"}
"""Settings of earlier releases, and the reason why each is gone."""
_NONE = type(None)
KINDS: Mapping[Any, str] = {
    int: "a whole number, such as 3",
    float: "a number, such as 0.5",
    bool: "true or false",
    str: "text, in quotes if it looks like something else",
    tuple: "a list, such as [a, b]",
    dict: "a map, such as {name: value}",
}
"""Names of the types of settings in messages."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, and its origin."""

    value: Any
    origin: str
    written: Mapping[str, Written] = dataclasses.field(default_factory=dict)
    """How its parts are written in their text, by the dotted path."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration of a run, and the origin of each value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]


def load(files: Path | Sequence[Path], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Loaded:
    """Return the run's configuration: defaults < ``files``, a later one over an earlier < ``overrides`` < ``environment`` < derived.

    Raises SettingsError.
    """
    settings: dict[str, Setting] = {}
    files = [files] if isinstance(files, Path) else files
    for file in files:
        _take(settings, read_yaml(file))
    _take(settings, changes(overrides, environment or {}).items())
    _derive(settings, files)
    config = _build(RunConfig, settings, "")
    presets = {f"learner.algorithm.{name}": f"preset {config.learner.algorithm.correction}" for name in unset_names()}
    return Loaded(config, presets | {path: setting.origin for path, setting in settings.items()})


def from_map(values: Mapping[str, object], origin: str, changed: Mapping[str, Setting] | None = None) -> RunConfig:
    """Return a configuration from a nested map, such as the run's row on the bus, and from ``changed``. Raises SettingsError."""
    settings: dict[str, Setting] = {}
    _take(settings, _flatten(RunConfig, values, "", lambda _: origin))
    _take(settings, (changed or {}).items())
    return typing.cast(RunConfig, _build(RunConfig, settings, ""))


def changes(overrides: Sequence[str], environment: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings of ``--set`` and the environment, to apply to a later configuration. Raises SettingsError for unknown ones."""
    settings: dict[str, Setting] = {}
    _take(settings, [_override(text) for text in overrides])
    _take(settings, _from_environment(environment))
    return settings


def to_map(config: Any) -> JsonObject:
    """Return the configuration as plain maps, lists and values."""
    return {
        f.name: to_map(value) if dataclasses.is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        for f in dataclasses.fields(config)
        for value in [getattr(config, f.name)]
    }


# ---- sources


def read_yaml(file: Path) -> list[tuple[str, Setting]]:
    """Return every leaf of a YAML file with its line. Raises SettingsError."""
    values, written = yaml_file.read(file)
    found = [] if values is None else _flatten(RunConfig, values, "", lambda path: f"{file}:{written[path].line if path in written else 1}")
    return [(path, dataclasses.replace(setting, written=written)) for path, setting in found]


def _override(setting: str) -> tuple[str, Setting]:
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise SettingsError(f"--set {setting}: want path.to.key=value")
    value, written = yaml_file.value(text, f"--set {path}", path.strip())
    return path.strip(), Setting(value, "--set", written)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_SETTINGS:
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _refuse_single_underscores(name, path)
            value, written = yaml_file.value(text, name, path)
            yield path, Setting(value, f"environment {name}", written)


def _refuse_single_underscores(name: str, path: str) -> None:
    """Raise SettingsError for names such as TIDEMILL_LEARNER_STEPS, with the intended variable."""
    known = list(_paths(RunConfig, ""))
    meant = next((one for one in known if one.replace(".", "_") == path.replace(".", "_")), None)
    if meant is not None and path not in known:
        variable = ENVIRONMENT_PREFIX + meant.replace(".", "__").upper()
        raise SettingsError(f"environment {name}: want two underscores where a dot is in {meant}, got one; did you mean {variable}?")


def _paths(section: type, prefix: str) -> Iterator[str]:
    """Yield the dotted path of every setting and every section."""
    for name, kind in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        if (inner := _section(kind)) is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def _derive(settings: dict[str, Setting], files: Sequence[Path]) -> None:
    """Add the values that follow from other settings, unless they are given."""

    def given(path: str) -> Any:
        """Return the value set for a path; None if there is none."""
        return settings[path].value if path in settings else None

    def follow(path: str, value: object, why: str) -> None:
        """Set a path, with the reason as its origin, unless it has a value that is neither None nor empty."""
        if given(path) in (None, ""):
            settings[path] = Setting(value, f"derived: {why}")

    follow("run", NOT_IN_NAME.sub("-", "-".join(file.stem for file in files))[:64] or "run", "name of the file")
    follow("directory", f"runs/{given('run')}", "runs/<run>")
    if given("learner.colocated") is True:
        follow("engine.colocated", True, "learner.colocated")
        follow("weights.overlap", False, "learner.colocated")
    if given("learner.routing_replay") == "rollout":
        for path in ("actor.routed_experts", "engine.routed_experts"):
            if given(path) is False:
                raise SettingsError(f"{settings[path].origin}: {path}: follows from learner.routing_replay: rollout; leave it out")
            follow(path, True, "learner.routing_replay")
    rollouts = given("rollouts") or {}
    names = {path.split(".")[1] for path in settings if path.startswith("rollouts.")} | set(
        rollouts if isinstance(rollouts, Mapping) else ()
    )
    if names:
        follow("bus.rollouts", tuple(sorted(names)), "rollouts")
    if given("actor.teachers") or any(path.startswith("actor.teachers.") for path in settings):
        follow("learner.algorithm.distill_teacher", "engine", "actor.teachers")
        if given("learner.algorithm.distill_top_k"):
            follow("actor.teacher_top_k", given("learner.algorithm.distill_top_k"), "learner.algorithm.distill_top_k")
    if _all_recorded(rollouts, given("data.rollout"), given("data.sources"), given("data.rollout_key"), given("eval.every")):
        for path in ("up.engines", "up.actors"):
            follow(path, 0, "all samples are recorded responses")
    prepares = given("prepare") is not None or any(path.startswith("prepare.") for path in settings)
    if prepares:
        follow("model.path", f"{given('directory')}/prepared/model", "made by prepare")
        follow("data.path", f"{given('directory')}/prepared/prompts.jsonl", "made by prepare")
    for path in ("data.seed", "learner.seed", "prepare.seed"):
        if given("seed") is not None and (prepares or not path.startswith("prepare")):
            follow(path, given("seed"), "seed")


def _all_recorded(rollouts: object, rollout: object, sources: object, key: object, every: object) -> bool:
    """Return whether the settings of rollouts and data leave nothing to sample. Wrong values are refused later."""
    if not isinstance(rollouts, Mapping) or key or every:
        return False
    recorded = {name for name, one in rollouts.items() if isinstance(one, Mapping) and one.get("use") == DATASET}
    own = [one for one in sources.values() if isinstance(one, Mapping)] if isinstance(sources, Mapping) else []
    named = [rollout if one.get("rollout") is None else one["rollout"] for one in own] or [rollout]
    return all(isinstance(one, str) and one in recorded for one in named) and not any(one.get("rollout_key") for one in own)


# ---- the tree


def _take(settings: dict[str, Setting], found: typing.Iterable[tuple[str, Setting]]) -> None:
    """Merge ``found`` over ``settings``: a value replaces all settings below it, a map only those that it names."""
    for path, setting in found:
        kind, value = _kind_of(path, setting.origin), setting.value
        is_map = _section(kind) is not None and isinstance(value, Mapping)
        if is_map and value:
            below = _flatten(kind, value, path, lambda _, origin=setting.origin: origin)  # type: ignore[misc]
            _take(settings, [(child, dataclasses.replace(one, written=setting.written)) for child, one in below])
            continue
        if not is_map:
            for known in [known for known in settings if known.startswith(f"{path}.")]:
                del settings[known]
        settings[path] = setting


def _flatten(kind: object, values: object, path: str, origin: typing.Callable[[str], str]) -> Iterator[tuple[str, Setting]]:
    """Yield the leaves of a nested map, as deep as the dataclasses go. Raises SettingsError."""
    section = _section(kind)
    if section is None or values is None or (path and values == {}):
        yield path, Setting(values, origin(path))
        return
    if not isinstance(values, Mapping):
        raise SettingsError(f"{origin(path)}: {path or 'the file'}: {_not_a_map(section, values)}")
    kinds = typing.get_type_hints(section)
    for key, value in values.items():
        child = f"{path}.{key}" if path else str(key)
        if key not in kinds:
            raise SettingsError(f"{origin(child)}: {_unknown(section, path, str(key))}")
        yield from _flatten(kinds[key], value, child, origin)


def _kind_of(path: str, origin: str) -> Any:
    """Return the type of the setting that ``path`` names. Raises SettingsError if there is none."""
    kind: object = RunConfig
    walked: list[str] = []
    for key in path.split("."):
        section = _section(kind)
        if section is None:
            if _bare(kind) is dict:
                return Any
            raise SettingsError(f"{origin}: {path}: {'.'.join(walked)} is a single value, it has no {key!r}")
        kinds = typing.get_type_hints(section)
        if key not in kinds:
            raise SettingsError(f"{origin}: {_unknown(section, '.'.join(walked), key)}")
        kind = kinds[key]
        walked.append(key)
    return kind


def _unknown(section: type, path: str, key: str) -> str:
    names = [f.name for f in dataclasses.fields(section)]
    prefix = f"{path}." if path else ""
    if reason := REMOVED.get(prefix + key):
        return f"{prefix}{key}: this setting was removed: {reason}; delete it"
    near = difflib.get_close_matches(key, names, n=1)
    return f"{prefix}{key}: no such setting" + (f"; did you mean {prefix}{near[0]}?" if near else f"; there are {', '.join(names)}")


def _build(section: type, settings: Mapping[str, Setting], prefix: str) -> Any:
    values: JsonObject = {}
    for name, kind in typing.get_type_hints(section).items():
        path = f"{prefix}{name}"
        below = any(known.startswith(f"{path}.") for known in settings)
        inner = _section(kind)
        if inner is not None:
            if path in settings and settings[path].value not in (None, {}):
                raise SettingsError(f"{settings[path].origin}: {path}: {_not_a_map(inner, settings[path].value)}")
            if below:
                values[name] = _build(inner, settings, f"{path}.")
            elif path in settings:
                values[name] = None if settings[path].value is None and _NONE in typing.get_args(kind) else inner()
            continue
        if path in settings:
            values[name] = _coerce(kind, settings[path], path)
        if below:
            values[name] = _with_below(values.get(name, {}), settings, f"{path}.")
    try:
        return section(**values)
    except ValueError as bad:
        where = _origin([prefix + name for name in str(bad).partition(":")[0].split(", ")], settings)
        raise SettingsError(f"{where + ': ' if where else ''}{prefix}{bad}") from None


def _origin(names: Sequence[str], settings: Mapping[str, Setting]) -> str:
    """Return the origin of the first of the settings ``names`` that was set, itself or as a part of a map; empty for defaults."""
    for name in names:
        for known, setting in settings.items():
            if known == name or name.startswith(f"{known}."):
                return setting.origin
    below = {setting.origin for known, setting in settings.items() if any(known.startswith(f"{name}.") for name in names)}
    return below.pop() if len(below) == 1 else ""


def _with_below(there: JsonObject, settings: Mapping[str, Setting], prefix: str) -> JsonObject:
    """Return a free map with the entries that were set one by one; a dot in a key is one level."""
    result = copy.deepcopy(there)
    for known, setting in settings.items():
        if known.startswith(prefix):
            *parents, last = known.removeprefix(prefix).split(".")
            place = result
            for walked, key in enumerate(parents):
                place = place.setdefault(key, {})
                if not isinstance(place, dict):
                    where = prefix + ".".join(parents[: walked + 1])
                    raise SettingsError(f"{setting.origin}: {known}: {where} is a single value, it has no {last!r}")
            place[last] = setting.value
    return result


def _coerce(kind: object, setting: Setting, path: str) -> Any:
    value, bare = setting.value, _bare(kind)
    if value is None and _NONE in typing.get_args(kind):
        return None
    if bare is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{setting.origin}: {path}: want a finite number, got {value!r}; remove the setting to use its default")
    if bare is tuple and isinstance(value, list):
        item = typing.get_args(_without_none(kind))[0]
        items = (dataclasses.replace(setting, value=one) for one in value)
        return tuple(_coerce(item, one, f"{path}[{place}]") for place, one in enumerate(items))
    if bare is str and isinstance(value, int | float) and not isinstance(value, bool):
        written = setting.written.get(path)
        return str(value) if written is None or written.scalar is None else written.scalar
    if bare is Any or (isinstance(value, bare) and not (isinstance(value, bool) and bare is not bool)):
        return value
    raise SettingsError(f"{setting.origin}: {path}: want {KINDS.get(bare, str(bare))}, got {shown(value)}")


def _not_a_map(section: type, value: object) -> str:
    first = dataclasses.fields(section)[0].name
    return f"want a map of settings, such as {{{first}: ...}}, got {shown(value)}"


def _section(kind: object) -> type | None:
    """Return the dataclass that a field holds, None for a field with a value."""
    for one in (kind, *typing.get_args(kind)):
        if dataclasses.is_dataclass(one) and isinstance(one, type):
            return one
    return None


def _bare(kind: object) -> Any:
    kind = _without_none(kind)
    return typing.get_origin(kind) or kind


def _without_none(kind: object) -> Any:
    return next(one for one in typing.get_args(kind) if one is not _NONE) if isinstance(kind, types.UnionType) else kind


# ---- print


def render(loaded: Loaded) -> str:
    """Return the whole configuration as YAML, each line with its origin, followed by the derived numbers."""
    lines = list(_lines(loaded.config, "", 0, loaded.origins))
    config = loaded.config
    lines += [
        "",
        f"# samples per step = groups_per_step x group_size = {config.learner.groups_per_step} x {config.learner.group_size} = "
        f"{config.samples_per_step}",
        f"# tasks handed out at most = (max_lag + 1) x groups_per_step = {(config.staleness.max_lag + 1) * config.learner.groups_per_step}",
        f"# samples of the run = {config.samples_per_step * config.learner.steps}",
        f"# stream SAMPLES may hold {config.bus.samples_max_bytes} bytes (`tidemill check` counts what it must hold)",
    ]
    return "\n".join(lines) + "\n"


def _lines(section: Any, prefix: str, depth: int, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * depth
    for f in dataclasses.fields(section):
        value, path = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            yield f"{indent}{f.name}:"
            yield from _lines(value, f"{path}.", depth + 1, origins)
            continue
        text = yaml_file.dump(list(value) if isinstance(value, tuple) else value, flow=True)
        came = dict.fromkeys(origin for known, origin in origins.items() if known == path or known.startswith(f"{path}."))
        yield f"{indent + f.name + ': ' + text:<48} # {', '.join(came) or 'default'}"
