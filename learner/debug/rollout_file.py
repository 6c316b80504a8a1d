"""A file with the plan and the samples of one step, and a plan of the same groups for another layout of ranks.

    file = msgpack objects: a header | the plan | each sample   (plan and samples in the encoding of the bus)

Knows no bus and no torch.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import decode_record, decode_sample, encode_record, encode_sample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Plan, Sample
from tidemill.learner.buffer.assignment import assign
from tidemill.learner.buffer.sample_index import SampleIndex
from tidemill.learner.buffer.step_plan import chain_of
from tidemill.learner.errors import DebugFileRefused

log = logging.getLogger(__name__)

KIND, SCHEMA = "tidemill.rollout", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRollout:
    """One step's data."""

    run: str
    plan: Plan
    """Groups, versions and gate of the step, and the layout that it was packed for."""
    samples: Sequence[Sample]
    """In the order of ``plan.seqs``."""
    token_limits: Mapping[int, int]
    """Maximum number of sampled tokens of an episode, by task (``build_batches`` takes it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a learner packs a step."""

    data_parallel: int
    max_tokens: int
    minibatches: int


def save_step(
    path: Path, run: str, plan: Plan, samples: Sequence[SampleIndex], token_limits: Mapping[int, int]
) -> None:
    """Write the file of a planned step."""
    contents = [sample.content for sample in samples]
    save_rollout(path, DumpedRollout(run=run, plan=plan, samples=contents, token_limits=token_limits))
    log.info("rollout saved step=%d samples=%d path=%s", plan.step, len(samples), path)


def save_rollout(path: Path, rollout: DumpedRollout) -> None:
    """Write the file, whole or not at all."""
    header = {
        "kind": KIND,
        "schema": SCHEMA,
        "run": rollout.run,
        "step": rollout.plan.step,
        "samples": len(rollout.samples),
        "token_limits": {str(task): limit for task, limit in rollout.token_limits.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    with unfinished.open("wb") as file:
        for part in (header, encode_record(rollout.plan), *map(encode_sample, rollout.samples)):
            file.write(msgpack.packb(part))
    os.replace(unfinished, path)  # atomic: a reader sees no part of a file


def read_header(path: Path) -> JsonObject:
    """Return run, step and number of samples of a file. Raises DebugFileRefused for another file, or none."""
    try:
        with path.open("rb") as file:
            return _header(path, msgpack.Unpacker(file, raw=False, max_buffer_size=0))
    except OSError as error:
        raise DebugFileRefused(str(path), "a file of debug.save_rollout", error.strerror or str(error)) from None


def load_rollout(path: Path) -> DumpedRollout:
    """Read a file. Raises DebugFileRefused for one that is missing, cut off, or no rollout."""
    try:
        with path.open("rb") as file:
            parts = msgpack.Unpacker(file, raw=False, max_buffer_size=0)
            header = _header(path, parts)
            plan, *samples = _decoded(path, parts, header["samples"])
    except OSError as error:
        raise DebugFileRefused(str(path), "a file of debug.save_rollout", error.strerror or str(error)) from None
    limits = {int(task): int(limit) for task, limit in header["token_limits"].items()}
    return DumpedRollout(run=header["run"], plan=plan, samples=samples, token_limits=limits)


def _header(path: Path, parts: Iterator[Any]) -> JsonObject:
    try:
        header = next(parts)
    except (StopIteration, ValueError, msgpack.exceptions.UnpackException):
        header = None
    if not isinstance(header, dict) or (header.get("kind"), header.get("schema")) != (KIND, SCHEMA):
        raise DebugFileRefused(str(path), f"a file of debug.save_rollout, schema {SCHEMA}", "another file")
    return header


def _decoded(path: Path, parts: Iterator[Any], num_samples: int) -> list[Any]:
    try:
        messages = [bytes(part) for part in parts]
        record, samples = decode_record(messages[0]), [decode_sample(part) for part in messages[1:]]
    except (WireError, IndexError, TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
        raise DebugFileRefused(str(path), "a plan and its samples", f"{type(error).__name__}: {error}") from None
    if not isinstance(record, Plan):
        raise DebugFileRefused(str(path), "a plan before the samples", type(record).__name__)
    if len(samples) != num_samples or len(record.seqs) != num_samples:
        got = f"{len(samples)} samples, and a plan of {len(record.seqs)}: the file is cut off or damaged"
        raise DebugFileRefused(str(path), f"a plan and its {num_samples} samples", got)
    return [record, *samples]


def planned_again(rollout: DumpedRollout, step: int, packing: Packing, *, chain: str) -> Plan:
    """Return a plan of the same groups for step ``step``, packed for another layout.

    The steps of all versions move with it, so the lags and what is too old stay as recorded.
    """
    plan, samples = rollout.plan, rollout.samples
    shift = step - plan.step
    num_sequences = [len(sample.sizes) for sample in samples]
    first_samples = np.cumsum(plan.group_sizes) - plan.group_sizes
    packed = assign(
        [size.num_tokens for sample in samples for size in sample.sizes],
        data_parallel=packing.data_parallel,
        max_tokens=packing.max_tokens,
        minibatches=packing.minibatches,
        group_sizes=np.add.reduceat(num_sequences, first_samples).tolist(),
    )
    moved = replace(
        plan,
        step=step,
        ranks=packed.ranks,
        micro_batches=packed.micro_batches,
        version_steps={version: version_step + shift for version, version_step in plan.version_steps.items()},
        oldest_step=None if plan.oldest_step is None else plan.oldest_step + shift,
        data_parallel=packing.data_parallel,
        num_micro_batches=packed.num_micro_batches,
        num_minibatches=packed.num_minibatches,
        chain="",
    )
    return replace(moved, chain=chain_of(chain, moved))
