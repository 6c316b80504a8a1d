"""Collects the token-level data of a training step beside the trainer, and writes one file for each step and rank.

    trainer, critic --- record, row, update ---> copies on the CPU --- end of the step: routing of all stages ---> files

Nothing of it goes through Megatron's logging dictionary: its entries stay on the device until the step ends. Tensors
are detached and copied to pinned host memory without waiting; one synchronization at the end of the step comes before
they are read.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.debug import train_file
from tidemill.learner.layout.parallel import Parallel, is_last_stage, of_all_stages

log = logging.getLogger(__name__)

Fields = Mapping[str, Tensor]
"""Values of a micro-batch by name, [T, ...]."""


def of_policy(tokens: Tokens, log_probs_T: Tensor, entropy_T: Tensor, loss: TokenLoss, *, anchor: str) -> Fields:
    """Return the fields of a pass of the policy. ``anchor``: as ``AlgorithmConfig.anchor``.

    Old log-probs that the algorithm does not need, and the ratio against them, are left to ``with_old``.
    """
    anchor_T = tokens.rollout_T if anchor == "rollout" else tokens.old_T
    fields = {
        "advantages": tokens.advantages_T,
        "current_log_probs": log_probs_T,
        "current_entropy": entropy_T,
        "policy_importance_ratio": None if anchor_T is None else _ratio(log_probs_T, anchor_T, tokens.mask_T),
        "old_log_probs": tokens.old_T,
        "ref_log_probs": tokens.reference_T,
        "teacher_log_probs": tokens.teacher_T,
        "values": tokens.values_T,
        "returns": tokens.returns_T,
        "tis_importance_weights": None if loss.weights is None else loss.weights.weight_T,
    }
    return _present(fields)


def with_old(fields: Fields, first_pass: Fields, mask_T: Tensor) -> Fields:
    """Return the fields, with the record's old log-probs (``first_pass``) and ratio against them where they lack."""
    old_T = fields.get("old_log_probs", first_pass["log_probs"])
    return {
        "old_log_probs": old_T,
        "policy_importance_ratio": _ratio(fields["current_log_probs"], old_T, mask_T),
        **fields,
    }


def _ratio(log_probs_T: Tensor, anchor_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, (log_probs_T.detach() - anchor_T.detach()).exp(), 1.0)


def of_critic(tokens: Tokens, values_T: Tensor) -> Fields:
    """Return the fields of a pass of the critic, with the values of that pass."""
    fields = {
        "advantages": tokens.advantages_T,
        "returns": tokens.returns_T,
        "values": tokens.values_T,
        "current_values": values_T,
    }
    return _present(fields | {"old_log_probs": tokens.old_T, "ref_log_probs": tokens.reference_T})


def _present(values: Mapping[str, Tensor | None]) -> Fields:
    return {name: value_T for name, value_T in values.items() if value_T is not None}


LOGITS_POSITIONS = 4
"""Trainable tokens of each micro-batch whose logits are saved."""
ACTOR, CRITIC = "actor", "critic"
"""Roles: the policy, and the model of its values."""

Routed = Mapping[int, Sequence[Tensor]]
"""Layer -> the fields ``train_file.ROUTING`` of all tokens of a row, in host memory."""


@dataclass(slots=True)
class _Pass:
    """An optimizer step, or the record."""

    micro_batches: Sequence[MicroBatch] = ()
    rows: list[dict[str, Tensor]] = field(default_factory=list)
    """Fields of each micro-batch."""
    routed: Sequence[Routed] = ()
    loss_dict: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None


class Collector:
    """The data of one step of one model at a time. All methods are called on all ranks."""

    def __init__(self, path: str, parallel: Parallel, *, role: str = ACTOR) -> None:
        """``path``: with ``{step}`` and ``{rank}``; the critic's file has another name beside it."""
        self._path, self._parallel, self._role = path, parallel, role
        self._keeps = parallel.tp_rank == 0
        """False for a rank that has the same values as the first of its tensor-parallel group."""
        self.writes = self._keeps and is_last_stage(parallel)
        """True for a rank of the last stage, which has the model's results, and writes their files."""
        self._batch: StepBatch | None = None
        self._record, self._open = _Pass(), _Pass()
        self._updates: list[_Pass] = []

    def begin(self, batch: StepBatch, first_pass: Sequence[Fields], routed: Sequence[Routed] = ()) -> None:
        """Begin a step. ``first_pass``: fields of each micro-batch before any update; ``routed``: as for ``update``."""
        self._batch, self._updates, self._open = batch, [], _Pass()
        rows = [_on_host(fields) for fields in first_pass] if self.writes else []
        self._record = _Pass(rows=rows, routed=routed if self._keeps else ())

    def row(self, fields: Fields) -> None:
        """Take the fields of the next micro-batch; they come in the order of the batch."""
        if self.writes:
            self._open.rows.append(_on_host(fields))

    def logits(self, logits_KV: Tensor, at_K: Tensor) -> None:
        """Take logits of the micro-batch of the last ``row``, which predict the targets at ``at_K``."""
        if self.writes:
            self._open.rows[-1] |= _on_host({"logits_sample": logits_KV, "logits_positions": at_K})

    def update(self, loss_dict: Mapping[str, float], grad_norm: float | None, routed: Sequence[Routed] = ()) -> None:
        """End an optimizer step. ``loss_dict``: of this rank's rows. ``routed``: this stage's routing of each row."""
        self._open.loss_dict, self._open.grad_norm = loss_dict, grad_norm
        self._open.routed = routed if self._keeps else ()
        self._updates.append(self._open)
        self._open = _Pass()

    def end(self, metrics: Mapping[str, float]) -> None:
        """Write the files of the step, and forget it. ``metrics``: of all ranks. Collective over the stages."""
        batch, self._batch = self._batch, None
        assert batch is not None, "begin comes before end"
        if self._keeps:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the copies to pinned memory
            self._record.micro_batches = batch.micro_batches
            size = len(batch.micro_batches) // len(self._updates)
            for number, update in enumerate(self._updates):
                part = slice(number * size, (number + 1) * size)
                update.micro_batches = batch.micro_batches[part]
                if self._role == ACTOR and self.writes:
                    update.rows = _with_old(update, self._record.rows[part])
            layers = self._with_routing()
            if self.writes:
                self._write(batch, metrics, layers)
        self._updates, self._record = [], _Pass()

    # ---- routing

    def _with_routing(self) -> list[int]:
        """Add the routing of all stages to the rows of every pass, on the last stage. Returns the layers."""
        passes, last = [self._record, *self._updates], is_last_stage(self._parallel)
        tensors = dict(_routing(passes)) if last else {}
        if self._parallel.pp_size > 1:
            sent = ((name, tensor.to(self._parallel.device)) for name, tensor in _routing(() if last else passes))
            for name, tensor in of_all_stages(sent, self._parallel):
                if last:
                    tensors[name] = tensor.cpu()
        layers = sorted({int(name.split(".")[1]) for name in tensors})
        for number, model_pass in enumerate(passes if layers else ()):
            lengths = [len(row.tokens_T) for row in model_pass.micro_batches]
            for name in train_file.ROUTING:
                whole_TLX = torch.stack([tensors[f"{number}.{layer}.{name}"] for layer in layers], dim=1)
                for row, values_TLX in zip(model_pass.rows, whole_TLX.split(lengths), strict=True):
                    row[name] = values_TLX
        return layers

    # ---- files

    def _write(self, batch: StepBatch, metrics: Mapping[str, float], layers: Sequence[int]) -> None:
        path = Path(self._path.format(step=batch.step, rank=self._parallel.rank))
        path = path if self._role == ACTOR else train_file.critic_path(path)
        for kind in (train_file.TRAIN, train_file.RECORD):
            is_record = kind == train_file.RECORD
            passes = [self._record] if is_record else self._updates
            header = {
                "kind": kind,
                "rollout_id": batch.step,
                "step": batch.step,
                "rank": self._parallel.rank,
                "role": self._role,
                "num_steps": len(passes),
                "parallel_info": self._parallel.info,
                "routing_layers": list(layers),
                "metrics": {} if is_record else dict(metrics),
                "steps": [
                    {"step_id": number, "loss_dict": dict(model_pass.loss_dict), "grad_norm": model_pass.grad_norm}
                    for number, model_pass in enumerate(passes)
                ],
            }
            columns = [_columns(batch, model_pass.micro_batches, model_pass.rows) for model_pass in passes]
            tensors = {
                f"steps.{number}.{name}": value
                for number, fields in enumerate(columns)
                for name, value in fields.items()
            }
            train_file.write(train_file.record_path(path) if is_record else path, header, tensors)
        log.info("training data saved step=%d role=%s path=%s", batch.step, self._role, path)


def _with_old(update: _Pass, first_pass: Sequence[Fields]) -> list[dict[str, Tensor]]:
    """Return the rows of an optimizer step, with old log-probs from the first pass if the algorithm computes none."""
    rows = zip(update.rows, first_pass, update.micro_batches, strict=True)
    return [dict(with_old(fields, first, torch.from_numpy(row.loss_mask_T))) for fields, first, row in rows]


def _routing(passes: Sequence[_Pass]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``<pass>.<layer>.<field>`` of the layers of this stage, for all rows of a pass, [T, ...]."""
    for number, model_pass in enumerate(passes):
        for layer in model_pass.routed[0] if model_pass.routed else ():
            for place, name in enumerate(train_file.ROUTING):
                yield f"{number}.{layer}.{name}", torch.cat([row[layer][place] for row in model_pass.routed])


def _on_host(values: Fields) -> dict[str, Tensor]:
    """Return detached copies in host memory; copies of a device are complete after a synchronization."""
    return {name: value.detach().to("cpu", non_blocking=True) for name, value in values.items()}


def _columns(batch: StepBatch, micro_batches: Sequence[MicroBatch], rows: Sequence[Fields]) -> dict[str, NDArray[Any]]:
    """Return the fields of all sequences of these micro-batches, each flat."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for micro_batch, values in zip(micro_batches, rows, strict=True):
        arrays = {name: value.numpy() for name, value in values.items()}
        if "logits_sample" in arrays:
            at_K = arrays.pop("logits_positions")
            starts_K = micro_batch.cu_seqlens[np.searchsorted(micro_batch.cu_seqlens, at_K, side="right") - 1]
            parts.setdefault("logits_sample", []).append(arrays.pop("logits_sample"))
            parts.setdefault("logits_sequences", []).append(micro_batch.sequence_T[at_K])
            parts.setdefault("logits_positions", []).append((at_K - starts_K + 1).astype(np.int32))
        for sequence in _sequences(batch, micro_batch, arrays):
            for name, value in sequence.items():
                parts.setdefault(name, []).append(np.atleast_1d(value))
    return {name: np.concatenate(pieces) for name, pieces in parts.items()}


def _sequences(batch: StepBatch, row: MicroBatch, values: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """Return the fields of each sequence of a micro-batch. Values by token are of its response, from index 0."""
    sequences = []
    several = batch.num_sequences != len(batch.rewards_N)
    for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
        sample = int(row.sample_T[start])
        if sample < 0:  # padding
            continue
        trainable = np.flatnonzero(row.loss_mask_T[start:end])
        length = int(batch.response_lengths_N[sample])
        if several:  # then a sample's length counts all its sequences
            length = end - start - 1 - int(trainable[0]) if len(trainable) else 0
        response = slice(end - 1 - length, end - 1)  # targets: the value at t belongs to token t + 1
        fields: JsonObject = {
            "sequence_ids": np.int32(row.sequence_T[start]),
            "sample_ids": np.int32(sample),
            "total_lengths": np.int32(end - start),
            "response_lengths": np.int32(length),
            "unconcat_tokens": row.tokens_T[start:end].astype(np.int32),
            "loss_masks": row.loss_mask_T[response].astype(np.uint8),
            "rollout_log_probs": row.rollout_log_probs_T[response],
        }
        all_tokens = slice(start, end)
        sequences.append(
            fields
            | {name: value[all_tokens if name in train_file.BY_TOTAL else response] for name, value in values.items()}
        )
    return sequences
