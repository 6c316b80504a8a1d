"""The objective that the trainer minimises, composed of the functions of this package as an ``AlgorithmConfig``
describes.

    rewards -> advantages -+
    log-probs of mu, proximal, reference -> weights, rejections -+-> loss per token -> one number
    log-probs with gradient -------------------------------------+

Nothing here knows a model, a rank or a batch. Values that depend on all tokens of an update (``coupled``) are computed
from sums that the caller adds up over micro-batches and ranks, so the result does not depend on how the tokens are
split.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidemill.bus.system.functions import check_call, find_function
from tidemill.learner.algorithms import policy_losses, rejection, token_returns
from tidemill.learner.algorithms.advantages import (
    ADVANTAGES,
    gdpo,
    masked_moments,
    over_baselines,
    pass_at_k,
    roles_of,
    whitened,
)
from tidemill.learner.algorithms.aggregation import Denominators, Reducer, TokenLoss, aggregate
from tidemill.learner.algorithms.choices import ANCHORED, BY_COVARIANCE, OFFERED, OWN_ARGUMENTS, RUNNING
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.importance_weights import (
    ImportanceWeights,
    WeightFunction,
    bounded,
    geometric_means,
    raw_weights,
    self_normalised,
    weight_sums,
)
from tidemill.learner.algorithms.kl import corrected_kl, kl_T
from tidemill.learner.algorithms.policy_losses import PolicyLoss, loglinear_proximal
from tidemill.learner.algorithms.ratios import log_ratio, sequence_sums
from tidemill.learner.algorithms.shaping import distillation_advantages, overlong_penalty, sft_loss, top_k_divergence
from tidemill.learner.algorithms.token_returns import turn_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupled:
    """Values for the correction of a token that depend on all tokens of its update, on all ranks."""

    weight_sums: Tensor | None = None
    """(sum of the weights, their number): the weights are divided by their mean; None = they are not."""
    m2_cut: float = math.inf
    """Tokens with a squared log-ratio of at least this are rejected."""
    entropy_floor: float = -math.inf
    """Tokens with a smaller entropy are left out."""
    covariance: policy_losses.CovarianceCut | None = None
    """Choice of the tokens of clip_cov and kl_cov; None = another loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Inputs of an objective for one packed row, besides the log-probs with gradient; T = its tokens, all [T]."""

    mask_T: Tensor
    """Trainable tokens."""
    sample_T: Tensor
    """Index of the token's sample in the step, 0..N-1; -1 in padding. Advantages and denominators are by sample."""
    num_samples: int
    """N."""
    rollout_T: Tensor
    """log mu."""
    lag_T: Tensor
    """Age in steps; -1 where masked."""
    advantages_T: Tensor
    old_T: Tensor | None = None
    """Log-probs of the proximal policy; None = the proximal policy is the trained one, detached."""
    reference_T: Tensor | None = None
    """Log-probs of the reference; None = the config uses no reference."""
    teacher_T: Tensor | None = None
    """Log-probs of the targets under the teacher that scored the samples; None = the samples have no scores."""
    teacher_top_TK: Tensor | None = None
    """Log-probs, under the teacher, of the tokens that it listed at each position, [T, K]; None = it listed none."""
    sequence_T: Tensor | None = None
    """Index of the token's sequence in the step, 0..M-1; -1 in padding; None = every sample is one sequence."""
    num_sequences: int = 0
    """M, with ``sequence_T``."""
    old_entropy_T: Tensor | None = None
    """Entropies of the distributions of ``old_T``."""
    chosen_T: Tensor | None = None
    """Tokens chosen by covariance; None = none are."""
    values_T: Tensor | None = None
    """Values of a critic before the step; None = there is none."""
    returns_T: Tensor | None = None
    """Targets of the critic's value function, with ``values_T``."""

    @property
    def by_sequence(self) -> tuple[Tensor, int]:
        """(sequence of each token, M): the unit of ratios. The tokens of a sequence are neighbours in one row, unlike
        those of a sample.
        """
        return (self.sample_T, self.num_samples) if self.sequence_T is None else (self.sequence_T, self.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnColumns:
    """Turns of all samples of a step, in columns; those of a sample are neighbours, in order of delivery."""

    samples_C: Tensor
    rewards_C: Tensor
    trainable_C: Tensor
    """Trainable tokens, after the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Parts of the rewards of a step."""

    names: tuple[str, ...]
    values_NK: Tensor
    """NaN = the sample has no such part."""


LossFunction = Callable[[Tensor, Tensor, Tokens, AlgorithmConfig], PolicyLoss]
"""``(log_probs_T, anchor_T, tokens, config)``: signature of a policy loss by import path. It must be 0 with 0 gradient
where masked.
"""
AdvantageFunction = Callable[..., Tensor]
"""``(rewards_N, groups_N, *, ...) -> advantages_N``: signature of an estimator by import path, with those of
``OFFERED`` that it names:

    lengths_N    tokens of each response
    truncated_N  bool; True where the response ran into its length limit
    parts        reward parts by name, [N] each; NaN where a sample has no such part
    metadata     metadata of each sample, N maps
"""


def _shaped(name: str) -> LossFunction:
    """Return a loss of ``policy_losses`` with its settings bound to those of the config."""
    function = getattr(policy_losses, name)
    over_sequences = name in ("gspo", "gspo_token", "gmpo", "topr", "vespo", "dro")

    def call(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
        """Call the loss with the settings that it takes."""
        settings: dict[str, object] = {}
        if name in ("ppo", "gspo", "gspo_token"):
            assert config.clip.low is not None and config.clip.high is not None
            settings = {"clip": policy_losses.Clip(low=config.clip.low, high=config.clip.high, dual=config.clip.dual)}
        elif name == "cispo":
            settings = {"clip_low": config.clip.low, "clip_high": config.clip.high}
        elif name == "sapo":
            settings = asdict(config.sapo)
        elif name in ("dppo_tv", "dppo_kl", "ipo"):
            settings = {
                "low": config.clip.low,
                "high": config.clip.high,
                "penalty": config.dppo.penalty,
                "cap": config.dppo.ratio_cap,
            }
        elif name == "gmpo":
            settings = {"low": config.clip.low, "high": config.clip.high}
        elif name == "dro":
            settings = asdict(config.dro)
        places = tokens.by_sequence if over_sequences else ()
        loss: PolicyLoss = function(log_probs_T, anchor_T, tokens.advantages_T, tokens.mask_T, *places, **settings)
        return loss

    return call


def _reinforce(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    return policy_losses.reinforce(log_probs_T, tokens.advantages_T, tokens.mask_T)


def _sft(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    return PolicyLoss(loss_T=sft_loss(log_probs_T, tokens.mask_T), clipped_T=torch.zeros_like(tokens.mask_T))


def _clip_cov(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    assert config.clip.low is not None and config.clip.high is not None
    clip = policy_losses.Clip(low=config.clip.low, high=config.clip.high)
    place = (tokens.advantages_T, tokens.mask_T)
    return policy_losses.clip_cov(log_probs_T, anchor_T, *place, clip=clip, chosen_T=tokens.chosen_T)


def _kl_cov(log_probs_T: Tensor, anchor_T: Tensor, tokens: Tokens, config: AlgorithmConfig) -> PolicyLoss:
    place = (tokens.advantages_T, tokens.mask_T)
    return policy_losses.kl_cov(log_probs_T, anchor_T, *place, coef=config.covariance.kl_coef, chosen_T=tokens.chosen_T)


LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    **{name: _shaped(name) for name in ANCHORED if name not in BY_COVARIANCE},
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "reinforce": _reinforce,
    "sft": _sft,
}


class Objective:
    """The functions that a config chooses, bound to its settings."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Raises ValueError for a function by import path that cannot be imported, and for an estimator that cannot be
        called.
        """
        self.config = config
        level = config.weight.level
        assert config.loss is not None and level is not None and config.aggregation is not None
        self._level: str | WeightFunction = _own(level, "weight.level") if ":" in level else level
        self.mode: str | Reducer = (
            _own(config.aggregation, "aggregation") if ":" in config.aggregation else config.aggregation
        )
        """The aggregation: a name, or a function of one's own."""
        self._own_rejects: dict[str, rejection.RejectFunction] = {
            path: _own(path, "reject.rules") for path in config.reject.functions
        }
        self.loss = LOSS_FUNCTIONS.get(config.loss) or _own(config.loss, "loss")
        self._estimator = ADVANTAGES.get(config.advantage)
        self.asks: frozenset[str] = frozenset()
        """Arguments of ``OFFERED`` that the estimator gets: those that one by import path asks for; the metadata, if it
        has rae's roles.
        """
        if self._estimator:
            self._advantages: AdvantageFunction = self._estimator.function
        elif config.advantage in RUNNING:  # ``over_running_baselines`` makes the advantages
            self.asks = frozenset({"metadata"} if config.by_role else ())
        elif not config.by_critic:  # with a critic, ``token_advantages`` makes the advantages
            self._advantages = find_function(config.advantage, "advantage")
            given = OWN_ARGUMENTS["advantage"]
            self.asks = check_call(self._advantages, given, OFFERED, path=config.advantage, setting="advantage")
        if config.advantage == "pass_at_k":
            self._advantages = partial(pass_at_k, k=config.pass_at_k.k)
        self._whiten = config.whiten if config.whiten is not None else bool(self._estimator and self._estimator.whiten)
        self.by_token = config.kl.reward_by == "token" or (config.gamma < 1 and not config.by_critic)
        """True: the advantages of samples are discounted, charged for the divergence and whitened by
        ``with_token_returns``.
        """

    # ---- advantages, [N]

    def shaped_rewards(
        self,
        rewards_N: Tensor,
        lengths_N: Tensor,
        *,
        max_tokens: int,
        kl_N: Tensor | None = None,
        kl_scale: float = 1.0,
    ) -> Tensor:
        """Return the rewards less the config's penalties: for overlong responses, and for ``kl_N``, each sample's
        summed KL (nats).
        """
        if self.config.overlong.buffer:
            rewards_N = rewards_N + self.config.overlong.penalty * overlong_penalty(
                lengths_N, max_tokens=max_tokens, buffer=self.config.overlong.buffer
            )
        if kl_N is not None:
            rewards_N = rewards_N - kl_scale * self.config.kl.reward_coef * kl_N
        return rewards_N

    def advised(self, tokens: Tokens, log_probs_T: Tensor) -> Tokens:
        """Return the tokens with the distillation term in their advantages, for a student with ``log_probs_T``.

        The student is the policy of this moment: with log-probs from before the step, the gradient would be that of
        KL(pi || teacher) - KL(pi || pi_old), which pushes the policy away from where the step began.
        """
        if not self.config.distill.coef or self.config.distill.loss != "token":
            return tokens
        teacher_T = _teacher(tokens) if self.config.needs_teacher else _reference(tokens)
        distilled_T = distillation_advantages(log_probs_T, teacher_T, tokens.mask_T)
        return replace(tokens, advantages_T=tokens.advantages_T + self.config.distill.coef * distilled_T)

    def advantages(
        self,
        rewards_N: Tensor,
        groups_N: Tensor,
        lengths_N: Tensor,
        trainable_N: Tensor,
        *,
        parts: RewardParts | None = None,
        truncated_N: Tensor | None = None,
        metadata: Sequence[Mapping[str, object]] = (),
    ) -> Tensor:
        """Return one advantage per sample, whitened over the trainable tokens of the step if the config whitens.

        ``parts``: None or without names = the rewards have no parts. ``truncated_N``, ``metadata``: for an estimator
        that asks for them.
        Raises ValueError if no sample has a part that the config weighs, and for a result of another shape.
        """
        if self.config.advantage == "gdpo" and (self.config.gdpo.weights or (parts and parts.names)):
            advantages_N = self._of_parts(parts, groups_N)
        elif self._estimator is not None:
            # opo weighs by the length of the score, so tokens of tools do not count.
            advantages_N = self._advantages(rewards_N, groups_N, lengths_N=trainable_N)
        else:
            named = {} if parts is None else dict(zip(parts.names, parts.values_NK.unbind(1), strict=True))
            offered = {"lengths_N": lengths_N, "truncated_N": truncated_N, "parts": named, "metadata": list(metadata)}
            advantages_N = self._advantages(rewards_N, groups_N, **{name: offered[name] for name in sorted(self.asks)})
            if not isinstance(advantages_N, Tensor) or advantages_N.shape != rewards_N.shape:
                got = [*advantages_N.shape] if isinstance(advantages_N, Tensor) else type(advantages_N).__name__
                raise ValueError(
                    f"advantage {self.config.advantage}: want a tensor of shape {[*rewards_N.shape]}, got {got}"
                )
        return self._whitened(advantages_N, trainable_N)

    def over_running_baselines(
        self,
        rewards_N: Tensor,
        trainable_N: Tensor,
        metadata: Sequence[Mapping[str, object]],
        baselines: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, float]]:
        """Return (one advantage per sample, whitened if the config whitens; the baselines after the step). For ``rae``.

        Raises ValueError if no sample has the metadata that the config names as the role.
        """
        roles = roles_of(metadata, self.config.rae.role, num_samples=len(rewards_N))
        advantages_N, after = over_baselines(rewards_N, roles, baselines, decay=self.config.rae.decay)
        return self._whitened(advantages_N, trainable_N), after

    def _whitened(self, advantages_N: Tensor, trainable_N: Tensor) -> Tensor:
        """Return the advantages of samples as the loss gets them, unless ``with_token_returns`` completes them."""
        return whitened(advantages_N, trainable_N) if self._whiten and not self.by_token else advantages_N

    def _of_parts(self, parts: RewardParts | None, groups_N: Tensor) -> Tensor:
        names = parts.names if parts else ()
        # ``a.b`` is a part of ``a``, which contains it.
        weights = self.config.gdpo.weights or {name: 1.0 for name in names if name.partition(".")[0] == name}
        weighed = [name for name in names if name in weights]
        if parts is None or not weighed:
            raise ValueError(
                f"algorithm.gdpo.weights: want parts of the reward, got {sorted(weights)}; the samples of the "
                f"step have {names}"
            )
        values_NK = parts.values_NK[:, [names.index(name) for name in weighed]]
        return gdpo(
            values_NK, groups_N, torch.tensor([float(weights[name]) for name in weighed], dtype=values_NK.dtype)
        )

    def with_token_returns(
        self, rows: Sequence[Tokens], *, kl_scale: float, summed: Callable[[Tensor], Tensor]
    ) -> list[Tokens]:
        """Return the rows with each token's own advantage: the sample's, discounted, less the divergence to the end;
        then whitened.

        ``rows``: all rows of this rank in the step, with the advantages of the samples, and with ``old_T`` and
        ``reference_T`` where the divergence is in the reward of tokens. Collective.
        """
        gaps = [self._gap(row) for row in rows]
        returns = self._returns if self.config.gamma == 1 else self._discounted
        values = returns(rows, gaps, scale=kl_scale * self.config.kl.reward_coef, summed=summed)
        if self._whiten:
            moments = summed(
                torch.stack([masked_moments(v_T, row.mask_T) for v_T, row in zip(values, rows, strict=True)]).sum(0)
            )
            values = [whitened(value_T, row.mask_T, moments) for value_T, row in zip(values, rows, strict=True)]
        return [
            replace(row, advantages_T=value_T.to(row.advantages_T.dtype))
            for value_T, row in zip(values, rows, strict=True)
        ]

    def _gap(self, row: Tokens) -> Tensor:
        """Return the divergence that each token is charged for, nats; 0 where masked, and if it is not in the reward of
        tokens.
        """
        if self.config.kl.reward_by != "token":
            return torch.zeros_like(row.advantages_T)
        return torch.where(row.mask_T, _old(row) - _reference(row), 0.0)

    @staticmethod
    def _returns(
        rows: Sequence[Tokens], gaps: Sequence[Tensor], *, scale: float, summed: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        parts = [
            token_returns.sums_and_owners(gap_T, row.mask_T, row.sample_T, *row.by_sequence)
            for gap_T, row in zip(gaps, rows, strict=True)
        ]
        sums_M, owners_M = summed(torch.stack(parts).sum(0)).unbind()
        later_M = token_returns.later_sums(sums_M, owners_M)
        return [
            row.advantages_T.double()
            - scale * token_returns.divergences_to_go(gap_T, row.mask_T, row.by_sequence[0], sums_M, later_M)
            for gap_T, row in zip(gaps, rows, strict=True)
        ]

    def _discounted(
        self, rows: Sequence[Tokens], gaps: Sequence[Tensor], *, scale: float, summed: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        gamma, values = self.config.gamma, []
        parts = [
            token_returns.discounted_sums(gap_T, row.mask_T, row.sample_T, *row.by_sequence, gamma=gamma)
            for gap_T, row in zip(gaps, rows, strict=True)
        ]
        ahead = token_returns.discounted(summed(torch.stack(parts).sum(0)), gamma=gamma)
        for gap_T, row in zip(gaps, rows, strict=True):
            factor_T, charge_T = token_returns.discounted_to_go(
                gap_T, row.mask_T, row.by_sequence[0], ahead, gamma=gamma
            )
            values.append(factor_T * row.advantages_T.double() - scale * charge_T)
        return values

    def turn_advantages(self, rewards_N: Tensor, groups_N: Tensor, turns: TurnColumns, *, gamma: float) -> Tensor:
        """Return one advantage per turn, whitened over the trainable tokens of the step if the config whitens."""
        place = (rewards_N, groups_N, turns.rewards_C, turns.samples_C)
        advantages_C = turn_advantages(*place, advantage=self.config.advantage, gamma=gamma)
        return whitened(advantages_C, turns.trainable_C) if self._whiten else advantages_C

    # ---- correction

    def coupled(
        self, rows: Sequence[Tokens], *, summed: Callable[[Tensor], Tensor], gathered: Callable[[Tensor], Tensor]
    ) -> Coupled:
        """Return the coupled values of one update, from the ``old_T`` of ``rows``, this rank's rows. Collective through
        the callables.

        ``summed(x)``: the sum of a float64 tensor over the ranks. ``gathered(x_M)``: the ranks' 1-D float64 tensors,
        concatenated.
        """
        config, sums, cut, floor, covariance = self.config, None, math.inf, -math.inf, None
        by_covariance = config.loss in BY_COVARIANCE
        rows = [self.advised(row, _old(row)) for row in rows] if config.m2.limit or by_covariance else rows
        if config.weight.self_normalise:
            level = str(config.weight.level)
            parts = [
                weight_sums(self._weights(row, _old(row)), row.mask_T, *row.by_sequence, level=level) for row in rows
            ]
            sums = summed(torch.stack(parts).sum(0))
        if config.m2.limit:
            counted = [
                (self._m2_counted(row, delta_T := log_ratio(_old(row), row.rollout_T, row.mask_T)), delta_T)
                for row in rows
            ]
            squares = [delta_T[counted_T].double().square() for counted_T, delta_T in counted]
            cut = rejection.second_moment_cut(gathered(torch.cat(squares)), config.m2.limit)
        if config.top_entropy < 1:
            floor = policy_losses.top_cut(
                gathered(torch.cat([_old_entropy(row)[row.mask_T].double() for row in rows])), config.top_entropy
            )
        if by_covariance:
            covariance = self._covariance_cut(rows, summed=summed, gathered=gathered)
        return Coupled(weight_sums=sums, m2_cut=cut, entropy_floor=floor, covariance=covariance)

    def _covariance_cut(
        self, rows: Sequence[Tokens], *, summed: Callable[[Tensor], Tensor], gathered: Callable[[Tensor], Tensor]
    ) -> policy_losses.CovarianceCut:
        """Return the choice of kl_cov (the largest covariances) or of clip_cov (a draw from those within its bounds).
        Collective.
        """
        config = self.config
        parts = [policy_losses.covariance_sums(_old(row), row.advantages_T, row.mask_T) for row in rows]
        sums = summed(torch.stack(parts).sum(0))
        means = sums[1:] / sums[0].clamp(min=1)
        values = [policy_losses.covariances(_old(row), row.advantages_T, row.mask_T, means) for row in rows]
        if config.loss == "kl_cov":
            lowest = policy_losses.top_cut(
                gathered(torch.cat([v_T[row.mask_T] for v_T, row in zip(values, rows, strict=True)])),
                config.covariance.share,
            )
            return policy_losses.CovarianceCut(
                means=means, low=math.nextafter(lowest, -math.inf), high=math.inf, last_draw=math.inf
            )
        cut = policy_losses.CovarianceCut(
            means=means, low=config.covariance.low, high=config.covariance.high, last_draw=math.inf
        )
        drawn = [
            _draws(row)[policy_losses.chosen(v_T, _draws(row), row.mask_T, cut)]
            for v_T, row in zip(values, rows, strict=True)
        ]
        last = policy_losses.last_draw(
            gathered(torch.cat(drawn)), max(1, int(config.covariance.share * float(sums[0])))
        )
        return replace(cut, last_draw=last)

    def _m2_counted(self, tokens: Tokens, delta_T: Tensor) -> Tensor:
        """Return a mask of the tokens with a limited second moment."""
        if self.config.m2.tokens == "all":
            return tokens.mask_T
        return rejection.harmful(delta_T, tokens.advantages_T, tokens.mask_T)

    def _weights(self, tokens: Tokens, compared_T: Tensor) -> ImportanceWeights:
        """Return the bounded weights of ``compared_T`` (no gradient) against mu; with gmpo their geometric mean over a
        response.
        """
        config, mask_T = self.config, tokens.mask_T
        assert config.weight.low is not None and config.weight.action is not None
        delta_T = log_ratio(compared_T, tokens.rollout_T, mask_T)
        raw_T = raw_weights(delta_T, mask_T, *tokens.by_sequence, level=self._level)
        weights = bounded(
            raw_T, mask_T, low=config.weight.low, high=config.weight.high or math.inf, action=config.weight.action
        )
        return geometric_means(weights, mask_T, *tokens.by_sequence) if config.loss == "gmpo" else weights

    def _rejected(self, tokens: Tokens, theta_T: Tensor, compared_T: Tensor, coupled: Coupled) -> dict[str, Tensor]:
        """Return the tokens that each rule rejects, by the name of the rule. ``theta_T``: log-probs of the trained
        policy, detached.
        """
        config, mask_T = self.config, tokens.mask_T
        place = (mask_T, *tokens.by_sequence)
        rejected: dict[str, Tensor] = {}
        if config.reject.rules or config.reject.veto:
            delta_T = log_ratio(compared_T, tokens.rollout_T, mask_T)
            for rule in config.reject.parsed:
                rejected[rule.name] = rejection.outside(
                    delta_T, *place, metric=rule.metric, span=rule.span, low=rule.low, high=rule.high
                )
            for path, function in self._own_rejects.items():
                name = path.partition(":")[2]
                found_T = _chosen_by(path, function(delta_T, *place), mask_T)
                rejected[name] = found_T | rejected[name] if name in rejected else found_T
            if config.reject.veto:
                rejected["veto"] = rejection.vetoed(delta_T, *place, threshold=config.reject.veto)
        if config.reject.binary_kl:
            rejected["binary_kl"] = rejection.binary_kl_outside(
                compared_T, tokens.rollout_T, mask_T, limit=config.reject.binary_kl
            )
        if config.reject.opsm:
            rejected["opsm"] = rejection.opsm(
                theta_T, tokens.rollout_T, tokens.advantages_T, *place, threshold=config.reject.opsm
            )
        if config.m2.limit:
            assert config.m2.keep_low is not None and config.m2.keep_high is not None
            start_T = log_ratio(_old(tokens), tokens.rollout_T, mask_T)
            may_T = rejection.outside_band(
                start_T, self._m2_counted(tokens, start_T), low=config.m2.keep_low, high=config.m2.keep_high
            )
            rejected["m2"] = rejection.beyond(start_T, may_T, coupled.m2_cut)
        return rejected

    # ---- loss

    def token_loss(self, log_probs_T: Tensor, tokens: Tokens, coupled: Coupled) -> TokenLoss:
        """Return the weighted policy loss of every token; 0 where masked or rejected."""
        start_T = log_probs_T.detach() if tokens.old_T is None else tokens.old_T
        compared_T = self._compared(log_probs_T, tokens, start_T)
        anchor_T = tokens.rollout_T if self.config.anchor == "rollout" else compared_T
        if coupled.covariance is not None:
            value_T = policy_losses.covariances(
                _old(tokens), tokens.advantages_T, tokens.mask_T, coupled.covariance.means
            )
            tokens = replace(
                tokens, chosen_T=policy_losses.chosen(value_T, _draws(tokens), tokens.mask_T, coupled.covariance)
            )
        made = self.loss(log_probs_T, anchor_T, tokens, self.config)
        for name, value_T in made.metrics.items():
            if value_T.shape != log_probs_T.shape:
                raise ValueError(
                    f"loss {self.config.loss}: metrics.{name}: want shape {[*log_probs_T.shape]}, got "
                    f"{[*value_T.shape]}"
                )
        loss_T, weights = made.loss_T, None
        if self.config.weight.level != "none":
            weights = self._weights(tokens, compared_T)
            if coupled.weight_sums is not None:
                weights = self_normalised(weights, tokens.mask_T, coupled.weight_sums)
            loss_T = weights.weight_T * loss_T
        rejected = self._rejected(tokens, log_probs_T.detach(), compared_T, coupled)
        left_out_T: Tensor | None = None
        if self.config.top_entropy < 1:
            left_out_T = policy_losses.low_entropy(_old_entropy(tokens), tokens.mask_T, coupled.entropy_floor)
            loss_T = torch.where(left_out_T, 0.0, loss_T)
        loss = TokenLoss(
            loss_T=loss_T,
            clipped_T=made.clipped_T,
            weights=weights,
            rejected=rejected,
            left_out_T=left_out_T,
            metrics=made.metrics,
        )
        return replace(loss, loss_T=torch.where(tokens.mask_T & ~loss.rejected_T, loss_T, 0.0))

    def _compared(self, log_probs_T: Tensor, tokens: Tokens, start_T: Tensor) -> Tensor:
        """Return log-probs of the policy in the numerator of the weight: proximal if the loss is anchored there, else
        the trained one.
        """
        if self.config.anchor != "proximal":
            return log_probs_T.detach()
        if self.config.proximal == "loglinear":
            return loglinear_proximal(log_probs_T, tokens.rollout_T, tokens.mask_T, tokens.lag_T)
        return start_T

    def total(
        self,
        log_probs_T: Tensor,
        entropy_T: Tensor,
        tokens: Tokens,
        denominators: Denominators,
        coupled: Coupled,
        *,
        kl_scale: float = 1.0,
        entropy_coef: float | None = None,
        listed_TK: Tensor | None = None,
    ) -> tuple[Tensor, TokenLoss, Tensor | None]:
        """Return (the minimised scalar, the policy loss of every token, every token's divergence from the reference or
        None).

        The scalar is ``loss + kl.coef KL - entropy.coef H``, and ``+ distill.coef KL`` of the tokens that a teacher
        listed (``listed_TK``: their log-probs under the trained policy), each aggregated in the same way: this row's
        part of the update's number.

        ``entropy_coef``: the present one, which adapts; None = that of the settings.
        """
        config = self.config
        loss = self.token_loss(log_probs_T, tokens, coupled)
        place = (tokens.mask_T, tokens.sample_T, denominators)
        mode = self.mode
        total = aggregate(loss.loss_T, *place, mode=mode)
        divergence_T: Tensor | None = None
        if tokens.reference_T is not None:
            # For the metric and the adaptive coefficient: k3 whatever the loss uses, because it is never negative and
            # has no gradient here.
            divergence_T = kl_T(log_probs_T.detach(), tokens.reference_T, tokens.mask_T, estimator="k3")
        if config.kl.coef:
            assert tokens.reference_T is not None
            if config.kl.corrected:
                penalty_T = corrected_kl(
                    log_probs_T, tokens.reference_T, tokens.rollout_T, tokens.mask_T, estimator=config.kl.estimator
                )
            else:
                penalty_T = kl_T(log_probs_T, tokens.reference_T, tokens.mask_T, estimator=config.kl.estimator)
            total = total + kl_scale * config.kl.coef * aggregate(penalty_T, *place, mode=mode)
        if self.by_listed:
            total = total + config.distill.coef * aggregate(
                self.listed_divergence(tokens, listed_TK), *place, mode=mode
            )
        if entropy_coef is None:
            entropy_coef = config.entropy.coef
        if entropy_coef:
            total = total - entropy_coef * aggregate(entropy_T, *place, mode=mode)
        return total, loss, divergence_T

    @property
    def by_listed(self) -> bool:
        """True if the loss has a divergence over the tokens that the teacher listed."""
        return self.config.distill.loss != "token"

    def listed_divergence(self, tokens: Tokens, listed_TK: Tensor | None) -> Tensor:
        """Return the divergence from the teacher over its listed tokens, [T]."""
        assert listed_TK is not None and tokens.teacher_top_TK is not None, "a divergence over listed tokens needs them"
        return top_k_divergence(listed_TK, tokens.teacher_top_TK, tokens.mask_T, kind=self.config.distill.loss)


def _own(path: str, setting: str) -> Callable[..., Any]:
    """Return the function at an import path. Raises ValueError for one that cannot be called with the arguments of the
    setting.
    """
    function = find_function(path, setting)
    check_call(function, OWN_ARGUMENTS[setting], path=path, setting=setting)
    return function


def sequence_weight_sums(log_probs_T: Tensor, tokens: Tokens) -> Tensor:
    """Return ``(sum W, sum W^2, number of sequences)`` of the row's sequence ratios pi / mu, float64 [3]; ``ess_lr`` is
    made of them.
    """
    place = (tokens.mask_T, *tokens.by_sequence)
    delta_T = log_ratio(log_probs_T.detach(), tokens.rollout_T, tokens.mask_T).double()
    weights_N = sequence_sums(delta_T, *place).clamp(-20, 20).exp()
    there_N = sequence_sums(torch.ones_like(delta_T), *place) > 0
    weights_N = torch.where(there_N, weights_N, 0.0)
    return torch.stack([weights_N.sum(), weights_N.square().sum(), there_N.sum().double()])


def _chosen_by(path: str, found_T: object, mask_T: Tensor) -> Tensor:
    """Return the tokens that a rule by import path rejects. Raises ValueError for a result of another kind."""
    if not isinstance(found_T, Tensor) or (found_T.shape, found_T.dtype) != (mask_T.shape, torch.bool):
        got = f"{found_T.dtype} of {[*found_T.shape]}" if isinstance(found_T, Tensor) else type(found_T).__name__
        raise ValueError(f"reject.rules {path}: want a bool tensor of shape {[*mask_T.shape]}, got {got}")
    return found_T & mask_T


def _old(tokens: Tokens) -> Tensor:
    assert tokens.old_T is not None, "coupled corrections need old_T"
    return tokens.old_T


def _reference(tokens: Tokens) -> Tensor:
    assert tokens.reference_T is not None, "a divergence needs reference_T"
    return tokens.reference_T


def _teacher(tokens: Tokens) -> Tensor:
    assert tokens.teacher_T is not None, "distillation from an engine needs teacher_T"
    return tokens.teacher_T


def _old_entropy(tokens: Tokens) -> Tensor:
    assert tokens.old_entropy_T is not None, "top_entropy needs old_entropy_T"
    return tokens.old_entropy_T


def _draws(tokens: Tokens) -> Tensor:
    return policy_losses.draws(tokens.rollout_T, tokens.mask_T, *tokens.by_sequence)
