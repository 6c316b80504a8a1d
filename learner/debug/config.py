"""Settings of the debugging modes, and the small files that they read: a request for a profile, prompts. No torch."""

import json
import string
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tidemill.bus.section import NotNegative, section
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.task_settings import RUN_NAME
from tidemill.learner.errors import DebugFileRefused

DIRECTORY = "debug"
"""Directory of dumps and traces, in the run's."""
_FILE = "profile.request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Steps to profile."""

    steps: int
    memory: bool = False
    """Record allocations as well."""
    rank: int = 0
    """Rank that profiles its steps."""

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 1 <= self.steps <= 100:
            raise ValueError(f"steps: want 1..100, got {self.steps!r}")
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"rank: want 0 or more, got {self.rank!r}")

    def refuse_unknown_rank(self, num_ranks: int) -> None:
        """Raise ValueError if a learner of ``num_ranks`` does not have the rank."""
        if self.rank >= num_ranks:
            raise ValueError(
                f"rank: want 0..{num_ranks - 1}, one of the {num_ranks} ranks of this run's learner, got {self.rank}"
            )


def request_file(root: Path) -> Path:
    """Return the file of a run's request."""
    return root / DIRECTORY / _FILE


def trace_name(rank: int, first: object, last: object) -> str:
    """Return the name of the file with the trace of these steps."""
    return f"profile_rank{rank}_{first}_{last}.json.gz"


def write_request(root: Path, request: ProfileRequest) -> None:
    """Write the request; it replaces one that rank 0 has not read."""
    write_whole(request_file(root), json.dumps(asdict(request)))


def take_request(root: Path, num_ranks: int) -> ProfileRequest | None:
    """Return the request and remove it; None without one.

    Raises ValueError for a file with another content, or for a rank that is not one of ``num_ranks``; the file is
    removed as well.
    """
    file = request_file(root)
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    file.unlink(missing_ok=True)
    try:
        request = ProfileRequest(**json.loads(text))
        request.refuse_unknown_rank(num_ranks)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: want a request of tidemill debug profile, got {text[:60]!r} ({error})") from None
    return request


@section
@dataclass(frozen=True, kw_only=True)
class DumpModulesConfig:
    """Dump of the learner's activations for fixed prompts (docs/debugging.md)."""

    step: NotNegative = 0
    """The dump is made with the weights that this step starts from (1 = those of the model directory); 0 = no dump."""
    prompts: str = ""
    """File of prompts: one JSON list of token ids per line, or a map with ``tokens``."""
    names: str = "*"
    """Pattern of the modules to dump, such as ``layers.0.*``; * = all."""
    path: str = ""
    """File to write; empty = ``debug/modules.safetensors`` in the run's directory."""

    def __post_init__(self) -> None:
        if self.step and not self.prompts:
            raise ValueError(f"prompts: want a file of prompts with step: {self.step}, got none")


@section
@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Debugging modes: generation without a learner, training on recorded batches, and dumps (docs/debugging.md)."""

    rollout_only: bool = False
    """Run engines and actors for ``learner.steps`` steps without training, with the weights of ``model.path``."""
    save_rollout: str = ""
    """File for the samples of each step, such as ``dump/rollout_{step}.msgpack``; empty = none."""
    load_rollout: str = ""
    """Files of ``save_rollout`` to train on, without engines; one without ``{step}`` is for all. Empty = none."""
    shadow_of: str = ""
    """Run on the same bus whose steps are trained on with the settings of this one, which pushes to no engine
    (docs/shadow.md); empty = none.
    """
    save_train: str = ""
    """File for the training data of each step and rank, with ``{step}`` and ``{rank}`` in its name; empty = none."""
    report: bool = True
    """Log a report on the first two steps: coherence, equality of log-probs, gradient norm, memory."""
    dump_modules: DumpModulesConfig = field(default_factory=DumpModulesConfig)
    """Dump of the learner's activations for fixed prompts, to compare with an engine's."""

    def __post_init__(self) -> None:
        refuse_places("save_rollout", self.save_rollout, required=("step",))
        refuse_places("load_rollout", self.load_rollout, allowed=("step",))
        refuse_places("save_train", self.save_train, required=("step", "rank"))
        refuse_places("dump_modules.path", self.dump_modules.path)
        if self.rollout_only and self.load_rollout:
            raise ValueError("rollout_only: want either this or load_rollout, got both; remove one of them")
        for name in ("save_train", "dump_modules"):
            if self.rollout_only and (self.save_train if name == "save_train" else self.dump_modules.step):
                raise ValueError(f"{name}: want none with rollout_only, which trains nothing; remove one of them")
        if self.shadow_of and not RUN_NAME.fullmatch(self.shadow_of):
            raise ValueError(f"shadow_of: want the name of a run, got {self.shadow_of!r}")
        if self.shadow_of and (self.rollout_only or self.load_rollout):
            raise ValueError("shadow_of: want this, rollout_only or load_rollout, got two of them; remove one")
        if self.load_rollout and self.save_rollout == self.load_rollout:
            raise ValueError(
                "save_rollout: want other files than load_rollout, which would be overwritten while they are read"
            )

    @property
    def trains_only(self) -> bool:
        """True if batches come from files or another run, and nothing is generated."""
        return bool(self.load_rollout or self.shadow_of)


def refuse_places(name: str, template: str, *, required: Collection[str] = (), allowed: Collection[str] = ()) -> None:
    """Raise ValueError for a file name with unknown placeholders, or without required ones. "" is accepted."""
    if not template:
        return
    placeholders = [*required, *(place for place in allowed if place not in required)]
    want = " and ".join(f"{{{place}}}" for place in placeholders) or "no placeholder"
    try:
        places = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
        template.format(**dict.fromkeys(placeholders, 0))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise ValueError(f"{name}: want a file name with {want}, got {template!r}; write other braces twice") from None
    if missing := [place for place in required if place not in places]:
        raise ValueError(f"{name}: want {want} in the file name, got {template!r}: {{{missing[0]}}} is missing")


LEAST_TOKENS = 2
"""Tokens of a prompt: the log-prob of the second one is the first that there is."""


def read_prompts(path: Path) -> list[list[int]]:
    """Return the token ids of each line: a JSON list, or a map with ``tokens``. Raises DebugFileRefused."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DebugFileRefused(
            str(path), "a text file with a JSON list of token ids in each line", str(error)
        ) from None
    prompts = [_tokens(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DebugFileRefused(str(path), "at least one prompt", "none")
    return prompts


def _tokens(line: str, where: str) -> list[int]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    tokens = value.get("tokens") if isinstance(value, dict) else value
    if (
        not isinstance(tokens, list)
        or len(tokens) < LEAST_TOKENS
        or any(type(token) is not int or token < 0 for token in tokens)
    ):
        raise DebugFileRefused(
            where, f"a JSON list of at least {LEAST_TOKENS} token ids, or a map with tokens", repr(line[:60])
        )
    return list(tokens)
