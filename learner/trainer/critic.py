"""The critic: a second model with a value head, its optimizer, and the steps that train it beside the policy.

    rows -> values, forward only -> (advantages and returns: ``token_advantages``) -> each minibatch: value loss, Adam

It knows nothing of the policy. Shape letters: T = tokens of a packed micro-batch, C = tokens of this rank's part of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tidemill.learner.algorithms.aggregation import Denominators, aggregate
from tidemill.learner.algorithms.gae_vtrace import value_clipped, value_loss
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.debug.collector import Collector, Fields, of_critic
from tidemill.learner.layout.parallel import gather_parts, of_last_stage, tensors_of_last_stage
from tidemill.learner.settings.config import CriticConfig, LearnerConfig
from tidemill.learner.trainer.optimizer import Optimizer
from tidemill.learner.trainer.port import AnyBackend, Policy
from tidemill.learner.trainer.rows import Row

Summed = Callable[[Tensor], Tensor]  # sum of a tensor over the data-parallel ranks


@dataclass(frozen=True, slots=True)
class _Update:
    """Result of the optimizer step of one minibatch."""

    sums: Tensor  # (loss, clipped tokens, tokens) of this rank, float64 [3]
    norm: float | None  # norm of the gradient before clipping; None = skipped, on all ranks
    rate: float


class Critic:
    """A value function that is trained beside a policy. All methods are collective over all ranks."""

    def __init__(
        self, model: Policy, optimizer: Optimizer, config: CriticConfig, collector: Collector | None = None
    ) -> None:
        """``model``: with a value head (``Backend.open_value_model``)."""
        self.model, self.optimizer, self._config, self._collector = model, optimizer, config, collector
        self._clip = config.value_clip or math.inf

    def warms_up(self, step: int) -> bool:
        """Return whether only the critic is trained in this step."""
        return step <= self._config.warmup_steps

    def valued(self, rows: Sequence[Row]) -> list[Tokens]:
        """Return the inputs of the objective of each row with ``values_T``, the values under the current weights."""

        def collect(row: Row, values_C1: Tensor) -> tuple[Tensor, Tensor]:
            values_T1 = self._whole(row, values_C1)
            return values_T1.sum(), values_T1

        results = self.model.run(rows, collect, forward_only=True)
        values = tensors_of_last_stage(results, [len(row.seen.mask_T) for row in rows], 1, self.model.parallel)
        return [replace(row.seen, values_T=each_T1[:, 0]) for row, each_T1 in zip(rows, values, strict=True)]

    def train(
        self, minibatches: Sequence[tuple[Sequence[Row], Denominators]], batch: StepBatch, *, summed: Summed
    ) -> dict[str, float]:
        """Take an optimizer step for each minibatch, whose rows have ``values_T`` and ``returns_T``. Returns
        ``critic/`` metrics.

        The loss is a mean over the trainable tokens of the minibatch on all ranks. A step that is not finite is skipped
        on all ranks. A minibatch of demonstrations alone is none: with gradients of 0 Adam would still move.
        """
        every = [row.seen for rows, _ in minibatches for row in rows]
        fit = summed(torch.stack([_fit_sums(tokens) for tokens in every]).sum(0))
        if self._collector is not None:
            self._collector.begin(batch, [_first_pass(tokens) for tokens in every])
        updates = []
        for rows, denominators in minibatches:
            if denominators.tokens:
                updates.append(self._minibatch(rows, denominators, batch.step))
            elif self._collector is not None:
                for _ in rows:
                    self._collector.row({})
                self._collector.update({}, None)
        self.model.gather()
        metrics = self._metrics(updates, fit, summed=summed)
        if self._collector is not None:
            self._collector.end(metrics)
        return metrics

    def _metrics(self, updates: Sequence[_Update], fit: Tensor, *, summed: Summed) -> dict[str, float]:
        done = [update for update in updates if update.norm is not None]
        metrics = {
            "critic/skipped_minibatches": float(len(updates) - len(done)),
            "critic/lr": sum(update.rate for update in updates) / max(1, len(updates)),
            **_fit(fit),
        }
        if not done:
            return metrics
        loss, clipped, tokens = summed(torch.stack([update.sums for update in done]).sum(0)).tolist()
        return metrics | {
            "critic/loss": loss / len(done),
            "critic/clip_fraction": clipped / max(1.0, tokens),
            "critic/grad_norm": sum(update.norm for update in done if update.norm is not None) / len(done),
        }

    def _minibatch(self, rows: Sequence[Row], denominators: Denominators, step: int) -> _Update:
        self.optimizer.zero_grad()
        parts = self.model.run(rows, partial(self._loss, denominators=denominators))
        ranks = self.model.parallel
        sums = of_last_stage(None if parts is None else torch.stack(parts).sum(0).cpu(), ranks).to(ranks.device)
        norm, rate = self.optimizer.step(step, loss=float(sums[0]))
        if self._collector is not None:
            loss, clipped, tokens = sums.tolist()
            self._collector.update({"loss": loss, "clip_fraction": clipped / max(1.0, tokens)}, norm)
        return _Update(sums, norm, rate)

    def _whole(self, row: Row, values_C1: Tensor) -> Tensor:
        ranks = self.model.parallel
        return row.spread(row.read(values_C1)) if ranks.cp_size == 1 else gather_parts(values_C1, ranks.cp_group)

    def _loss(self, row: Row, values_C1: Tensor, *, denominators: Denominators) -> tuple[Tensor, Tensor]:
        tokens, values_T = row.seen, self._whole(row, values_C1)[:, 0]
        assert tokens.values_T is not None and tokens.returns_T is not None
        if self._collector is not None:
            self._collector.row(of_critic(tokens, values_T))
        place = (values_T, tokens.values_T, tokens.returns_T, tokens.mask_T)
        total = aggregate(
            value_loss(*place, clip=self._clip), tokens.mask_T, tokens.sample_T, denominators, mode="token_mean"
        )
        clipped = value_clipped(*place, clip=self._clip).sum()
        return total, torch.stack([total.detach().double(), clipped.double(), tokens.mask_T.sum().double()])


def open_critic(
    backend: AnyBackend, learner: LearnerConfig, policy: Policy, model_dir: Path, collector: Collector | None = None
) -> Critic | None:
    """Return the critic that the algorithm needs, on the ranks and in the memory of the policy; None = it needs none.

    It starts from ``learner.critic.path``, or the policy's initial weights, with a value head of zeros. Raises
    ConfigRefused as ``Backend.open_value_model``.
    """
    if not learner.algorithm.by_critic:
        return None
    model = backend.open_value_model(learner, policy, model_dir)
    optimizer = backend.open_optimizer(
        model, learner.critic.optimizer, steps=learner.steps, offload=learner.offload_optimizer
    )
    return Critic(model, optimizer, learner.critic, collector)


def _first_pass(tokens: Tokens) -> Fields:
    assert tokens.values_T is not None
    return {"values": tokens.values_T}


def _fit_sums(tokens: Tokens) -> Tensor:
    """Return (tokens, sum V, sum R, sum R^2, sum (R - V), sum (R - V)^2) of a row before the step, float64 [6]."""
    assert tokens.values_T is not None and tokens.returns_T is not None
    values_M, returns_M = tokens.values_T[tokens.mask_T].double(), tokens.returns_T[tokens.mask_T].double()
    gaps_M = returns_M - values_M
    sums = [values_M, returns_M, returns_M.square(), gaps_M, gaps_M.square()]
    return torch.stack([tokens.mask_T.sum().double(), *(part.sum() for part in sums)])


def _fit(sums: Tensor) -> dict[str, float]:
    """Return means of values and returns, and the share of the variance of the returns that the values explain."""
    number, values, returns, squares, gaps, gap_squares = sums.tolist()
    if not number:
        return {}
    metrics = {"critic/value_mean": values / number, "critic/return_mean": returns / number}
    spread = squares / number - (returns / number) ** 2
    if spread > 1e-12 * squares / number:  # else the returns are equal, up to rounding
        metrics["critic/explained_variance"] = 1 - (gap_squares / number - (gaps / number) ** 2) / spread
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
