"""The architectures that an installation of SGLang has models for, asked before a server is started.

SGLang runs any other one by transformers, with weights under names that no push has been tried with, and says so in a
line of its log alone. A model whose module cannot be imported there (missing kernels) is not found here. SGLang's code
of some families ignores the window of the configuration: behind it, engine and learner would differ.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidemill.actors.config import SglangConfig
from tidemill.actors.errors import EngineFailed, UnsupportedModel
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import language_values

PROGRAM = Path(__file__).parent / "inside" / "tidemill_registered_models.py"
LIMIT_S = 60.0
"""Time limit of the program, which reads source files of a few megabytes, in seconds."""
MORE_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""Variable of SGLang: a package with further models."""
LIMITS = (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))
"""Kinds of layers that attend to a part of the context, and the key of config.json with its number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A value of a config.json with which SGLang would compute another model."""

    key: str
    want: str
    got: object
    cure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Models of an installation."""

    release: str
    architectures: frozenset[str]
    windowed: frozenset[str]
    """Those that were asked for, and whose code gives a window to layers of attention."""

    def refusal(self, values: JsonMapping, context: int) -> Refusal | None:
        """Return why a config.json is not served with sequences of up to ``context`` tokens; None: it is."""
        builtin, served = "use engine.kind: builtin (engine.runner: transformers)", self.architectures
        if not served.intersection(architectures := architectures_of(values)):
            return Refusal(
                key="architectures",
                want=f"one of the {len(served)} that SGLang {self.release} has a model for",
                got=(*architectures, "none")[0],
                cure=f"{builtin}, or a release of SGLang that has it",
            )
        for key, window in windows_of(values).items():
            if window < context and not self.windowed.intersection(architectures):
                code = f"the code of SGLang {self.release} for {architectures[0]}"
                return Refusal(
                    key=key,
                    want=f"at least the longest sequence ({context}), because {code} attends to all tokens",
                    got=window,
                    cure=f"{builtin}, or engine.max_context: {window}",
                )
        return None


def architectures_of(values: JsonMapping) -> list[str]:
    """Return the names in ``architectures`` of a config.json."""
    names = values.get("architectures")
    return [name for name in map(str, names) if name.isidentifier()] if isinstance(names, list) else []


def windows_of(values: JsonMapping) -> dict[str, int]:
    """Return the number of tokens that a layer attends to at most, by its key in a config.json; none where all layers
    attend to every token.
    """
    values = language_values(values)
    if values.get("use_sliding_window") is False:
        return {}
    kinds = values.get("layer_types")
    windows = {key: values.get(key) for kind, key in LIMITS if not isinstance(kinds, list) or kind in kinds}
    return {key: window for key, window in windows.items() if isinstance(window, int)}


def read_registry(settings: SglangConfig, architectures: Sequence[str] = (), program: str = "") -> Registry | None:
    """Return the models of the installation at ``engine.sglang.python``; None if a package has more of them.
    ``architectures``: whose windows to look for. ``program``: the interpreter's path. Raises EngineFailed for an
    interpreter without SGLang.
    """
    environment: Mapping[str, str] = {**os.environ, "PYTHONSAFEPATH": "1", **settings.environment}
    if environment.get(MORE_MODELS):
        return None
    command = [program or settings.python, str(PROGRAM), *architectures]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineFailed(settings.python, f"want the models of its SGLang: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineFailed(settings.python, f"engine.sglang.python: want an interpreter with SGLang: {last}")
    try:
        return msgspec.json.decode(done.stdout, type=Registry)
    except msgspec.DecodeError as error:
        raise EngineFailed(settings.python, f"engine.sglang.python: want an interpreter: {error}") from error


def find_refusal(values: JsonMapping, settings: SglangConfig, context: int, program: str = "") -> Refusal | None:
    """Return why the installation does not serve a model; ``values``: of its config.json. Raises EngineFailed."""
    registry = read_registry(settings, architectures_of(values), program)
    return registry.refusal(values, context) if registry is not None else None


def refuse_unserved(file: Path, values: JsonMapping, settings: SglangConfig, context: int) -> None:
    """Raise UnsupportedModel for a model that the installation does not serve; ``values``: of its config.json."""
    if refusal := find_refusal(values, settings, context):
        want = f"want {refusal.want}, got {refusal.got}; {refusal.cure}"
        raise UnsupportedModel(f"{file}: {refusal.key}", want)
