"""The optimizer steps of one StepBatch: micro-batches through the model, the objective, its diagnostics, Adam.

    batch -> old and reference log-probs, where needed -> advantages -> for each minibatch: corrections, loss, Adam

Shape letters: T = tokens of a packed micro-batch, H = hidden size, N = samples of the step on all ranks.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.bus.wire.trained_values import TrainedStep
from tidemill.learner.algorithms import diagnostics
from tidemill.learner.algorithms.aggregation import Denominators, Supervised
from tidemill.learner.algorithms.choices import RUNNING
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.correction import rate_factor
from tidemill.learner.algorithms.diagnostics import Sums
from tidemill.learner.algorithms.gae_vtrace import with_token_advantages
from tidemill.learner.algorithms.kl import EntropyBonus, counted_samples, next_coefficient
from tidemill.learner.algorithms.objective import Coupled, Objective, sequence_weight_sums
from tidemill.learner.algorithms.ratios import log_ratio, sequence_sums
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import StepBatch, without_truncated
from tidemill.learner.batch.repacking import any_common, packings, repacked
from tidemill.learner.debug import collector
from tidemill.learner.debug.collector import LOGITS_POSITIONS, Collector, Routed
from tidemill.learner.debug.report import REPORTED_STEPS
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import HooksConfig, RecordConfig
from tidemill.learner.settings.step_settings import StepSettings
from tidemill.learner.trainer.backend import Policy
from tidemill.learner.trainer.backups import NO_OTHER_MODELS, OtherModels, OtherWeights
from tidemill.learner.trainer.further import further_loss
from tidemill.learner.trainer.hooks import NO_HOOKS, BeforeLogProbs, BeforeStep, Hooks
from tidemill.learner.trainer.optimizer import Optimizer
from tidemill.learner.trainer.passes import Passes, Scores
from tidemill.learner.trainer.rows import Row, Step, rows_of, step_of, tensor_of
from tidemill.learner.trainer.trained_values import ValueRecord

log = logging.getLogger(__name__)
NO_RECORD = RecordConfig(trained=0.0)
_BASELINE = "baseline/"  # prefix of the running baselines among the numbers of a checkpoint
_Terms = tuple[Denominators, Supervised | None]
"""Denominators of the samples of policies, and the term of the demonstrations; None = the step has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Result of the optimizer step of one minibatch."""

    sums: Sums  # diagnostics of the minibatch's rows on this rank
    norm: float | None  # norm of the gradient before clipping; None = skipped, on all ranks
    rate: float  # learning rate


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
    ) -> None:
        """``turn_gamma``: discount of the returns of turns, which have advantages of their own; None = no turns.
        ``mtp_factor``: of the loss of heads for further tokens; 0 = the policy has none.
        """
        critic = others.critic
        self._collector, self._mtp_factor = collector, mtp_factor
        if collector is not None:
            policy.routing.observe(policy.parallel)
        self._policy, self._optimizer, self._proximal, self._reference = (
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
        self.kl_scale = 1.0
        """Factor of the KL coefficients, which the adaptive controller sets; part of the checkpoint."""
        self.baselines: dict[str, float] = {}
        """Running baseline of each role, in units of the reward, with ``advantage: rae``; part of the checkpoint then.
        """
        self.spans: tuple[tuple[int, int], ...] = ()
        """(tokens before it that it attends to, computed tokens) of each sequence of this rank in the last step."""
        self.values: TrainedStep | None = None
        """Recorded values of this rank's tokens in the last step; None = none are."""
        self._record = ValueRecord(record, policy.parallel)
        self._trained_tokens = 0.0
        self._lag_buckets = diagnostics.num_lag_buckets(max_lag)
        self._set(algorithm, turn_gamma)
        self._passes = Passes(policy)

    def _set(self, algorithm: AlgorithmConfig, turn_gamma: float | None) -> None:
        self._objective, self._algorithm, self._turn_gamma = Objective(algorithm), algorithm, turn_gamma
        self.entropy_bonus = EntropyBonus(coef=algorithm.entropy.coef)
        """Coefficient of the entropy bonus, which ``entropy.target`` moves; part of the checkpoint then."""

    def configure(self, settings: StepSettings) -> None:
        """Take over the settings of the next steps, as a start that continues from the checkpoint before would."""
        numbers = self.numbers
        self._set(settings.algorithm, settings.turn_gamma)
        self._optimizer.configure(settings.optimizer, steps=settings.steps)
        self.restore(numbers)

    @property
    def numbers(self) -> dict[str, float]:
        """State beside weights and optimizers, equal on all ranks: part of the checkpoint."""
        adaptive = {"entropy_coef": self.entropy_bonus.coef, "entropy_low": float(self.entropy_bonus.low)}
        running = {_BASELINE + role: baseline for role, baseline in self.baselines.items()}
        adaptive = adaptive if self._algorithm.entropy.target else {}
        return {"kl_scale": self.kl_scale, "trained_tokens": self._trained_tokens, **adaptive, **running}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on with the ``numbers`` of a checkpoint. ConfigRefused for one without tokens for a schedule."""
        self.kl_scale = numbers["kl_scale"]
        if self._algorithm.entropy.target and "entropy_coef" in numbers:  # missing where the target was set later
            self.entropy_bonus = EntropyBonus(coef=numbers["entropy_coef"], low=bool(numbers["entropy_low"]))
        if self._algorithm.advantage in RUNNING:
            self.baselines = {
                name.removeprefix(_BASELINE): baseline
                for name, baseline in numbers.items()
                if name.startswith(_BASELINE)
            }
        if "trained_tokens" not in numbers and any(optimizer.by_tokens for optimizer in self._optimizers):
            raise ConfigRefused(
                "learner.optimizer.warmup_tokens, lr_decay_tokens",
                "0: the checkpoint has no count of trained tokens",
                "> 0",
            )
        self._trained_tokens = numbers.get("trained_tokens", 0.0)

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
        self._policy.memory.want("a step")
        began = time.perf_counter()
        self._want_scores(batch)
        if self._algorithm.mask_truncated:
            batch = without_truncated(batch)
        self._count_tokens(batch.num_tokens)
        step = step_of(batch, constant=self._algorithm.loss_constant)
        advantages = self._advantages(step) if self._algorithm.by_advantage else None
        skipped_N = self._without_gradient(step, advantages if batch.step > REPORTED_STEPS else None)
        shared = not self._obstacle and any_common(batch.micro_batches)
        batch, counts = self._repacked(batch, skipped_N, shared=shared)
        # Most of a step are the log-probs over the vocabulary, and prompts need none.
        trained_only = bool(self._policy.obstacle) and self._collector is None and self._policy.parallel.cp_size == 1
        rows = rows_of(batch, self._policy.parallel, self._policy.routing, shared=shared, trained_only=trained_only)
        self.spans = tuple(span for row in rows for span in row.packed.spans)
        with self._policy.ready():
            if self._collector is not None:
                self._record_first_pass(self._collector, batch, rows)
            rows = self._with_log_probs(rows, batch)
            rows = self._with_advantages(rows, step, advantages)
            left = iter(rows)
            parts = [list(itertools.islice(left, count)) for count in counts]
            updates, taught = self._minibatches(parts, step, batch)
            self._policy.gather()
        # The reduced metrics are equal on all ranks, so every rank computes the same next coefficients.
        metrics = self._metrics(updates, step, skipped_N)
        self._adapt(metrics, batch)
        self.values = self._record.end(batch)
        if self._collector is not None:
            self._collector.end(metrics)
        seconds = time.perf_counter() - began
        return {
            **metrics,
            **taught,
            **_sample_metrics(batch),
            "train/step_seconds": seconds,
            "train/tokens_per_second": batch.num_tokens / seconds,
        }

    def log_probs(self, batch: StepBatch) -> list[Tensor]:
        """Return log-probs of the targets of every micro-batch, [T] each, without gradient. Raises MemoryReleased."""
        self._policy.memory.want("log-probs")
        rows = rows_of(batch, self._policy.parallel, self._policy.routing)
        with self._policy.ready(), self._policy.routing.given():
            return [scores.log_probs_T for scores in self._passes.scores(rows)]

    # ---- parts of a step

    def _count_tokens(self, num_tokens: int) -> None:
        before, self._trained_tokens = self._trained_tokens, self._trained_tokens + num_tokens
        for optimizer in self._optimizers:
            optimizer.tokens = (before, self._trained_tokens)

    def _record_first_pass(self, record: Collector, batch: StepBatch, rows: list[Row]) -> None:
        with self._policy.routing.given():
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
        if self._collector is not None or self._policy.counts_tokens:  # their values are of all tokens
            return torch.zeros_like(step.demonstration_N)
        idle_N = step.trainable_N == 0
        if advantages is None:  # also in the first steps, on which the rank reports
            return idle_N
        samples = torch.arange(len(idle_N)) if self._turn_gamma is None else step.turns.samples_C
        moved_N = torch.zeros_like(idle_N).index_fill(0, samples[advantages != 0], True)
        return idle_N | ~(moved_N | step.demonstration_N)

    def _repacked(self, batch: StepBatch, skipped_N: Tensor, *, shared: bool) -> tuple[StepBatch, list[int]]:
        """Return the batch without the samples, and the number of rows of each minibatch, equal on all ranks.
        Collective.

        ``shared``: this rank has prompts to share.
        """
        ranks = self._policy.parallel
        minibatches, rows = None, [len(batch.micro_batches) // batch.num_minibatches] * batch.num_minibatches
        if shared or skipped_N.any():
            minibatches = packings(batch, skipped_N.numpy(), by_prompt=shared)
            rows = [max(1, len(packing)) for packing in minibatches]
        if ranks.dp_size > 1 and not (self._obstacle and not skipped_N.any()):
            counts = torch.tensor(rows, device=ranks.device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=ranks.dp_group)
            if minibatches is None and rows != counts.tolist():
                minibatches = packings(batch, skipped_N.numpy())
            rows = counts.tolist()
        if minibatches is None:
            return batch, rows
        return repacked(batch, minibatches, rows, pad_to=ranks.tp_size * ranks.cp_size), rows

    def _with_log_probs(self, rows: list[Row], batch: StepBatch) -> list[Row]:
        """Return the rows with log-probs of the proximal and the reference policy, where the objective needs them."""
        chunks = tuple(self._policy.modules)
        # 2 stands for any interval above 1, in which the policy moves between two versions.
        published_every = 1 if self._proximal is None else 2
        with self._others as others:
            if self._algorithm.needs_old(minibatches=batch.num_minibatches, published_every=published_every):
                # Before the first minibatch, the weights of this moment are the proximal policy, unless versions are
                # rarer than steps.
                if self._proximal is not None:
                    others.take(self._proximal)
                self._hooks.before_log_probs(BeforeLogProbs(policy="proximal", batch=batch, chunks=chunks))
                with self._policy.routing.recording():
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

    def _shaped_rewards(self, step: Step, rows: list[Row]) -> Tensor:
        """Return the rewards of the samples less their penalties. ``rows``: scored ones, for a penalty of their KL."""
        kl = self._algorithm.kl
        by_sample = kl.reward_coef and kl.reward_by == "sample"
        kl_N = self._divergences(rows, len(step.rewards_N)) if by_sample else None
        return self._objective.shaped_rewards(
            step.rewards_N, step.sampled_N, max_tokens=step.max_new_tokens, kl_N=kl_N, kl_scale=self.kl_scale
        )

    def _advantages(self, step: Step, rows: list[Row] | None = None) -> Tensor:
        """Return the advantage of each sample, or of each turn, float32 on the CPU. ``rows``: as for the rewards."""
        rewards_N = self._shaped_rewards(step, rows or [])
        if self._turn_gamma is None:
            return self._of_samples(rewards_N, step).float()
        place = (rewards_N, step.groups_N, step.turns)
        return self._objective.turn_advantages(*place, gamma=self._turn_gamma).float()

    def _with_advantages(self, rows: list[Row], step: Step, advantages: Tensor | None = None) -> list[Row]:
        """Return the rows with the advantages of their tokens. ``advantages``: None = not yet known."""
        algorithm, objective = self._algorithm, self._objective
        if self._critic is not None:
            valued, rewards_N = self._critic.valued(rows), self._shaped_rewards(step, rows)
            tokens = with_token_advantages(
                valued, rewards_N, algorithm, kl_scale=self.kl_scale, summed=self._passes.summed
            )
            return [replace(row, seen=row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)]
        if advantages is None:
            advantages = self._advantages(step, rows)
        advantages = advantages.to(self._policy.parallel.device)
        places = (row.seen.sample_T if self._turn_gamma is None else row.turn_T for row in rows)
        rows = [
            replace(row, seen=self._advised(row.seen, advantages, place_T))
            for row, place_T in zip(rows, places, strict=True)
        ]
        if not objective.by_token:
            return rows
        tokens = objective.with_token_returns(
            [row.seen for row in rows], kl_scale=self.kl_scale, summed=self._passes.summed
        )
        return [replace(row, seen=row_tokens) for row, row_tokens in zip(rows, tokens, strict=True)]

    def _of_samples(self, rewards_N: Tensor, step: Step) -> Tensor:
        """Return the advantage of each sample; demonstrations have none, and are in no baseline."""
        kept_N = ~step.demonstration_N
        advantages_N = torch.zeros_like(rewards_N)
        if not kept_N.any():
            return advantages_N
        parts = replace(step.parts, values_NK=step.parts.values_NK[kept_N])
        columns = (rewards_N, step.groups_N, step.lengths_N, step.trainable_N)
        metadata = list(itertools.compress(step.metadata, kept_N.tolist()))
        if self._algorithm.advantage in RUNNING:
            place = (rewards_N[kept_N], step.trainable_N[kept_N], metadata)
            advantages_N[kept_N], self.baselines = self._objective.over_running_baselines(*place, self.baselines)
            return advantages_N
        advantages_N[kept_N] = self._objective.advantages(
            *(column_N[kept_N] for column_N in columns),
            parts=parts,
            truncated_N=step.truncated_N[kept_N],
            metadata=metadata,
        )
        return advantages_N

    def _advised(self, tokens: Tokens, advantages: Tensor, place_T: Tensor) -> Tokens:
        """Return the inputs with the advantage of each token: ``place_T`` is its index in ``advantages``, -1 = none."""
        # -1 reads the first advantage and is set to 0.
        advantages_T = torch.where(place_T >= 0, advantages[place_T.clamp(min=0)], 0.0)
        return replace(tokens, advantages_T=advantages_T)

    def _divergences(self, rows: list[Row], num_samples: int) -> Tensor:
        """Return ``sum_t log pi_old - log pi_reference`` of every sample of the step, on all ranks, [N] on the CPU."""
        total_N = torch.zeros(num_samples, dtype=torch.float64)
        for row in rows:
            tokens = row.seen
            assert tokens.old_T is not None and tokens.reference_T is not None
            gap_T = (tokens.old_T - tokens.reference_T).double()
            total_N += sequence_sums(gap_T, tokens.mask_T, tokens.sample_T, num_samples).cpu()
        return self._passes.summed(total_N)

    def _minibatches(
        self, parts: list[list[Row]], step: Step, batch: StepBatch
    ) -> tuple[list[_Update], Mapping[str, float]]:
        """Take the optimizer steps of critic and policy. Returns the policy's, and the critic's metrics."""
        minibatches = [(part, self._denominators(step, number)) for number, part in enumerate(parts)]
        taught: Mapping[str, float] = {}
        if self._critic is not None:
            targets = [(part, terms[0]) for part, terms in minibatches]
            taught = self._critic.train(targets, batch, summed=self._passes.summed)
        if not self._warms_up(batch.step):
            self._record.begin(batch)
        updates = [
            self._minibatch(part, step, terms, batch, number) for number, (part, terms) in enumerate(minibatches)
        ]
        return updates, taught

    def _minibatch(self, rows: list[Row], step: Step, terms: _Terms, batch: StepBatch, number: int) -> _Update:
        denominators, supervised = terms
        coupled = Coupled()
        if denominators.tokens:
            coupled = self._objective.coupled(
                [row.seen for row in rows], summed=self._passes.summed, gathered=self._passes.gathered
            )
        warms_up = self._warms_up(batch.step)
        if not warms_up:
            moment = BeforeStep(
                minibatch=number, batch=batch, chunks=tuple(self._policy.modules), optimizer=self._optimizer.inner
            )
            self._hooks.before_step(moment)
        self._optimizer.zero_grad()
        loss = partial(self._loss, denominators=denominators, coupled=coupled, supervised=supervised)
        if self._mtp_factor and not warms_up:
            trained = int(torch.where(step.minibatches_N == number, step.trainable_N, 0).sum())
            loss = partial(self._with_further, loss=loss, trained=trained)
        biases = [(bias, bias.clone()) for bias in self._policy.moving_biases()]
        sums = self._passes.gradients(rows, loss, forward_only=warms_up)
        if warms_up:  # the metrics are those of the policy that stays
            return self._collected(_Update(sums=sums, norm=0.0, rate=0.0), rows)
        scale = 1.0
        if self._algorithm.ess_lr and denominators.tokens:
            # After the backward pass, because the gradient does not depend on it: only the learning rate does.
            scale = rate_factor(*self._passes.summed(sums.totals["ess"]).tolist(), base=self._algorithm.ess_lr)
        norm, rate = self._optimizer.step(batch.step, loss=float(sums.totals["loss"]), scale=scale)
        if norm is None:  # skipped, after the biases have moved with the gradients
            for bias, before in biases:
                bias.copy_(before)
        return self._collected(_Update(sums=sums, norm=norm, rate=rate), rows)

    def _warms_up(self, step: int) -> bool:
        return self._critic is not None and self._critic.warms_up(step)

    def _collected(self, update: _Update, rows: list[Row]) -> _Update:
        if self._collector is not None:
            losses = {"loss": float(update.sums.totals["loss"]), **diagnostics.finalize(update.sums)}
            self._collector.update(losses, update.norm, _routed(rows))
        return update

    def _denominators(self, step: Step, minibatch: int) -> _Terms:
        """Return the denominators of the samples of policies, and the term of the demonstrations, if any."""
        if not step.demonstration_N.any():
            return step.denominators(minibatch, ~step.demonstration_N), None
        algorithm = self._algorithm
        all_N = torch.ones_like(step.demonstration_N)
        own_N, others_N = (all_N, all_N) if algorithm.loss == "sft" else (step.demonstration_N, ~step.demonstration_N)
        term = Supervised(
            coef=algorithm.demonstration_coef,
            mode=self._objective.mode,
            denominators=step.denominators(minibatch, own_N),
        )
        return step.denominators(minibatch, others_N), term

    def _metrics(self, updates: list[_Update], step: Step, skipped_N: Tensor) -> dict[str, float]:
        """Return the metrics of the minibatches that were not skipped. ``skipped_N``: samples that no row has."""
        done = [update for update in updates if update.norm is not None]
        metrics = {
            "train/zero_samples_skipped": float(skipped_N.sum()),
            "train/skipped_minibatches": float(len(updates) - len(done)),
            "train/lr": sum(update.rate for update in updates) / len(updates),
        }
        # Nothing was trained, and means over no token would be NaN.
        if not done:
            return metrics | {"train/tokens": 0.0}
        sums = diagnostics.all_reduced(
            diagnostics.merged(update.sums for update in done), self._policy.parallel.dp_group
        )
        norms = [update.norm for update in done if update.norm is not None]
        taken = torch.tensor([number for number, update in enumerate(updates) if update.norm is not None])
        of_rows = diagnostics.finalize(sums)
        of_rows["train/tokens"] += float(step.trainable_N[skipped_N & torch.isin(step.minibatches_N, taken)].sum())
        if "mtp" in sums.totals:
            of_rows["train/mtp_loss"] = float(sums.totals["mtp"] / sums.totals["mtp_tokens"].clamp(min=1))
        return {
            **metrics,
            **of_rows,
            "train/shared_tokens": float(sums.totals["shared_tokens"]),
            "train/loss": float(sums.totals["loss"]) / len(done),
            "train/grad_norm": sum(norms) / len(norms),
            "train/grad_norm_max": max(norms),
        }

    def _adapt(self, metrics: dict[str, float], batch: StepBatch) -> None:
        """Move the coefficients of KL and entropy to their targets, in the metrics too, unless the critic warms up."""
        kl, num_samples = self._algorithm.kl, int((~batch.demonstration_N).sum())
        if kl.target and num_samples and "train/kl_reference" in metrics and not self._warms_up(batch.step):
            counted = counted_samples(num_samples, kl.horizon)
            divergence = metrics["train/kl_reference"]
            self.kl_scale = next_coefficient(
                self.kl_scale, divergence, target=kl.target, horizon=kl.horizon, num_samples=counted
            )
        if self.baselines:
            metrics["train/baseline_mean"] = math.fsum(self.baselines.values()) / len(self.baselines)
        if self._algorithm.needs_reference:
            metrics["train/kl_scale"] = self.kl_scale
        algorithm = self._algorithm
        if algorithm.entropy.target:
            metrics["train/entropy_coef"] = self.entropy_bonus.applied
            if "train/entropy" in metrics and not self._warms_up(batch.step):
                bounds = {
                    "target": algorithm.entropy.target,
                    "delta": algorithm.entropy.delta,
                    "most": algorithm.entropy.coef_max,
                }
                self.entropy_bonus = self.entropy_bonus.after(metrics["train/entropy"], **bounds)

    def _loss(
        self,
        row: Row,
        hidden_TH: Tensor,
        *,
        denominators: Denominators,
        coupled: Coupled,
        supervised: Supervised | None,
    ) -> tuple[Tensor, Sums]:
        log_probs_T, entropy_T, listed_TK = self._passes.read(row, hidden_TH, listed=self._objective.by_listed)
        tokens = self._objective.advised(row.seen, log_probs_T)
        total, loss, divergence_T = self._objective.total(
            log_probs_T,
            entropy_T,
            tokens,
            denominators,
            coupled,
            kl_scale=self.kl_scale,
            entropy_coef=self.entropy_bonus.applied if self._algorithm.entropy.target else None,
            listed_TK=listed_TK,
        )
        if self._collector is not None:
            anchor = str(self._algorithm.anchor)
            self._collector.row(collector.of_policy(tokens, log_probs_T, entropy_T, loss, anchor=anchor))
            self._record_logits(self._collector, row, hidden_TH, tokens)
        self._record.row(tokens, log_probs_T, entropy_T, loss)
        sums = diagnostics.token_sums(
            tokens,
            log_probs_T=log_probs_T,
            entropy_T=entropy_T,
            position_T=row.position_T,
            loss=loss,
            lag_buckets=self._lag_buckets,
        )
        totals: dict[str, Tensor] = {}
        if supervised is not None:
            term, totals = supervised.term(log_probs_T, row.demonstrated_T, row.seen.sample_T)
            total = total + term
        totals["loss"] = total.detach().double()
        totals["shared_tokens"] = total.detach().new_tensor(len(row.targets_T) - len(row.tokens_T)).double()
        if divergence_T is not None:
            totals["kl_reference"] = torch.where(tokens.mask_T, divergence_T, 0.0).sum().double()
        if self._algorithm.needs_teacher and tokens.teacher_T is not None:
            totals["teacher_kl"] = log_ratio(log_probs_T.detach(), tokens.teacher_T, tokens.mask_T).sum().double()
        if listed_TK is not None:
            totals["teacher_top_kl"] = self._objective.listed_divergence(tokens, listed_TK.detach()).sum().double()
        if self._algorithm.ess_lr:
            totals["ess"] = sequence_weight_sums(log_probs_T, tokens)
        return total, Sums(totals={**sums.totals, **totals}, maxima=sums.maxima)

    def _with_further(
        self, row: Row, hidden_TH: Tensor, *, loss: Callable[[Row, Tensor], tuple[Tensor, Sums]], trained: int
    ) -> tuple[Tensor, Sums]:
        """Add the loss of heads for further tokens to a row's loss. ``trained``: tokens of the minibatch."""
        total, sums = loss(row, hidden_TH)
        further, further_sums = further_loss(self._policy, row, hidden_TH, tokens=trained)
        return total + self._mtp_factor * further, Sums(totals={**sums.totals, **further_sums}, maxima=sums.maxima)

    def _record_logits(self, record: Collector, row: Row, hidden_TH: Tensor, tokens: Tokens) -> None:
        at_K = tokens.mask_T.nonzero()[:LOGITS_POSITIONS, 0]
        if len(at_K):
            record.logits(self._passes.logits(row, hidden_TH, at_K), at_K)


def _referred(row: Row, scores: Scores) -> Row:
    """Return the row with the scores of the reference; those of a teacher's tokens replace those of the samples."""
    tokens, (ids_TK, listed_TK) = replace(row.seen, reference_T=scores.log_probs_T), scores.listed
    if ids_TK is None:
        return replace(row, seen=tokens)
    return replace(row, listed_TK=ids_TK, seen=replace(tokens, teacher_top_TK=listed_TK))


def _routed(rows: list[Row]) -> list[Routed]:
    return [dict(row.packed.routed) for row in rows]  # a copy, because the next pass writes into the same map


def _sample_metrics(batch: StepBatch) -> dict[str, float]:
    names = ("rewards_N", "groups_N", "response_lengths_N", "truncated_N")
    kept_N, unended = batch.scored_N, batch.unended_share
    columns = {name: tensor_of(getattr(batch, name)[kept_N]) for name in names}
    metrics = diagnostics.sample_metrics(**columns) | ({} if unended is None else {"train/unended_share": unended})
    return metrics if batch.routing == (0, 0) else metrics | {"train/routing_known": batch.routing_known}
