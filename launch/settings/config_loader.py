"""Builds the configuration from defaults, YAML files, ``--set path.to.key=value``, the environment and derived values.

Every value keeps its origin; every error states location, expected and actual value, and the nearest name.
"""

import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.actors.rollout_settings import DATASET
from tidemill.bus.section import Problem, SectionRefused, Sections, derived, dotted, read, section_of, shown
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings import hub_names, yaml_file
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.yaml_file import SettingsError, Written
from tidemill.learner.algorithms.config import unset_names
from tidemill.learner.settings.step_settings import FORMER

ENVIRONMENT_PREFIX = "TIDEMILL_"
# Secrets, and the permissions of this machine: read by `launch/run/access.py`, never part of a configuration.
NOT_SETTINGS = (
    *("TIDEMILL_BUS_USER", "TIDEMILL_BUS_PASSWORD", "TIDEMILL_BUS_CREDENTIALS", "TIDEMILL_ALLOW"),
    *("TIDEMILL_WEBHOOK", "TIDEMILL_METRICS_TOKEN"),
)
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_-]+")  # Characters that a run's name cannot have
# Settings of earlier releases, and the reason why each is gone.
REMOVED: Mapping[str, str] = {
    "weights.deltas": "engines that are behind load whole weights (docs/decisions/018-no-deltas.md)"
}
# Settings that had another name in earlier releases, with the present name.
RENAMED = {f"learner.algorithm.{former}": f"learner.algorithm.{path}" for former, path in FORMER.items()}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, and its origin."""

    value: Any
    origin: str
    # How its parts are written in their text, by the dotted path.
    written: Mapping[str, Written] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration of a run, and the origin of each value that is not a default."""

    config: RunConfig
    origins: Mapping[str, str]


def load(
    files: Path | Sequence[Path], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Loaded:
    """Return the settings: defaults < ``files`` < ``overrides`` < ``environment`` < derived. Raises SettingsError."""
    settings: dict[str, Setting] = {}
    files = [files] if isinstance(files, Path) else files
    for file in files:
        _put(settings, read_yaml(file))
    _put(settings, changes(overrides, environment or {}).items())
    _derive(settings, files)
    config = _build(settings)
    _refuse_derived(settings, config)
    presets = {f"learner.algorithm.{name}": f"preset {config.learner.algorithm.correction}" for name in unset_names()}
    return Loaded(config, presets | {path: setting.origin for path, setting in settings.items()})


def from_map(values: Mapping[str, object], origin: str, changed: Mapping[str, Setting] | None = None) -> RunConfig:
    """Return a configuration from a map, such as the run's row on the bus, and ``changed``. Raises SettingsError."""
    settings: dict[str, Setting] = {}
    _put(settings, ((str(name), Setting(value, origin)) for name, value in values.items()))
    _put(settings, (changed or {}).items())
    return _build(settings)


def changes(overrides: Sequence[str], environment: Mapping[str, str]) -> dict[str, Setting]:
    """Return the settings of ``--set`` and the environment, for a later configuration. Raises SettingsError."""
    settings: dict[str, Setting] = {}
    _put(settings, [_override(text) for text in overrides])
    _put(settings, _from_environment(environment))
    try:
        read(RunConfig, _nested(settings))
    except SectionRefused as refused:  # wrong values are refused with the other settings, which may decide about them
        _refuse([problem for problem in refused.problems if problem.unknown], settings)
    return settings


def to_map(config: Any) -> JsonObject:
    """Return the configuration as plain maps, lists and values, with names for what is in the cache of the hub."""
    return {field.name: _as_written(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _as_written(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_map(value)
    value = value.given if isinstance(value, Sections) else list(value) if isinstance(value, tuple) else value
    return hub_names.named(value)


# ---- sources


def read_yaml(file: Path) -> list[tuple[str, Setting]]:
    """Return the settings of a YAML file with their lines. Raises SettingsError."""
    values, written = yaml_file.read(file)
    if values is None:
        return []
    if not isinstance(values, Mapping):
        raise SettingsError(f"{file}:1: the file: want a map of settings, such as {{run: ...}}, got {shown(values)}")
    leaves = _leaves("", Setting(values, "", written))
    return [
        (path, dataclasses.replace(setting, origin=f"{file}:{written[path].line if path in written else 1}"))
        for path, setting in leaves
    ]


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


@functools.cache
def setting_paths() -> frozenset[str]:
    """Return the path of every section and setting, without the entries of maps."""
    return frozenset(_paths(RunConfig, ""))


def _refuse_single_underscores(name: str, path: str) -> None:
    """Raise SettingsError for names such as TIDEMILL_LEARNER_STEPS, with the intended variable."""
    known = list(_paths(RunConfig, ""))
    meant = next((setting for setting in known if setting.replace(".", "_") == path.replace(".", "_")), None)
    if meant is not None and path not in known:
        variable = ENVIRONMENT_PREFIX + meant.replace(".", "__").upper()
        cure = f"did you mean {variable}?"
        raise SettingsError(f"environment {name}: want two underscores where a dot is in {meant}, got one; {cure}")


def _paths(section: type, prefix: str) -> Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        yield f"{prefix}{name}"
        if (inner := section_of(kind)) is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def _derive(settings: dict[str, Setting], files: Sequence[Path]) -> None:
    """Add the values that follow from other settings, unless they are given."""

    def given(path: str) -> Any:
        return settings[path].value if path in settings else None

    def follow(path: str, value: object, why: str) -> None:
        if given(path) in (None, ""):
            settings[path] = Setting(value, f"derived: {why}")

    follow("run", NOT_IN_NAME.sub("-", "-".join(file.stem for file in files))[:64] or "run", "name of the file")
    follow("directory", f"runs/{given('run')}", "runs/<run>")
    if given("learner.colocated") is True:
        follow("weights.overlap", False, "learner.colocated")
    rollouts = given("rollouts") or {}
    if given("actor.teachers") or any(path.startswith("actor.teachers.") for path in settings):
        follow("learner.algorithm.distill.teacher", "engine", "actor.teachers")
    by_rows = given("data.rollout_key") or given("eval.every")
    if not by_rows and _all_recorded(rollouts, given("data.rollout"), given("data.sources")):
        for path in ("up.engines", "up.actors"):
            follow(path, 0, "all samples are recorded responses")
    prepares = given("prepare") is not None or any(path.startswith("prepare.") for path in settings)
    if prepares:
        follow("model.path", f"{given('directory')}/prepared/model", "made by prepare")
        follow("data.path", f"{given('directory')}/prepared/prompts.jsonl", "made by prepare")
    for path in ("data.seed", "learner.seed", "prepare.seed"):
        if given("seed") is not None and (prepares or not path.startswith("prepare")):
            follow(path, given("seed"), "seed")


def _all_recorded(rollouts: object, rollout: object, sources: object) -> bool:
    """Return whether all data has rollouts of recorded responses. Wrong values are refused later."""
    if not isinstance(rollouts, Mapping):
        return False
    recorded = {name for name, entry in rollouts.items() if isinstance(entry, Mapping) and entry.get("use") == DATASET}
    entries = sources.values() if isinstance(sources, Mapping) else ()
    source_maps = [source for source in entries if isinstance(source, Mapping)]
    named = [rollout if source.get("rollout") is None else source["rollout"] for source in source_maps] or [rollout]
    by_column = any(source.get("rollout_key") for source in source_maps)
    return not by_column and all(isinstance(name, str) and name in recorded for name in named)


# ---- the tree


@functools.cache
def _sections() -> Mapping[str, bool]:
    """Return the path of every section, and whether it may be left out by ``null``."""
    kinds: dict[str, Any] = {"": RunConfig}
    hints_of = functools.cache(typing.get_type_hints)
    for path in _paths(RunConfig, ""):
        above, _, name = path.rpartition(".")
        kinds[path] = hints_of(section_of(kinds[above]))[name]  # type: ignore[arg-type]
    return {path: type(None) in typing.get_args(kind) for path, kind in kinds.items() if section_of(kind) is not None}


def _leaves(path: str, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield the settings in a value: those in the map of a section, or the value itself."""
    if path in _sections() and isinstance(setting.value, Mapping) and (setting.value or not path):
        for name, value in setting.value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), dataclasses.replace(setting, value=value))
    else:
        yield path, setting


def _put(settings: dict[str, Setting], later: Iterable[tuple[str, Setting]]) -> None:
    """Merge ``later`` over ``settings``: a value replaces all settings below it, a map only those it names."""
    for whole, value in later:
        for path, setting in _leaves(whole, value):
            if not (path in _sections() and setting.value == {}):
                for known in [known for known in settings if known.startswith(f"{path}.")]:
                    del settings[known]
            settings[path] = setting


def _nested(settings: Mapping[str, Setting]) -> JsonObject:
    """Return the settings as one map of maps. Raises SettingsError for a setting below a single value."""
    result: JsonObject = {}
    for path, setting in settings.items():
        *parents, last = path.split(".")
        place = result
        for depth, name in enumerate(parents):
            place[name] = {} if place.get(name) is None else place[name]
            place = place[name]
            if not isinstance(place, dict):
                above = ".".join(parents[: depth + 1])
                raise SettingsError(f"{setting.origin}: {path}: {above} is a single value, it has no {last!r}")
        empty = path in _sections() and (setting.value == {} or (setting.value is None and not _sections()[path]))
        place[last] = place.get(last) or {} if empty else copy.deepcopy(setting.value)
    return result


def _build(settings: Mapping[str, Setting]) -> RunConfig:
    """Return the configuration. Raises SettingsError with every wrong setting, its origin first."""
    values = _nested(settings)
    hub_names.locate(values)
    while True:
        try:
            return typing.cast(RunConfig, read(RunConfig, values))
        except SectionRefused as refused:
            numbers = [problem.place for problem in refused.problems if _is_number(values, problem.place)]
            if not numbers:
                _refuse(refused.problems, settings)
            for place in numbers:  # a number where text is wanted is the text that stands in the file, such as 007
                *above, last = place
                _at(values, above)[last] = _text(_at(values, place), dotted(place), settings)


def _refuse_derived(settings: Mapping[str, Setting], config: RunConfig) -> None:
    """Raise SettingsError for a field that follows from a setting, unless it has its value, as in the file of a run."""
    for path, source in derived(RunConfig).items():
        value = _as_written(functools.reduce(getattr, path.split("."), config))
        if path in settings and settings[path].value != value:
            raise SettingsError(f"{settings[path].origin}: {path}: follows from {source}; leave it out")


def _refuse(problems: Sequence[Problem], settings: Mapping[str, Setting]) -> None:
    texts = []
    for problem in problems:
        origin, path, text = _origin(problem.paths, settings), problem.paths[0], problem.text
        if problem.unknown and path in REMOVED:
            text = f"{path}: this setting was removed: {REMOVED[path]}; delete it"
        elif problem.unknown and path in RENAMED:
            text = f"{path}: this setting has another name now; want {RENAMED[path]}"
        texts.append(f"{origin}: {text}" if origin else text)
    if texts:
        raise SettingsError("\n".join(texts))


def _origin(names: Sequence[str], settings: Mapping[str, Setting]) -> str:
    """Return the origin of the first setting of ``names`` that was set, itself or in part; empty for defaults."""
    for name in names:
        for known, setting in settings.items():
            if _within(name, known):
                return _line(setting, known, name)
    starts = tuple(f"{name}." for name in names)
    below = {setting.origin for known, setting in settings.items() if known.startswith(starts)}
    return below.pop() if len(below) == 1 else ""


def _line(setting: Setting, lines: str, name: str) -> str:
    """Return the origin of a part of a setting: in a file, the line of the part."""
    whole, part = setting.written.get(lines), setting.written.get(name)
    if whole is None or part is None or not setting.origin.endswith(f":{whole.line}"):
        return setting.origin
    return f"{setting.origin.removesuffix(str(whole.line))}{part.line}"


def _within(path: str, known: str) -> bool:
    return path == known or path.startswith((f"{known}.", f"{known}["))


def _at(values: Any, place: Iterable[int | str]) -> Any:
    return functools.reduce(lambda inner, key: inner[key], place, values)


def _is_number(values: JsonObject, place: Sequence[int | str]) -> bool:
    return bool(place) and type(_at(values, place)) in (int, float)


def _text(number: float, path: str, settings: Mapping[str, Setting]) -> str:
    """Return a number as its characters stand in the file, if it comes from one."""
    written = (setting.written.get(path) for known, setting in settings.items() if _within(path, known))
    return next((part.scalar for part in written if part is not None and part.scalar is not None), str(number))


# ---- print


def render(loaded: Loaded) -> str:
    """Return the whole configuration as YAML, each line with its origin, followed by the derived numbers."""
    config, learner = loaded.config, loaded.config.learner
    open_tasks = (config.staleness.max_lag + 1) * learner.groups_per_step
    product = f"{learner.groups_per_step} x {learner.group_size} = {config.samples_per_step}"
    lines = [
        *_lines(config, "", 0, loaded.origins),
        "",
        f"# samples per step = groups_per_step x group_size = {product}",
        f"# tasks handed out at most = (max_lag + 1) x groups_per_step = {open_tasks}",
        f"# samples of the run = {config.samples_per_step * learner.steps}",
        f"# stream SAMPLES may hold {config.bus.samples_max_bytes} bytes (`tidemill check` counts what it must hold)",
    ]
    return "\n".join(lines) + "\n"


def _lines(section: Any, prefix: str, depth: int, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * depth
    for f in dataclasses.fields(section):
        value, path = getattr(section, f.name), f"{prefix}{f.name}"
        if path in derived(RunConfig):
            continue
        if dataclasses.is_dataclass(value):
            yield f"{indent}{f.name}:"
            yield from _lines(value, f"{path}.", depth + 1, origins)
            continue
        text = yaml_file.dump(_as_written(value), flow=True)
        came = [origin for known, origin in origins.items() if f"{known}.".startswith(f"{path}.")]
        yield f"{indent + f.name + ': ' + text:<48} # {', '.join(dict.fromkeys(came)) or 'default'}"
