"""The architectures that an installation of SGLang has models for, asked before a server is started.

SGLang runs any other one by transformers, with weights under names that no push has been tried with, and says so in a
line of its log alone. A model whose module cannot be imported there (missing kernels) is not found here.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidemill.actors.config import SglangConfig
from tidemill.actors.errors import EngineFailed, UnsupportedModel
from tidemill.bus.wire.json_object import JsonMapping

PROGRAM = Path(__file__).parent / "inside" / "tidemill_registered_models.py"
LIMIT_S = 60.0
"""Time limit of the program, which reads source files of a few megabytes, in seconds."""
MORE_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""Variable of SGLang: a package with further models."""
CURE = "use engine.kind: builtin (engine.runner: transformers), or a release of SGLang that has it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Models of an installation."""

    release: str
    architectures: frozenset[str]

    def refusal(self, values: JsonMapping) -> tuple[str, object] | None:
        """Return what is wanted in ``architectures`` of a config.json, and what is there, unless a model is served."""
        architectures = values.get("architectures") or []
        if isinstance(architectures, list) and self.architectures.intersection(map(str, architectures)):
            return None
        want = f"one of the {len(self.architectures)} that SGLang {self.release} has a model for"
        return want, architectures[0] if isinstance(architectures, list) and architectures else "none"


def read_registry(settings: SglangConfig, program: str = "") -> Registry | None:
    """Return the models of the installation at ``engine.sglang.python``; None if a package has more of them.
    ``program``: the interpreter's path. Raises EngineFailed for an interpreter without SGLang.
    """
    environment: Mapping[str, str] = {**os.environ, "PYTHONSAFEPATH": "1", **settings.environment}
    if environment.get(MORE_MODELS):
        return None
    command = [program or settings.python, str(PROGRAM)]
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


def refuse_unserved(model_dir: Path, values: JsonMapping, settings: SglangConfig) -> None:
    """Raise UnsupportedModel for a model that the installation has none for; ``values``: of its config.json."""
    registry = read_registry(settings)
    if registry is not None and (refused := registry.refusal(values)):
        want, got = refused
        raise UnsupportedModel(f"{model_dir / 'config.json'}: architectures", f"want {want}, got {got}; {CURE}")
