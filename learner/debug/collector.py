"""Collects the token-level data of a training step beside the trainer, and writes one file for each step and rank.

    trainer --- record, row, update ---> copies on the CPU --- end of the step ---> file

Nothing of it goes through Megatron's logging dictionary: its entries stay on the device until the step ends. Tensors are detached and
copied to pinned host memory without waiting; one synchronization at the end of the step comes before they are read.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bus.wire.json_object import JsonObject
from learner.algorithms import diagnostics
from learner.algorithms.objective import Tokens
from learner.algorithms.outcome import TokenLoss
from learner.data.batch import MicroBatch, StepBatch
from learner.debug import train_file

log = logging.getLogger(__name__)

LOGITS_POSITIONS = 4
"""Trainable tokens of each micro-batch whose logits are saved."""
ACTOR = "actor"
"""Role of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Files of one rank."""

    path: str
    """With ``{step}`` and ``{rank}``."""
    rank: int
    parallel_info: Mapping[str, int]
    writes: bool
    """False for a rank that has the same values as another one, or no logits: it collects nothing."""
    anchor: str
    """Log-probs that the importance ratio is against, as in ``AlgorithmConfig.anchor``."""
    role: str = ACTOR
    routing_layers: Sequence[int] = ()
    """Layers with experts of the last pipeline stage."""


@dataclass(slots=True)
class _Update:
    """The optimizer step under way, and its rows so far."""

    rows: list[dict[str, Tensor]] = field(default_factory=list)
    loss_dict: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None


class Collector:
    """The data of one step at a time. A trainer without one has no cost."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._batch: StepBatch | None = None
        self._record: list[dict[str, Tensor]] = []
        self._updates: list[_Update] = []
        self._open = _Update()

    def begin(
        self, batch: StepBatch, first_pass: Sequence[tuple[Tensor, Tensor]], routed: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Begin a step. ``first_pass``: log-probs and entropies of each micro-batch before the first optimizer step.

        ``routed``: the fields about the routing of each, if the model has experts.
        """
        self._batch, self._updates, self._open = batch, [], _Update()
        rows = zip(first_pass, routed or [{}] * len(first_pass), strict=True) if self._target.writes else ()
        self._record = [_on_host({"log_probs": a_T, "entropy": b_T, **more}) for (a_T, b_T), more in rows]

    def row(
        self, seen: Tokens, log_probs_T: Tensor, entropy_T: Tensor, loss: TokenLoss, routed: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take the values of the next micro-batch; they come in the order of the batch. ``routed``: as for ``begin``."""
        if not self._target.writes:
            return
        values = {"advantages": seen.advantages_T, "current_log_probs": log_probs_T, "current_entropy": entropy_T}
        anchor_T = seen.old_T if seen.old_T is not None else log_probs_T
        if self._target.anchor == "rollout":
            anchor_T = seen.rollout_T
        ratio_T = (log_probs_T.detach() - anchor_T.detach()).exp()
        values["policy_importance_ratio"] = torch.where(seen.mask_T, ratio_T, 1.0)
        optional = {"old_log_probs": seen.old_T, "ref_log_probs": seen.reference_T, "teacher_log_probs": seen.teacher_T}
        optional |= {"values": seen.values_T, "returns": seen.returns_T}
        if loss.weights is not None:
            optional["tis_importance_weights"] = loss.weights.weight_T
        values |= {name: value_T for name, value_T in optional.items() if value_T is not None}
        self._open.rows.append(_on_host(values | dict(routed or {})))

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor, mask_T: Tensor, temperature: float) -> None:
        """Take the logits of the first trainable tokens of the micro-batch whose ``row`` came last."""
        if not self._target.writes:
            return
        at_K = mask_T.nonzero()[:LOGITS_POSITIONS, 0]
        with torch.no_grad():
            logits_KV = (hidden_TH.detach()[at_K] @ weight_VH.detach().t()).float() / (temperature or 1.0)
        self._open.rows[-1] |= _on_host({"logits_sample": logits_KV, "logits_positions": at_K})

    def update(self, sums: diagnostics.Sums, grad_norm: float | None) -> None:
        """End an optimizer step. ``sums``: diagnostics of this rank's rows."""
        if self._target.writes:
            self._open.loss_dict = {"loss": float(sums.totals["loss"]), **diagnostics.finalize(sums)}
            self._open.grad_norm = grad_norm
            self._updates.append(self._open)
        self._open = _Update()

    def end(self, metrics: Mapping[str, float]) -> None:
        """Write the files of the step, and forget it. ``metrics``: of the whole step, over all ranks."""
        batch, target, self._batch = self._batch, self._target, None
        assert batch is not None, "begin comes before end"
        if not target.writes:
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies to pinned memory
        path = Path(target.path.format(step=batch.step, rank=target.rank))
        self._write(path, train_file.TRAIN, batch, self._updates, metrics)
        record = _Update(rows=self._record)
        self._write(train_file.record_path(path), train_file.RECORD, batch, [record], {})
        log.info("training data saved step=%d path=%s", batch.step, path)
        self._updates, self._record = [], []

    def _write(self, path: Path, kind: str, batch: StepBatch, updates: Sequence[_Update], metrics: Mapping[str, float]) -> None:
        per_update = len(batch.micro_batches) // len(updates)
        tensors: dict[str, NDArray[Any]] = {}
        for number, update in enumerate(updates):
            mine = batch.micro_batches[number * per_update : (number + 1) * per_update]
            tensors |= {f"steps.{number}.{name}": value for name, value in _columns(batch, mine, update.rows).items()}
        steps = [{"step_id": number, "loss_dict": update.loss_dict, "grad_norm": update.grad_norm} for number, update in enumerate(updates)]
        header = {
            "kind": kind,
            "step": batch.step,
            "rank": self._target.rank,
            "role": self._target.role,
            "num_steps": len(updates),
            "parallel_info": dict(self._target.parallel_info),
            "routing_layers": list(self._target.routing_layers),
            "metrics": dict(metrics),
            "steps": steps,
        }
        train_file.write(path, header, tensors)


def _on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies in host memory; those of a device are complete after a synchronization."""
    return {name: value.detach().to("cpu", non_blocking=True) for name, value in values.items()}


def _columns(batch: StepBatch, micro_batches: Sequence[MicroBatch], rows: Sequence[Mapping[str, Tensor]]) -> dict[str, NDArray[Any]]:
    """Return the fields of all sequences of these micro-batches, each flat."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for micro_batch, values in zip(micro_batches, rows, strict=True):
        arrays = {name: value.numpy() for name, value in values.items()}
        for name in ("logits_sample", "logits_positions"):
            if name in arrays:
                parts.setdefault(name, []).append(arrays.pop(name))
        for one in _sequences(batch, micro_batch, arrays):
            for name, value in one.items():
                parts.setdefault(name, []).append(np.atleast_1d(value))
    return {name: np.concatenate(found) for name, found in parts.items()}


def _sequences(batch: StepBatch, row: MicroBatch, values: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """Return the fields of each sequence of a micro-batch. Values by token are of its response: index r is response token r."""
    found = []
    several = batch.num_sequences != len(batch.rewards_N)
    for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
        sample = int(row.sample_T[start])
        if sample < 0:  # padding
            continue
        trainable = np.flatnonzero(row.loss_mask_T[start:end])
        length = int(batch.response_lengths_N[sample])
        if several:  # then the length of a sample is that of all its sequences
            length = end - start - 1 - int(trainable[0]) if len(trainable) else 0
        response = slice(end - 1 - length, end - 1)  # targets: the value at t is that of token t + 1
        one: JsonObject = {
            "sequence_ids": np.int32(row.sequence_T[start]),
            "sample_ids": np.int32(sample),
            "total_lengths": np.int32(end - start),
            "response_lengths": np.int32(length),
            "unconcat_tokens": row.tokens_T[start:end].astype(np.int32),
            "loss_masks": row.loss_mask_T[response].astype(np.uint8),
            "rollout_log_probs": row.rollout_log_probs_T[response],
        }
        whole = slice(start, end)
        found.append(one | {name: value[whole if name in train_file.BY_TOTAL else response] for name, value in values.items()})
    return found
