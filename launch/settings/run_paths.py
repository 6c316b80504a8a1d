"""The configurations and data inside the package, and relative paths in the configuration of a run (``config.yaml`` in
its directory), read from another working directory than the run's own.

The run's working directory follows from the file: ``/home/me/runs/digits/config.yaml`` with ``directory: runs/digits``
has ``/home/me``. It is not recorded, so that a project can be moved. With an absolute ``directory`` it does not follow,
and relative paths are recorded as absolute ones.
"""

import copy
import difflib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.data import SLICE

# Settings that may be paths; a value that is none (`python:module:function`, a URL) does not exist as a file, and stays
# as it is.
PATHS = (
    *("directory", "model.path", "model.megatron_checkpoint", "data.path", "data.sources.*.path", "eval.sets.*.path"),
    *("learner.from_checkpoint", "learner.critic.path", "learner.lora.adapter", "learner.algorithm.kl.reference"),
    "learner.checkpoint.store",
    *("bus.auth_dir", "bus.tls_cert", "bus.tls_key", "bus.tls_ca", "actor.teachers.*.model", "engine.sglang.log"),
    *("engine.sglang.python", "rollouts.*.python"),
    *("debug.save_rollout", "debug.load_rollout", "debug.save_train"),
    *("debug.dump_modules.path", "debug.dump_modules.prompts"),
)


_SHIPPED = "launch/data/"  # Paths of data in a configuration of the package, from the root of its repository


def set_base(values: JsonObject, file: Path) -> None:
    """Make relative paths in a run's configuration (of ``file``) absolute, outside its working directory; and those of
    shipped data in a configuration of the package, outside its repository.
    """
    if file.resolve().parent == CONFIGS and Path("launch").resolve() != PACKAGE:
        for holder, name, _ in list(texts(values, "")):
            if (text := str(holder[name])).startswith(_SHIPPED):
                holder[name] = str(DATA / text.removeprefix(_SHIPPED))
    directory, absolute = Path(str(values.get("directory") or "")), Path(os.path.abspath(file)).parent
    parts = directory.parts
    if not parts or directory.is_absolute() or absolute.parts[-len(parts) :] != parts:
        return
    base = Path(*absolute.parts[: -len(parts)])
    if base != Path.cwd():
        _make_absolute(values, base)


def recorded(values: JsonObject) -> JsonObject:
    """Return a configuration for the file in its run's directory, readable from any working directory."""
    result = copy.deepcopy(values)
    if Path(str(values["directory"])).is_absolute():
        _make_absolute(result, Path.cwd())
    return result


def _make_absolute(values: JsonObject, base: Path) -> None:
    for holder, name, setting in list(texts(values, "")):
        text = str(holder[name])
        sliced = SLICE.fullmatch(text)
        path = Path(sliced["path"] if sliced else text)
        is_path = any(fnmatchcase(setting, pattern) for pattern in PATHS)
        if is_path and not path.is_absolute() and (base / path).exists():
            holder[name] = str(base / text)


def texts(values: JsonObject, above: str) -> Iterator[tuple[JsonObject, str, str]]:
    """Yield the map that holds each text, its name there, and the path of the setting."""
    for name, value in values.items():
        setting = f"{above}.{name}" if above else str(name)
        if isinstance(value, dict):
            yield from texts(value, setting)
        elif isinstance(value, str) and value:
            yield values, name, setting


PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS, DATA = PACKAGE / "configs", PACKAGE / "data"
REAL_MODEL = "runs/models/SmolLM2-135M-Instruct"  # Model of several shipped configurations, which have no weights


def names() -> list[str]:
    """Return the names of the configurations."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def config_file(text: str) -> Path:
    """Return the file of a configuration: the one at this path, else the one of this name in the package.

    A text that is neither stays a path, which ``yaml_file.read`` refuses with the names.
    """
    path = Path(text)
    is_name = text in names() and (path.is_dir() or not path.exists())
    return CONFIGS / f"{text}.yaml" if is_name else path


def cure(text: str) -> str:
    """Return what to write in place of a file of settings that does not exist."""
    near = difflib.get_close_matches(Path(text).stem, names(), n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"want a YAML file or one of {', '.join(names())}, got no such file{meant}"
