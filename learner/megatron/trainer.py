"""One optimizer step from one StepBatch: micro-batches through Megatron's schedule, the loss, its diagnostics, Adam.

Shape letters: T = tokens of a packed micro-batch, V = this rank's part of the vocabulary, N = samples of the step on all ranks.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from learner import diagnostics
from learner.advantages import ADVANTAGES
from learner.batch import MicroBatch, StepBatch
from learner.config import AlgorithmConfig
from learner.diagnostics import Sums
from learner.logprobs import log_probs_and_entropy
from learner.losses import TokenLoss, three_policy_loss, token_mean, two_policy_loss, uncorrected_loss
from learner.megatron.attention import PackedRow, packed_row
from learner.megatron.cpu_shim import megatron_device, plain_torch
from learner.megatron.model import Policy, WeightBackup
from learner.megatron.optimizer import PolicyOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A micro-batch on the device."""

    tokens_T: Tensor
    targets_T: Tensor
    packed: PackedRow
    mask_T: Tensor
    rollout_T: Tensor
    lag_T: Tensor
    advantages_T: Tensor
    old_T: Tensor | None = None
    """Log-probs under the proximal policy; None = it is the policy the step starts from."""


class Trainer:
    """Trains one policy. Owns nothing but the schedule: policy and optimizer are given, data comes as batches."""

    def __init__(
        self,
        policy: Policy,
        optimizer: PolicyOptimizer,
        algorithm: AlgorithmConfig,
        *,
        max_lag: int,
        proximal: WeightBackup | None = None,
    ) -> None:
        """``proximal``: weights of the last published version, where that is not always the one a step starts from; else None."""
        self._policy, self._optimizer, self._algorithm, self._proximal = policy, optimizer, algorithm, proximal
        self._lag_buckets = diagnostics.num_lag_buckets(max_lag)
        policy.config.finalize_model_grads_func = _finalize_unscaled
        policy.config.grad_scale_func = optimizer.inner.scale_loss

    def train(self, batch: StepBatch) -> dict[str, float]:
        """Take the step and return its metrics (``docs/metrics.md``), equal on all ranks. Collective over all ranks.

        The loss is the sum over all trainable tokens of the step divided by ``batch.num_tokens``, however they are split.
        """
        began = time.perf_counter()
        rows = self._rows(batch)
        with megatron_device():
            rows = self._with_old_log_probs(rows, batch.temperature)
            self._optimizer.zero_grad()
            parts = self._run(rows, partial(self._loss, denominator=max(1, batch.num_tokens), temperature=batch.temperature))
            grad_norm, rate = self._optimizer.step(batch.step)
        sums = diagnostics.all_reduced(diagnostics.merged(parts), self._policy.parallel.dp_group)
        seconds = time.perf_counter() - began
        return {
            **diagnostics.finalize(sums),
            **_sample_metrics(batch),
            "train/loss": float(sums.totals["loss"]),
            "train/grad_norm": grad_norm,
            "train/lr": rate,
            "train/step_seconds": seconds,
            "train/tokens_per_second": batch.num_tokens / seconds,
        }

    def log_probs(self, batch: StepBatch) -> list[Tensor]:
        """Log-probs of the targets of every micro-batch under the present weights, [T] each, without gradient."""
        with megatron_device():
            return self._forward_only(self._rows(batch), batch.temperature)

    def _rows(self, batch: StepBatch) -> list[_Row]:
        rewards_N, groups_N = _tensor(batch.rewards_N).double(), _tensor(batch.groups_N)
        advantages_N = ADVANTAGES[self._algorithm.advantage](rewards_N, groups_N).float()
        return [self._row(micro_batch, advantages_N) for micro_batch in batch.micro_batches]

    def _row(self, micro_batch: MicroBatch, advantages_N: Tensor) -> _Row:
        to = partial(torch.Tensor.to, device=self._policy.parallel.device, non_blocking=True)
        sample_T = _tensor(micro_batch.sample_T).long()
        advantages_T = torch.where(sample_T >= 0, advantages_N[sample_T.clamp(min=0)], 0.0)
        return _Row(
            tokens_T=to(_tensor(micro_batch.tokens_T)),
            targets_T=to(_tensor(micro_batch.targets_T)),
            packed=packed_row(micro_batch.cu_seqlens, to(_tensor(micro_batch.position_ids_T))),
            mask_T=to(_tensor(micro_batch.loss_mask_T)),
            rollout_T=to(_tensor(micro_batch.rollout_log_probs_T)),
            lag_T=to(_tensor(micro_batch.lag_T)),
            advantages_T=to(advantages_T),
        )

    def _with_old_log_probs(self, rows: list[_Row], temperature: float) -> list[_Row]:
        if self._proximal is None or self._algorithm.correction != "tis":
            return rows
        with self._proximal.switch():
            old = self._forward_only(rows, temperature)
        return [
            _Row(**{name: getattr(row, name) for name in _Row.__slots__ if name != "old_T"}, old_T=old_T)
            for row, old_T in zip(rows, old, strict=True)
        ]

    def _forward_only(self, rows: list[_Row], temperature: float) -> list[Tensor]:
        """Log-probs of each row's targets without gradient."""

        def collect(row: _Row, logits_TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs_T, _ = self._log_probs(row, logits_TV, temperature)
            return log_probs_T.sum(), {"log_probs_T": log_probs_T}

        return [part["log_probs_T"] for part in self._run(rows, collect, forward_only=True)]

    def _run(self, rows: list[_Row], finish: Callable[[_Row, Tensor], Any], *, forward_only: bool = False) -> list[Any]:
        """Every row through the model (and back); ``finish(row, logits_TV) -> (loss, anything)``; the list of anything."""

        def after(row: _Row, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            with plain_torch():
                loss, result = finish(row, output[0])
                return loss, torch.zeros((), dtype=torch.int, device=output.device), result

        def step(rows_left: Iterator[_Row], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            row = next(rows_left)
            with plain_torch():
                output = model(
                    input_ids=row.tokens_T[None],
                    position_ids=row.packed.position_ids_T[None],  # type: ignore[index]
                    attention_mask=None,
                    packed_seq_params=row.packed,
                    **({"fp32_output": False} if self._policy.config.bf16 else {}),
                )
            return output, partial(after, row)

        with torch.no_grad() if forward_only else contextlib.nullcontext():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(rows),
                model=self._policy.ddp,
                num_microbatches=len(rows),
                seq_length=max(len(row.tokens_T) for row in rows),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results

    def _log_probs(self, row: _Row, logits_TV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(logits_TV, row.targets_T, temperature=temperature, group=self._policy.parallel.tp_group)

    def _loss(self, row: _Row, logits_TV: Tensor, *, denominator: int, temperature: float) -> tuple[Tensor, Sums]:
        log_probs_T, entropy_T = self._log_probs(row, logits_TV, temperature)
        start_T = log_probs_T.detach() if row.old_T is None else row.old_T
        loss = self._token_loss(row, log_probs_T, start_T)
        total = token_mean(loss.loss_T, row.mask_T, denominator)
        if self._algorithm.entropy_coef:
            total = total - self._algorithm.entropy_coef * token_mean(entropy_T, row.mask_T, denominator)
        sums = diagnostics.token_sums(
            log_probs_T=log_probs_T,
            old_T=start_T,
            rollout_T=row.rollout_T,
            entropy_T=entropy_T,
            mask_T=row.mask_T,
            lag_T=row.lag_T,
            loss=loss,
            lag_buckets=self._lag_buckets,
        )
        return total, Sums(totals={**sums.totals, "loss": total.detach().double()}, maxima=sums.maxima)

    def _token_loss(self, row: _Row, log_probs_T: Tensor, start_T: Tensor) -> TokenLoss:
        algorithm = self._algorithm
        clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
        if algorithm.correction == "tis":
            tis = {"tis_low": algorithm.tis_low, "tis_high": algorithm.tis_high}
            return three_policy_loss(log_probs_T, start_T, row.rollout_T, row.advantages_T, row.mask_T, **clip, **tis)
        if algorithm.correction == "bypass":
            return two_policy_loss(log_probs_T, row.rollout_T, row.advantages_T, row.mask_T, **clip)
        return uncorrected_loss(log_probs_T, row.advantages_T, row.mask_T)


def _finalize_unscaled(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's gradient reduction less its division: the loss already has the step's own denominator."""
    finalize_model_grads(model, None, **groups)


def _sample_metrics(batch: StepBatch) -> dict[str, float]:
    names = ("rewards_N", "groups_N", "response_lengths_N", "truncated_N")
    return diagnostics.sample_metrics(**{name: _tensor(getattr(batch, name)) for name in names})


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)
