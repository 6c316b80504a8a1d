"""The optimizer steps of one StepBatch: micro-batches through the model, the objective, its diagnostics, Adam.

    batch -> old and reference log-probs, where needed -> advantages -> for each minibatch: corrections, loss, Adam

Shape letters: T = tokens of a packed micro-batch, H = hidden size, N = samples of the step on all ranks.
"""

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.bus.wire.trained_values import TrainedStep
from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.aggregation import Supervised
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.correction import rate_factor
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.batch.batch import StepBatch, without_truncated
from tidemill.learner.batch.shared_prompts import any_common, packings, repacked
from tidemill.learner.debug.collector import Collector, Routed
from tidemill.learner.debug.report import REPORTED_STEPS
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import HooksConfig, RecordConfig
from tidemill.learner.settings.step_settings import StepSettings
from tidemill.learner.trainer import step_metrics
from tidemill.learner.trainer.adaptive import Adaptive
from tidemill.learner.trainer.advantages import Advantages
from tidemill.learner.trainer.backups import NO_OTHER_MODELS, OtherModels, OtherWeights
from tidemill.learner.trainer.hooks import NO_HOOKS, BeforeLogProbs, BeforeStep, Hooks
from tidemill.learner.trainer.optimizer import Optimizer
from tidemill.learner.trainer.passes import Passes, RowLoss, Scores, Terms
from tidemill.learner.trainer.port import Policy
from tidemill.learner.trainer.rows import Row, Step, rows_of, step_of
from tidemill.learner.trainer.step_metrics import Update, ValueRecord, finalize

log = logging.getLogger(__name__)
NO_RECORD = RecordConfig(trained=0.0)


class Trainer:
    """Trains one policy. It owns only the schedule: policy and optimizer are arguments, and data comes as batches."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        algorithm: AlgorithmConfig,
        *,
        max_lag: int,
        others: OtherModels = NO_OTHER_MODELS,
        turn_gamma: float | None = None,
        collector: Collector | None = None,
        hooks: HooksConfig = NO_HOOKS,
        mtp_factor: float = 0.0,
        record: RecordConfig = NO_RECORD,
        row_tokens: int = 0,
        pair_tokens: int = 0,
    ) -> None:
        """``turn_gamma``: discount of the returns of turns, which have advantages of their own; None = no turns.
        ``mtp_factor``: of the loss of heads for further tokens; 0 = the policy has none. ``row_tokens``,
        ``pair_tokens``: ``max_tokens`` and ``pair_tokens`` of ``packings``.
        """
        critic = others.critic
        self._collector, self._mtp_factor = collector, mtp_factor
        self._packings = partial(packings, max_tokens=row_tokens, pair_tokens=pair_tokens)
        self._levels_rows = pair_tokens > 0
        if collector is not None:
            policy.routing.observe(policy.parallel)
        self.policy, self._optimizer, self._proximal, self._reference = (
            policy,
            optimizer,
            others.proximal,
            others.reference,
        )
        self._others = OtherWeights(policy)
        assert others.reference is not None or not algorithm.needs_reference, "the algorithm needs a reference model"
        assert (critic is not None) is algorithm.by_critic, "the algorithm decides whether there is a critic"
        self._critic, self._hooks = critic, Hooks(hooks)
        recorded = "debug.save_train records every token of a row" if collector is not None else ""
        self._obstacle = policy.obstacle or recorded
        log.info("common prompts are computed once=%s obstacle=%s", not self._obstacle, self._obstacle or "none")
        self.adaptive = Adaptive(algorithm)
        """Numbers beside weights and optimizers, equal on all ranks: part of the checkpoint."""
        self.spans: tuple[tuple[int, int], ...] = ()
        """(tokens before it that it attends to, computed tokens) of each sequence of this rank in the last step."""
        self.values: TrainedStep | None = None
        """Recorded values of this rank's tokens in the last step; None = none are."""
        self._record = ValueRecord(record, policy.parallel)
        self._lag_buckets, self._passes = diagnostics.num_lag_buckets(max_lag), Passes(policy)
        self._set(algorithm, turn_gamma)

    def _set(self, algorithm: AlgorithmConfig, turn_gamma: float | None) -> None:
        self._objective, self._algorithm = Objective(algorithm), algorithm
        self._advantages = Advantages(
            objective=self._objective,
            algorithm=algorithm,
            turn_gamma=turn_gamma,
            adaptive=self.adaptive,
            critic=self._critic,
            passes=self._passes,
            device=self.policy.parallel.device,
        )
        self._loss = RowLoss(
            objective=self._objective,
            algorithm=algorithm,
            adaptive=self.adaptive,
            policy=self.policy,
            passes=self._passes,
            record=self._record,
            collector=self._collector,
            lag_buckets=self._lag_buckets,
            mtp_factor=self._mtp_factor,
        )

    def configure(self, settings: StepSettings) -> None:
        """Take over the settings of the next steps, as a start that continues from the checkpoint before would."""
        numbers = self.adaptive.numbers
        self.adaptive.configure(settings.algorithm)
        self._set(settings.algorithm, settings.turn_gamma)
        self._optimizer.configure(settings.optimizer, steps=settings.steps)
        self.restore(numbers)

    @property
    def numbers(self) -> dict[str, float]:
        """The content of a checkpoint beside weights and optimizers."""
        return self.adaptive.numbers

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on with the ``numbers`` of a checkpoint. ConfigRefused for one without tokens for a schedule."""
        self.adaptive.restore(numbers, by_tokens=any(optimizer.by_tokens for optimizer in self._optimizers))

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [self._optimizer] if self._critic is None else [self._optimizer, self._critic.optimizer]

    def train(self, batch: StepBatch) -> dict[str, float]:
        """Take the optimizer steps and return their metrics (``docs/metrics.md``), equal on all ranks. Collective over
        all ranks.

        A loss is a sum over all trainable tokens of its minibatch, with denominators of the whole minibatch, for any
        split over ranks. A minibatch that is not finite is skipped on all ranks, and counts only in
        ``train/skipped_minibatches``. Raises MemoryReleased.
        """
        self.policy.memory.want("a step")
        began = time.perf_counter()
        self._want_scores(batch)
        if self._algorithm.mask_truncated:
            batch = without_truncated(batch)
        self._count_tokens(batch.num_tokens)
        step = step_of(batch, constant=self._algorithm.loss_constant)
        advantages = self._advantages.of_step(step) if self._algorithm.by_advantage else None
        skipped_N = self._without_gradient(step, advantages if batch.step > REPORTED_STEPS else None)
        shared = not self._obstacle and any_common(batch.micro_batches)
        batch, counts = self._repacked(batch, skipped_N, shared=shared)
        # Most of a step are the log-probs over the vocabulary, and prompts need none.
        trained_only = bool(self.policy.obstacle) and self._collector is None and self.policy.parallel.cp_size == 1
        rows = rows_of(batch, self.policy.parallel, self.policy.routing, shared=shared, trained_only=trained_only)
        self.spans = tuple(span for row in rows for span in row.packed.spans)
        with self.policy.ready():
            if self._collector is not None:
                self._record_first_pass(self._collector, batch, rows)
            rows = self._with_log_probs(rows, batch)
            rows = self._advantages.of_rows(rows, step, advantages)
            left = iter(rows)
            parts = [list(itertools.islice(left, count)) for count in counts]
            updates, taught = self._minibatches(parts, step, batch)
            self.policy.gather()
        metrics = step_metrics.of_updates(updates, step, skipped_N, self.policy.parallel.dp_group)
        num_samples = int((~batch.demonstration_N).sum())
        self.adaptive.adapt(metrics, num_samples, warms_up=self._warms_up(batch.step))
        self.values = self._record.end(batch)
        if self._collector is not None:
            self._collector.end(metrics)
        seconds = time.perf_counter() - began
        return {
            **metrics,
            **taught,
            **step_metrics.of_samples(batch),
            "train/step_seconds": seconds,
            "train/tokens_per_second": batch.num_tokens / seconds,
        }

    def log_probs(self, batch: StepBatch) -> list[Tensor]:
        """Return log-probs of the targets of every micro-batch, [T] each, without gradient. Raises MemoryReleased."""
        self.policy.memory.want("log-probs")
        rows = rows_of(batch, self.policy.parallel, self.policy.routing)
        with self.policy.ready(), self.policy.routing.given():
            return [scores.log_probs_T for scores in self._passes.scores(rows)]

    # ---- parts of a step

    def _count_tokens(self, num_tokens: int) -> None:
        before = self.adaptive.trained_tokens
        self.adaptive.trained_tokens = before + num_tokens
        for optimizer in self._optimizers:
            optimizer.tokens = (before, self.adaptive.trained_tokens)

    def _record_first_pass(self, record: Collector, batch: StepBatch, rows: list[Row]) -> None:
        with self.policy.routing.given():
            first_pass = self._passes.scores(rows)
        passed = [{"log_probs": scores.log_probs_T, "entropy": scores.entropy_T} for scores in first_pass]
        record.begin(batch, passed, _routed(rows))

    def _want_scores(self, batch: StepBatch) -> None:
        """Raise ConfigRefused for samples without the scores of a teacher that the algorithm needs."""
        scored = all(len(row.teacher_log_probs_T) for row in batch.micro_batches)
        if self._algorithm.needs_teacher and not (scored and batch.teacher_top_k >= self._algorithm.distill.top_k):
            want = "samples with the scores of a teacher (learner.algorithm.distill.teacher: engine)"
            raise ConfigRefused(
                f"step {batch.step}: teacher_log_probs", want, "samples without them, such as those of an older run"
            )

    def _without_gradient(self, step: Step, advantages: Tensor | None) -> Tensor:
        """Return the samples whose every term of the loss is 0, bool [N] on the CPU.

        ``advantages``: where the loss has no other term; None = only samples without trainable tokens are left out.
        """
        if self._collector is not None or self.policy.counts_tokens:  # their values are of all tokens
            return torch.zeros_like(step.demonstration_N)
        idle_N = step.trainable_N == 0
        if advantages is None:  # also in the first steps, on which the rank reports
            return idle_N
        samples = torch.arange(len(idle_N)) if self._advantages.turn_gamma is None else step.turns.samples_C
        moved_N = torch.zeros_like(idle_N).index_fill(0, samples[advantages != 0], True)
        return idle_N | ~(moved_N | step.demonstration_N)

    def _repacked(self, batch: StepBatch, skipped_N: Tensor, *, shared: bool) -> tuple[StepBatch, list[int]]:
        """Return the batch without the samples, and the number of rows of each minibatch, equal on all ranks.
        Collective.

        ``shared``: this rank has prompts to share.
        """
        ranks = self.policy.parallel
        minibatches, rows = None, [len(batch.micro_batches) // batch.num_minibatches] * batch.num_minibatches
        if shared or skipped_N.any():
            minibatches = self._packings(batch, skipped_N.numpy(), by_prompt=shared)
            rows = [max(1, len(packing)) for packing in minibatches]
        if ranks.dp_size > 1 and not (self._obstacle and not skipped_N.any()):
            counts = torch.tensor(rows, device=ranks.device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=ranks.dp_group)
            if rows != counts.tolist() and (minibatches is None or (shared and self._levels_rows)):
                # Ranks may wait for each other in every row, so each spreads its work over as many.
                minibatches = self._packings(batch, skipped_N.numpy(), by_prompt=shared, counts=counts.tolist())
            rows = counts.tolist()
        if minibatches is None:
            return batch, rows
        return repacked(batch, minibatches, rows, pad_to=ranks.tp_size * ranks.cp_size), rows

    def _with_log_probs(self, rows: list[Row], batch: StepBatch) -> list[Row]:
        """Return the rows with log-probs of the proximal and the reference policy, where the objective needs them."""
        chunks = tuple(self.policy.modules)
        # 2 stands for any interval above 1, in which the policy moves between two versions.
        published_every = 1 if self._proximal is None else 2
        with self._others as others:
            if self._algorithm.needs_old(minibatches=batch.num_minibatches, published_every=published_every):
                # Before the first minibatch, the weights of this moment are the proximal policy, unless versions are
                # rarer than steps.
                if self._proximal is not None:
                    others.take(self._proximal)
                self._hooks.before_log_probs(BeforeLogProbs(policy="proximal", batch=batch, chunks=chunks))
                with self.policy.routing.recording():
                    old = self._passes.scores(rows)
                rows = [
                    replace(row, seen=replace(row.seen, old_T=scores.log_probs_T, old_entropy_T=scores.entropy_T))
                    for row, scores in zip(rows, old, strict=True)
                ]
            if self._reference is not None:
                others.take(self._reference)
                self._hooks.before_log_probs(BeforeLogProbs(policy="reference", batch=batch, chunks=chunks))
                reference = self._passes.scores(rows, list_most=self._algorithm.listed_by_reference)
                rows = [_referred(row, scores) for row, scores in zip(rows, reference, strict=True)]
        return rows

    def _minibatches(
        self, parts: list[list[Row]], step: Step, batch: StepBatch
    ) -> tuple[list[Update], Mapping[str, float]]:
        """Take the optimizer steps of critic and policy. Returns the policy's, and the critic's metrics."""
        minibatches = [(part, self._terms(step, number)) for number, part in enumerate(parts)]
        taught: Mapping[str, float] = {}
        if self._critic is not None:
            targets = [(part, terms.denominators) for part, terms in minibatches]
            taught = self._critic.train(targets, batch, summed=self._passes.summed)
        if not self._warms_up(batch.step):
            self._record.begin(batch)
        updates = [
            self._minibatch(part, step, terms, batch, number) for number, (part, terms) in enumerate(minibatches)
        ]
        return updates, taught

    def _minibatch(self, rows: list[Row], step: Step, terms: Terms, batch: StepBatch, number: int) -> Update:
        if terms.denominators.tokens:
            coupled = self._objective.coupled(
                [row.seen for row in rows], summed=self._passes.summed, gathered=self._passes.gathered
            )
            terms = replace(terms, coupled=coupled)
        warms_up = self._warms_up(batch.step)
        if not warms_up:
            moment = BeforeStep(
                minibatch=number, batch=batch, chunks=tuple(self.policy.modules), optimizer=self._optimizer.inner
            )
            self._hooks.before_step(moment)
        self._optimizer.zero_grad()
        if self._mtp_factor and not warms_up:
            trained = int(torch.where(step.minibatches_N == number, step.trainable_N, 0).sum())
            terms = replace(terms, further_tokens=trained)
        biases = [(bias, bias.clone()) for bias in self.policy.moving_biases()]
        sums = self._passes.gradients(rows, partial(self._loss, terms=terms), forward_only=warms_up)
        if warms_up:  # the metrics describe the policy that stays
            return self._collected(Update(sums=sums, norm=0.0, rate=0.0), rows)
        scale = 1.0
        if self._algorithm.ess_lr and terms.denominators.tokens:
            # After the backward pass, because the gradient does not depend on it: only the learning rate does.
            scale = rate_factor(*self._passes.summed(sums.totals["ess"]).tolist(), base=self._algorithm.ess_lr)
        norm, rate = self._optimizer.step(batch.step, loss=float(sums.totals["loss"]), scale=scale)
        if norm is None:  # skipped, after the biases have moved with the gradients
            for bias, before in biases:
                bias.copy_(before)
        return self._collected(Update(sums=sums, norm=norm, rate=rate), rows)

    def _warms_up(self, step: int) -> bool:
        return self._critic is not None and self._critic.warms_up(step)

    def _collected(self, update: Update, rows: list[Row]) -> Update:
        if self._collector is not None:
            losses = {"loss": float(update.sums.totals["loss"]), **finalize(update.sums)}
            self._collector.update(losses, update.norm, _routed(rows))
        return update

    def _terms(self, step: Step, minibatch: int) -> Terms:
        """Return the denominators of the samples of policies, and the term of the demonstrations, if any."""
        if not step.demonstration_N.any():
            return Terms(denominators=step.denominators(minibatch, ~step.demonstration_N))
        algorithm = self._algorithm
        all_N = torch.ones_like(step.demonstration_N)
        own_N, others_N = (all_N, all_N) if algorithm.loss == "sft" else (step.demonstration_N, ~step.demonstration_N)
        term = Supervised(
            coef=algorithm.demonstration_coef,
            mode=self._objective.mode,
            denominators=step.denominators(minibatch, own_N),
        )
        return Terms(denominators=step.denominators(minibatch, others_N), supervised=term)


def _referred(row: Row, scores: Scores) -> Row:
    """Return the row with the scores of the reference. Scores of a teacher's tokens replace the samples' scores."""
    tokens, (ids_TK, listed_TK) = replace(row.seen, reference_T=scores.log_probs_T), scores.listed
    if ids_TK is None:
        return replace(row, seen=tokens)
    return replace(row, listed_TK=ids_TK, seen=replace(tokens, teacher_top_TK=listed_TK))


def _routed(rows: list[Row]) -> list[Routed]:
    return [dict(row.packed.routed) for row in rows]  # a copy, because the next pass writes into the same map
