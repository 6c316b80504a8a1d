"""The training data of one step and rank in a file, and its reader. Knows numpy, no torch.

    file = safetensors; its metadata has one key, ``tidemill``, with JSON: {kind, rollout_id, step, rank, role,
           parallel_info, routing_layers, metrics, steps}; rollout_id and step are the same number
    tensors: steps.<i>.<field>, one flat array for all sequences of the optimizer step, cut by response_lengths or
           total_lengths

``kind`` is ``train``, or ``record`` for the forward pass before the first optimizer step, which has ``log_probs``,
``entropy`` and the routing in place of the rest; a critic's (role ``critic``) has ``values``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.errors import DebugFileRefused

Array = NDArray[Any]
METADATA, TRAIN, RECORD, MODULES = "tidemill", "train", "record", "modules"
ROUTING = ("routing_decisions", "routing_weights", "routing_scores")
"""Fields by token and layer with experts: its experts, their weights, and its affinities to all experts."""
BY_TOTAL = ("unconcat_tokens", *ROUTING)
"""Fields with values for each token of a sequence."""
BY_RESPONSE = (
    *(
        "loss_masks",
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_probs",
        "teacher_log_probs",
        "advantages",
        "returns",
    ),
    *("values", "current_values", "current_log_probs", "current_entropy", "policy_importance_ratio"),
    *("tis_importance_weights", "log_probs", "entropy"),
)
"""Fields with a value for each token of a response."""
BY_SEQUENCE = ("sequence_ids", "sample_ids", "response_lengths", "total_lengths")
"""Fields with one number for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedStep:
    """One optimizer step on this rank's sequences."""

    step_id: int
    loss_dict: Mapping[str, float]
    """Metrics of the optimizer step, over the tokens of this rank."""
    grad_norm: float | None
    """Over all ranks, before clipping; None = the step was skipped, or nothing is trained (record)."""
    debug_data: JsonMapping
    """By field: a list of arrays, one per sequence, or one array (``BY_SEQUENCE``, logits_*)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDump:
    """The content of a file."""

    kind: str
    step: int
    rank: int
    role: str
    parallel_info: Mapping[str, int]
    metrics: Mapping[str, float]
    """Metrics of the whole step over all ranks; empty in a record."""
    steps: Sequence[DumpedStep]
    routing_layers: Sequence[int] = ()
    """Layers of the fields ``ROUTING``: the ones with experts."""

    @property
    def rollout_id(self) -> int:
        """``step``, by the name that slime has for it."""
        return self.step

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.steps)


def record_path(path: Path) -> Path:
    """Return the file of the forward pass that belongs to a train dump: ``name_record.suffix``."""
    return path.with_name(f"{path.stem}_record{path.suffix}")


def critic_path(path: Path) -> Path:
    """Return the file of the critic that belongs to a train dump: ``name_critic.suffix``."""
    return path.with_name(f"{path.stem}_critic{path.suffix}")


def write(path: Path, header: Mapping[str, object], tensors: Mapping[str, Array]) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(arrays, aside, metadata={METADATA: json.dumps(header)})
    # At once, so that a reader sees no part of a file.
    os.replace(aside, path)


def read(path: Path) -> tuple[JsonObject, dict[str, Array]]:
    """Return header and tensors of a dump of any kind. Raises DebugFileRefused for another file."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[METADATA])
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DebugFileRefused(
            str(path), "a file of debug.save_train, debug.dump_modules or tidemill debug score", error
        ) from None


def read_train(path: Path) -> TrainDump:
    """Read a train dump or its record. Raises DebugFileRefused."""
    header, tensors = read(path)
    if header.get("kind") not in (TRAIN, RECORD):
        raise DebugFileRefused(str(path), "a file of debug.save_train", f"one of kind {header.get('kind')!r}")
    return train_dump(header, tensors)


def train_dump(header: JsonMapping, tensors: Mapping[str, Array]) -> TrainDump:
    """Return the dump that header and tensors hold."""
    by_step: dict[int, dict[str, Array]] = {}
    for name, value in tensors.items():
        _, number, field = name.split(".", 2)
        by_step.setdefault(int(number), {})[field] = value
    steps = [
        DumpedStep(
            step_id=step["step_id"],
            loss_dict=step["loss_dict"],
            grad_norm=step["grad_norm"],
            debug_data=_cut(by_step.get(step["step_id"], {})),
        )
        for step in header["steps"]
    ]
    names = ("kind", "step", "rank", "role", "parallel_info", "metrics")
    return TrainDump(
        steps=steps, routing_layers=header.get("routing_layers", ()), **{name: header[name] for name in names}
    )


def _cut(flat: Mapping[str, Array]) -> JsonObject:
    """Return the fields, those by token as a list with an array for each sequence."""
    fields: JsonObject = {}
    for name, value in flat.items():
        by = "total_lengths" if name in BY_TOTAL else "response_lengths" if name in BY_RESPONSE else ""
        fields[name] = np.split(value, np.cumsum(flat[by])[:-1]) if by else value
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDump:
    """The content of a file."""

    source: str
    """Program that computed the outputs: learner or engine, with its model."""
    dtype: str
    """Dtype of weights and activations there."""
    prompts: Sequence[Sequence[int]]
    outputs: Mapping[str, Array]
    """``<prompt>.<module>`` -> [T, size], in the order of computation."""


def write_modules(
    path: Path, outputs: Mapping[str, Array], *, prompts: Sequence[Sequence[int]], dtype: str, source: str
) -> None:
    """Write a dump, whole or not at all."""
    header = {
        "kind": MODULES,
        "source": source,
        "dtype": dtype,
        "prompts": [list(tokens) for tokens in prompts],
        "order": list(outputs),
    }
    write(path, header, outputs)


def read_modules(path: Path) -> ModuleDump:
    """Read a dump. Raises DebugFileRefused."""
    header, tensors = read(path)
    if header.get("kind") != MODULES:
        raise DebugFileRefused(str(path), "a dump of modules", f"one of kind {header.get('kind')!r}")
    outputs = {name: tensors[name] for name in header["order"]}
    return ModuleDump(source=header["source"], dtype=header["dtype"], prompts=header["prompts"], outputs=outputs)
