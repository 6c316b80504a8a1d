"""The architectures that an installation of SGLang has models for, asked before a server is started.

SGLang runs any other one by transformers, with weights under names that no push has been tried with, and says so in a
line of its log alone. A model whose module cannot be imported there (missing kernels) is not found here. SGLang's code
of some families ignores the window of the configuration, and some attention backends ignore a window that the code has:
behind it, engine and learner would differ.
"""

import logging
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

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).parent / "inside" / "tidemill_registered_models.py"
LIMIT_S = 60.0
"""Time limit of the program, which reads source files of a few megabytes, in seconds."""
MORE_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""Variable of SGLang: a package with further models."""
LIMITS = (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))
"""Kinds of layers that attend to a part of the context, and the key of config.json with its number of tokens."""
_FAMILIES_BY_WINDOW = {
    64: "modernbert-decoder",
    128: "gpt_oss granite_swa granitemoe_swa",
    129: "mimo_v2_flash",
    256: "lfm3",
    512: "beam dots3_note_text gemma3n_text gemma4_text lara_mini",
    513: "flint kolibri1",
    1024: "afmoe dory gemma4_unified_text",
    3000: "moshi",
    4096: "cohere2 cohere2_moe dots1 exaone4 exaone_moe gemma2 gemma3_text ministral mistral olmo3 vaultgemma"
    " qwen2 qwen2_moe qwen3 qwen3_moe",
    8192: "cwm llama4_text",
}
DEFAULT_WINDOWS = {family: window for window, families in _FAMILIES_BY_WINDOW.items() for family in families.split()}
"""Window that transformers takes where a config.json has no such key; a test compares it with transformers' classes."""
SWITCHED_WINDOWS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Families without windows unless ``use_sliding_window`` is true."""
FIRST_WINDOW_LAYERS = {"dots1": 62, "qwen2": 28, "qwen3": 28}
"""Families whose layers from ``max_window_layers`` on have the window, where no list has the kinds of layers, and the
default of that key.
"""
WITHOUT_WINDOWS = ("cohere_compass_text", "laguna", "mellum")
"""Families without windows where no list has the kinds of layers."""
WINDOWS_EVERYWHERE = ("mistral", "mixtral", "moshi", "phi3", "phimoe", "starcoder2")
"""Families that read no list of the kinds of layers: all have the window."""


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
    windowed: Mapping[str, frozenset[str] | None]
    """Those that were asked for, and whose code gives a window to layers of attention, and the attention backends in
    which it holds; None where the release has no list of backends.
    """

    def refusal(self, values: JsonMapping, context: int, backends: Sequence[str] = ()) -> Refusal | None:
        """Return why a config.json is not served with sequences of up to ``context`` tokens; None: it is.
        ``backends``: the attention backends, if they are known.
        """
        builtin, served = "use engine.kind: builtin (engine.runner: transformers)", self.architectures
        if not served.intersection(architectures := architectures_of(values)):
            return Refusal(
                key="architectures",
                want=f"one of the {len(served)} that SGLang {self.release} has a model for",
                got=(*architectures, "none")[0],
                cure=f"{builtin}, or a release of SGLang that has it",
            )
        for key, window in windows_of(values).items():
            if window >= context:
                continue
            limit = f"at least the longest sequence ({context})"
            in_code = next((name for name in architectures if name in self.windowed), None)
            holding = frozenset() if in_code is None else self.windowed[in_code]
            if holding is not None and not holding:
                release = f"SGLang {self.release}"
                code = f"the code of {release} for" if in_code is None else f"every attention backend of {release} with"
                code = f"{code} {architectures[0]}"
                want = f"{limit}, because {code} attends to all tokens"
                return Refusal(key=key, want=want, got=window, cure=f"{builtin}, or engine.max_context: {window}")
            if holding is not None and (ignoring := [name for name in backends if name not in holding]):
                code = f"SGLang {self.release} attends to all tokens of {architectures[0]} with {ignoring[0]}"
                want = f"{limit}, or another attention backend ({', '.join(sorted(holding))}), because {code}"
                cure = f"engine.sglang.arguments.attention_backend, {builtin}, or engine.max_context: {window}"
                return Refusal(key=key, want=want, got=window, cure=cure)
        return None


def architectures_of(values: JsonMapping) -> list[str]:
    """Return the names in ``architectures`` of a config.json."""
    names = values.get("architectures")
    return [name for name in map(str, names) if name.isidentifier()] if isinstance(names, list) else []


def windows_of(values: JsonMapping) -> dict[str, int]:
    """Return the number of tokens that a layer attends to at most, by its key in a config.json; none where all layers
    attend to every token. A key that is missing has the value that transformers gives it.
    """
    of_text = language_values(values)
    family = str(of_text.get("model_type") or f"{values.get('model_type')}_text")
    family = next((name for name in (family, f"{family}_text") if name in DEFAULT_WINDOWS), family)
    is_always = family not in SWITCHED_WINDOWS and (family in DEFAULT_WINDOWS or family in WINDOWS_EVERYWHERE)
    if not is_always and not of_text.get("use_sliding_window", family not in SWITCHED_WINDOWS):
        return {}
    kinds = of_text.get("layer_types")
    if not isinstance(kinds, list) or family in WINDOWS_EVERYWHERE:
        kinds = None if _has_windows(of_text, family) else []
    present = [key for kind, key in LIMITS if kinds is None or kind in kinds]
    default_key = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    defaults = {default_key: DEFAULT_WINDOWS.get(family)}
    windows = {key: of_text.get(key, defaults.get(key)) for key in present}
    return {key: window for key, window in windows.items() if type(window) is int and window}


def _has_windows(values: JsonMapping, family: str) -> bool:
    """Return whether a family has layers with windows where no list has their kinds."""
    layers, first = values.get("num_hidden_layers"), values.get("max_window_layers", FIRST_WINDOW_LAYERS.get(family))
    is_behind = family in FIRST_WINDOW_LAYERS and isinstance(layers, int) and isinstance(first, int) and layers <= first
    return not is_behind and family not in WITHOUT_WINDOWS


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


def backends_of(arguments: JsonMapping) -> list[str]:
    """Return the attention backends that a server's arguments name, with hyphens or underscores."""
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    one = named.get("attention_backend")
    both = [named.get(f"{phase}_attention_backend") or one for phase in ("prefill", "decode")]
    return list(dict.fromkeys(str(name) for name in both if name))


def find_refusal(values: JsonMapping, settings: SglangConfig, context: int, program: str = "") -> Refusal | None:
    """Return why the installation does not serve a model; ``values``: of its config.json. Raises EngineFailed."""
    registry = read_registry(settings, architectures_of(values), program)
    return None if registry is None else registry.refusal(values, context, backends_of(settings.arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCheck:
    """What engine and server compute of a model's windows: before a server is started, and of one that runs."""

    file: Path
    """config.json of the model."""
    values: JsonMapping
    """Its content."""
    context: int
    """Tokens of the longest sequence."""
    registry: Registry | None
    """Of the installation at ``engine.sglang.python``; None = it has further models, or is not here."""

    @classmethod
    def before(cls, file: Path, values: JsonMapping, settings: SglangConfig, context: int) -> "ServerCheck":
        """Read the installation; refuse a model that it does not serve, unless the server is another's. Raises
        UnsupportedModel, EngineFailed.
        """
        try:
            registry = read_registry(settings, architectures_of(values))
        except EngineFailed:
            if not settings.url:
                raise
            registry = None
        check = cls(file=file, values=values, context=context, registry=registry)
        if registry is not None and not settings.url:
            check._refuse(registry, context, backends_of(settings.arguments))
        return check

    def of_server(self, url: str, info: JsonMapping, model: JsonMapping | None) -> None:
        """Refuse a server that computes another model. ``info``: its /server_info; ``model``: its /model_info, if it
        was not started here. What cannot be known of its code is a warning. Raises UnsupportedModel.
        """
        own = info.get("context_length")
        context, backends = min(self.context, own if isinstance(own, int) else self.context), backends_of(info)
        if model is None:
            if self.registry is not None:
                self._refuse(self.registry, context, backends)
            return
        served, ours = architectures_of(model), architectures_of(self.values)
        if served and not set(served) & set(ours):
            log.warning("sglang serves another architecture url=%s served=%s config.json=%s", url, served, ours)
        if self.registry is not None and self.registry.release == info.get("version"):
            self._refuse(self.registry, context, backends)
        elif short := {key: window for key, window in windows_of(self.values).items() if window < context}:
            log.warning(
                "sglang url=%s version=%s attention_backend=%s: its code is not on this machine, so it is not known"
                " whether its attention has the window of config.json (%s); behind it log-probs would differ. Set"
                " engine.sglang.python to an environment with this release, which is read, or engine.max_context",
                *(url, info.get("version"), ",".join(backends), short),
            )

    def _refuse(self, registry: Registry, context: int, backends: Sequence[str]) -> None:
        if refusal := registry.refusal(self.values, context, backends):
            want = f"want {refusal.want}, got {refusal.got}; {refusal.cure}"
            raise UnsupportedModel(f"{self.file}: {refusal.key}", want)
