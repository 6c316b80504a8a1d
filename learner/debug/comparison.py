"""Comparison of two dumps: the first difference in the order of computation, and its size. Pure; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.debug.train_file import RECORD, ROUTING, TRAIN, DumpedStep, ModuleDump, TrainDump

Array = NDArray[Any]
MODULE_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative error of a module's output between two equal implementations, by the coarser of their dtypes."""
DECISIONS, LOGITS = ROUTING[0], "logits_sample"
VALUE_TOLERANCE = 1e-6
"""Largest difference between two values by token that count as equal."""
IN_ORDER = (
    *("unconcat_tokens", "response_lengths", "loss_masks", *ROUTING, "rollout_log_probs", "old_log_probs"),
    *("ref_log_probs", "teacher_log_probs", "values", "returns", "advantages", "logits_sample", "current_log_probs"),
    *("current_entropy", "policy_importance_ratio", "tis_importance_weights", "current_values"),
)
"""Fields of a train dump, each after the fields that it is made of."""
OF_RECORD = (
    *((name, name) for name in ROUTING),
    ("current_log_probs", "log_probs"),
    ("current_entropy", "entropy"),
    ("current_values", "values"),
)
"""Fields of a train dump, and the fields of its record that must be equal to them in the first optimizer step."""
HINTS = (
    ("attention.qkv", "weights, order or biases of query, key and value, or the norm before them"),
    ("attention.core", "rotary settings, norms of query and key, mask, or the attention kernel"),
    ("attention", "weights or bias of the output projection"),
    (
        "mlp.experts",
        "the router, or the norm before it; with bfloat16 on a side, a token between two experts goes to either",
    ),
    (
        "mlp",
        "weights of gate, up and down (of a mixture those of its experts, or their shares), or the norm before them",
    ),
    ("embedding", "the embedding, or its order of tokens"),
    ("norm", "the last norm"),
    ("log_probs", "the output weight, or the temperature"),
)
"""Part of the model to look at, by the end of a module's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs."""

    name: str
    largest: float
    """Largest absolute difference; infinite for shapes that differ and for values that are not numbers."""
    relative: float
    """Norm of the difference / norm of the second."""
    place: str = ""
    """Where the largest difference is."""
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: largest difference {self.largest:.3g}, relative {self.relative:.3g}"
        return text + (f", at {self.place}" if self.place else "") + (f"; look at: {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result."""

    compared: Sequence[str]
    """Names of the things compared, in order."""
    differences: Sequence[Difference]
    """Those that differ, in order: the first one is the cause of the others, or nearest to it."""
    notes: Sequence[str] = ()
    """Reasons why some of the two sides were not compared."""

    @property
    def first(self) -> Difference | None:
        """The first thing that differs; None if nothing does."""
        return self.differences[0] if self.differences else None


def compare_modules(ours: ModuleDump, theirs: ModuleDump, tolerance: float | None = None) -> Comparison:
    """Compare the outputs of modules for the same prompts. Raises ValueError for other prompts, or without a common
    module.

    ``tolerance``: relative error of equal outputs; None = by the coarser dtype of the two.
    """
    if list(map(list, ours.prompts)) != list(map(list, theirs.prompts)):
        raise ValueError(
            f"prompts: want the same in both dumps, got {len(ours.prompts)} and {len(theirs.prompts)} that differ"
        )
    if tolerance is None:
        tolerance = max(MODULE_TOLERANCE.get(dump.dtype, MODULE_TOLERANCE["bfloat16"]) for dump in (ours, theirs))
    modules = list(dict.fromkeys(name.split(".", 1)[1] for name in ours.outputs))
    their_modules = {name.split(".", 1)[1] for name in theirs.outputs}
    common = [name for name in modules if name in their_modules]
    if not common:
        raise ValueError(
            f"modules: want some in both dumps, got {', '.join(modules[:4])} and {', '.join(sorted(their_modules)[:4])}"
        )
    differences = [
        difference
        for name in common
        if (difference := _of_module(name, ours, theirs)).relative > tolerance or not difference.relative >= 0
    ]
    alone = [name for name in (*modules, *sorted(their_modules)) if name not in common]
    notes = [f"in one dump only: {', '.join(alone)}"] if alone else []
    if differences and common == ["log_probs"]:
        notes.append(
            "both dumps have log-probs alone; for the first module that differs: tidemill debug score --names '*'"
        )
    return Comparison(compared=common, differences=differences, notes=notes)


def _of_module(name: str, ours: ModuleDump, theirs: ModuleDump) -> Difference:
    """Return the difference of one module over all prompts; the place is prompt and token."""
    pairs = [
        (ours.outputs[f"{number}.{name}"], theirs.outputs[f"{number}.{name}"]) for number in range(len(ours.prompts))
    ]
    hint = next(
        (hint for end, hint in HINTS if name == end or name.endswith("." + end)), "the parts of this layer above"
    )
    for number, (a, b) in enumerate(pairs):
        if a.shape != b.shape:
            place = f"prompt {number}: shapes {a.shape}, {b.shape}"
            return Difference(name=name, largest=np.inf, relative=np.inf, place=place, hint=hint)
    gaps = [np.abs(a.astype(np.float64) - b) for a, b in pairs]
    worst = max(range(len(gaps)), key=lambda number: float(np.nan_to_num(gaps[number].max(), nan=np.inf)))
    token = int(np.unravel_index(np.nan_to_num(gaps[worst], nan=np.inf).argmax(), gaps[worst].shape)[0])
    norm = np.sqrt(sum(float(np.square(b, dtype=np.float64).sum()) for _, b in pairs))
    error = np.sqrt(sum(float(np.square(gap).sum()) for gap in gaps))
    relative = float(error / norm) if norm else float(error > 0)
    largest, place = float(gaps[worst].max()), f"prompt {worst}, token {token}"
    return Difference(name=name, largest=largest, relative=relative, place=place, hint=hint)


def compare_train(ours: TrainDump, theirs: TrainDump, tolerance: float | None = None) -> Comparison:
    """Compare two train dumps, two records, or a train dump with its record: the sequences that both have, field by
    field.

    Raises ValueError for dumps of different steps or roles, or without a common sequence.
    """
    if ours.role != theirs.role:
        raise ValueError(f"role: want the same in both dumps, got {ours.role} and {theirs.role}")
    if ours.step != theirs.step:
        raise ValueError(f"step: want the same in both dumps, got {ours.step} and {theirs.step}")
    limit = VALUE_TOLERANCE if tolerance is None else tolerance
    ours, theirs, unshared = _of_shared_layers(ours, theirs)
    if {ours.kind, theirs.kind} == {TRAIN, RECORD}:
        train, record = (ours, theirs) if ours.kind == TRAIN else (theirs, ours)
        return _of_steps([(train.steps[0], record.steps[0])], OF_RECORD, limit, unshared)
    names = tuple((name, name) for name in (IN_ORDER if ours.kind == TRAIN else (*IN_ORDER, "log_probs", "entropy")))
    comparison = _of_steps(list(zip(ours.steps, theirs.steps, strict=False)), names, limit, unshared)
    notes = [*comparison.notes]
    if ours.num_steps != theirs.num_steps:
        notes.append(f"optimizer steps: {ours.num_steps} and {theirs.num_steps}; only the first are compared")
    return Comparison(
        compared=comparison.compared,
        differences=[*comparison.differences, *_of_norms(ours, theirs, limit)],
        notes=notes,
    )


def _of_shared_layers(ours: TrainDump, theirs: TrainDump) -> tuple[TrainDump, TrainDump, list[str]]:
    """Return both dumps with the routing of their shared layers, and a note on the others: a stage has only its own."""
    shared = [layer for layer in ours.routing_layers if layer in theirs.routing_layers]
    alone = sorted({*ours.routing_layers, *theirs.routing_layers} - set(shared))

    def reduced(dump: TrainDump) -> TrainDump:
        if list(dump.routing_layers) == shared:
            return dump
        places = [list(dump.routing_layers).index(layer) for layer in shared]
        steps = [replace(step, debug_data=_with_layers(step.debug_data, places)) for step in dump.steps]
        return replace(dump, steps=steps, routing_layers=shared)

    note = f"routing in one dump only: layers {', '.join(map(str, alone))}"
    return reduced(ours), reduced(theirs), [note] if alone else []


def _with_layers(data: JsonMapping, places: Sequence[int]) -> JsonObject:
    routing = {name: [values[:, places] for values in data[name]] for name in ROUTING if name in data} if places else {}
    return {name: value for name, value in data.items() if name not in ROUTING} | routing


def _of_steps(
    pairs: Sequence[tuple[DumpedStep, DumpedStep]],
    names: Sequence[tuple[str, str]],
    limit: float,
    unshared: Sequence[str],
) -> Comparison:
    compared: dict[str, None] = {}
    differences: list[Difference] = []
    alone: dict[str, None] = {}
    shared = 0
    for ours, theirs in pairs:
        matches = _matches(ours.debug_data, theirs.debug_data)
        shared += len(matches)
        for our_name, their_name in names:
            if (our_name in ours.debug_data) != (their_name in theirs.debug_data):
                alone[our_name] = None
            if our_name not in ours.debug_data or their_name not in theirs.debug_data:
                continue
            compared[our_name] = None
            of = _of_decisions if our_name == DECISIONS else _of_field
            places = _matches_of_logits(ours.debug_data, theirs.debug_data) if our_name == LOGITS else matches
            difference = of(our_name, ours, places, theirs.debug_data[their_name])
            if not difference.largest <= limit:
                differences.append(difference)
    if not shared:
        raise ValueError(
            "sequences: want some in both dumps, got none: compare the files of one step, of all ranks in turn"
        )
    notes = [f"{shared} sequences compared", *unshared] + ([f"in one dump only: {', '.join(alone)}"] if alone else [])
    return Comparison(compared=list(compared), differences=differences, notes=notes)


def _matches(ours: JsonMapping, theirs: JsonMapping) -> list[tuple[int, int, int]]:
    """Return (sequence, its index in ours, in theirs) of the sequences that both have."""
    their_index = {int(sequence): index for index, sequence in enumerate(theirs.get("sequence_ids", ()))}
    our_sequences = enumerate(ours.get("sequence_ids", ()))
    return [
        (int(sequence), index, their_index[int(sequence)])
        for index, sequence in our_sequences
        if int(sequence) in their_index
    ]


def _matches_of_logits(ours: JsonMapping, theirs: JsonMapping) -> list[tuple[int, int, int]]:
    """Return (sequence, row of logits in ours, in theirs) of tokens with logits in both; older files have no places."""
    keys = [
        [
            (int(sequence), int(position))
            for sequence, position in zip(data["logits_sequences"], data["logits_positions"], strict=True)
        ]
        if "logits_sequences" in data
        else []
        for data in (ours, theirs)
    ]
    return [(key[0], index, keys[1].index(key)) for index, key in enumerate(keys[0]) if key in keys[1]]


def _of_decisions(
    name: str, ours: DumpedStep, matches: Sequence[tuple[int, int, int]], theirs: Sequence[Any]
) -> Difference:
    """Return the difference of the experts: ``largest`` is the number of choices that differ (a token in a layer)."""
    wrong, choices, place = 0, 0, ""
    for sequence, index, their_index in matches:
        a, b = ours.debug_data[name][index], theirs[their_index]
        if a.shape != b.shape:
            where = f"optimizer step {ours.step_id}, sequence {sequence}: shapes {a.shape} and {b.shape}"
            return Difference(name=name, largest=np.inf, relative=np.inf, place=where)
        differs = (a != b).any(-1)
        if differs.any() and not place:
            token, layer = (int(places[0]) for places in differs.nonzero())
            experts = f"{a[token, layer].tolist()} and {b[token, layer].tolist()}"
            place = (
                f"optimizer step {ours.step_id}, sequence {sequence}, token {token}, {layer + 1}. layer with "
                f"experts: {experts}"
            )
        wrong, choices = wrong + int(differs.sum()), choices + differs.size
    return Difference(name=name, largest=float(wrong), relative=wrong / max(choices, 1), place=place)


def _of_field(
    name: str, ours: DumpedStep, matches: Sequence[tuple[int, int, int]], theirs: Sequence[Any]
) -> Difference:
    worst, place, squares, norms = 0.0, "", 0.0, 0.0
    for sequence, index, their_index in matches:
        a, b = (
            np.atleast_1d(np.asarray(values, np.float64))
            for values in (ours.debug_data[name][index], theirs[their_index])
        )
        if a.shape != b.shape:
            where = f"optimizer step {ours.step_id}, sequence {sequence}: {a.size} and {b.size} values"
            return Difference(name=name, largest=np.inf, relative=np.inf, place=where)
        if not a.size:
            continue
        a, b = (values.reshape(len(values), -1) for values in (a, b))  # several values of a token, or one
        gap = np.nan_to_num(np.abs(a - b), nan=np.inf)
        squares, norms = squares + float(np.square(gap).sum()), norms + float(np.square(b).sum())
        if float(gap.max()) > worst:
            worst, at = float(gap.max()), np.unravel_index(gap.argmax(), gap.shape)
            place = f"optimizer step {ours.step_id}, sequence {sequence}, token {at[0]}: {a[at]:.6g} and {b[at]:.6g}"
    return Difference(
        name=name, largest=worst, relative=float(np.sqrt(squares / norms)) if norms else float(squares > 0), place=place
    )


def _of_norms(ours: TrainDump, theirs: TrainDump, limit: float) -> Iterator[Difference]:
    """Yield differences of the gradient norms, which are of all ranks, where every earlier field may agree."""
    for a, b in zip(ours.steps, theirs.steps, strict=False):
        our_norm, their_norm = (np.nan if step.grad_norm is None else step.grad_norm for step in (a, b))
        relative = abs(our_norm - their_norm) / max(abs(their_norm), 1e-30)
        if a.grad_norm != b.grad_norm and not relative <= max(limit, 1e-4):
            place = f"optimizer step {a.step_id}: {our_norm:.6g} and {their_norm:.6g}"
            yield Difference(name="grad_norm", largest=abs(our_norm - their_norm), relative=relative, place=place)
