"""Settings of the debugging modes. Loads no torch."""

import string
from collections.abc import Collection
from dataclasses import dataclass, field

from tidemill.bus.section import NotNegative, section


@section
@dataclass(frozen=True, kw_only=True)
class DumpModulesConfig:
    """Dump of the learner's activations for fixed prompts (docs/debugging.md)."""

    step: NotNegative = 0
    """The dump is made with the weights that this step starts from (1 = the weights of the model directory); 0 = no dump."""
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
    """Run engines and actors for ``learner.steps`` steps without training: the weights stay as they are in ``model.path``."""
    train_only: bool = False
    """Train without engines and actors, on the batches of ``load_rollout``, which implies it."""
    save_rollout: str = ""
    """File for the samples of each step, with ``{step}`` in its name, such as ``dump/rollout_{step}.msgpack``; empty = none."""
    load_rollout: str = ""
    """Files of ``save_rollout`` to train on; a name without ``{step}`` is the batch of every step. Empty = none."""
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
        if self.rollout_only and (self.train_only or self.load_rollout):
            other = "load_rollout" if self.load_rollout else "train_only"
            raise ValueError(f"rollout_only: want either this or {other}, got both; remove one of them")
        if self.train_only and not self.load_rollout:
            raise ValueError(
                "train_only: want load_rollout with the files of recorded batches, got none; set it, or repeat the steps of a run on this "
                "machine with: tidemill replay --train"
            )
        for name in ("save_train", "dump_modules"):
            if self.rollout_only and (self.save_train if name == "save_train" else self.dump_modules.step):
                raise ValueError(f"{name}: want none with rollout_only, which trains nothing; remove one of them")
        if self.load_rollout and self.save_rollout == self.load_rollout:
            raise ValueError("save_rollout: want other files than load_rollout, which would be overwritten while they are read")

    @property
    def trains_only(self) -> bool:
        """True if batches come from files, and nothing is generated."""
        return self.train_only or bool(self.load_rollout)


def refuse_places(name: str, template: str, *, required: Collection[str] = (), allowed: Collection[str] = ()) -> None:
    """Raise ValueError for a file name with unknown placeholders, or without the required ones. An empty one is accepted."""
    if not template:
        return
    known = [*required, *(place for place in allowed if place not in required)]
    want = " and ".join(f"{{{place}}}" for place in known) or "no placeholder"
    try:
        places = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
        template.format(**dict.fromkeys(known, 0))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        raise ValueError(f"{name}: want a file name with {want}, got {template!r}; write other braces twice") from None
    if missing := [place for place in required if place not in places]:
        raise ValueError(f"{name}: want {want} in the file name, got {template!r}: {{{missing[0]}}} is missing")
