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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tidemill.bus.system.functions import check_call, find_function
from tidemill.learner.algorithms import correction, policy_losses, token_returns
from tidemill.learner.algorithms.advantages import (
    ADVANTAGES,
    WHITENED,
    distillation_advantages,
    gdpo,
    over_baselines,
    overlong_penalty,
    roles_of,
    whitened,
    whitened_rows,
)
from tidemill.learner.algorithms.aggregation import Denominators, Reducer, TokenLoss, aggregate
from tidemill.learner.algorithms.choices import BY_COVARIANCE, OFFERED, OWN_ARGUMENTS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.kl import corrected_kl, kl_T, top_k_divergence
from tidemill.learner.algorithms.policy_losses import LOSS_FUNCTIONS, CovarianceCut
from tidemill.learner.algorithms.tokens import (
    DELTA_BOUND,
    RewardParts,
    Tokens,
    TurnColumns,
    given,
    log_ratio,
    sequence_sums,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupled:
    """Values for the correction of a token that depend on all tokens of its update, on all ranks."""

    weight_sums: Tensor | None = None
    """(sum of the weights, their number): the weights are divided by their mean; None = they are not."""
    m2_cut: float = math.inf
    """Tokens with a squared log-ratio of at least this are rejected."""
    entropy_floor: float = -math.inf
    """Tokens with a smaller entropy are left out."""
    covariance: CovarianceCut | None = None
    """Choice of the tokens of clip_cov and kl_cov; None = another loss."""


AdvantageFunction = Callable[..., Tensor]
"""``(rewards_N, groups_N, *, ...) -> advantages_N``: signature of an estimator by import path, with those of
``OFFERED`` that it names:

    lengths_N    tokens of each response
    truncated_N  bool; True where the response ran into its length limit
    parts        reward parts by name, [N] each; NaN where a sample has no such part
    metadata     metadata of each sample, N maps
"""


class Objective:
    """The functions that a config chooses, bound to its settings."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Raises ValueError for a function by import path that cannot be imported, or cannot be called."""
        self.config = config
        assert config.loss is not None and config.weight.level is not None and config.aggregation is not None
        self.mode: str | Reducer = _own(config.aggregation, "aggregation")
        """The aggregation: a name, or a function of one's own."""
        self._level: str | correction.WeightFunction = _own(config.weight.level, "weight.level")
        self._own_rejects: dict[str, correction.RejectFunction] = {
            path: _own(path, "reject.rules") for path in config.reject.functions
        }
        self.loss = LOSS_FUNCTIONS.get(config.loss) or _own(config.loss, "loss")
        self._advantages: AdvantageFunction | None = ADVANTAGES.get(config.advantage)
        self.asks: frozenset[str] = frozenset({"metadata"} if config.by_role else ())
        """Arguments of ``OFFERED`` that the estimator gets, by its own parameters or its roles."""
        if ":" in config.advantage:
            self._advantages = find_function(config.advantage, "advantage")
            arguments = OWN_ARGUMENTS["advantage"]
            self.asks = check_call(self._advantages, arguments, OFFERED, path=config.advantage, setting="advantage")
        # With a critic, ``with_token_advantages`` decides: its default is another one.
        self._whiten = config.advantage in WHITENED if config.whiten is None else config.whiten
        self.by_token = config.kl.reward_by == "token" or (config.gamma < 1 and not config.by_critic)
        """True: ``with_token_returns`` makes the advantages of tokens, whitened, from those of samples."""

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
        """Return the rewards less the penalties of overlong responses and of ``kl_N``, each sample's KL (nats)."""
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
        teacher_T = given(tokens.teacher_T if self.config.needs_teacher else tokens.reference_T)
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
        name, estimator = self.config.advantage, self._advantages
        assert estimator is not None, f"{name} has functions of its own"
        # Without parts, the reward is the only part of gdpo: then it is among the others below.
        if name == "gdpo" and (self.config.gdpo.weights or (parts and parts.names)):
            advantages_N = self._of_parts(parts, groups_N)
        elif name == "opo":  # by the length of the score: tokens of tools do not count
            advantages_N = estimator(rewards_N, groups_N, trainable_N)
        elif name == "pass_at_k":
            advantages_N = estimator(rewards_N, groups_N, k=self.config.pass_at_k.k)
        else:
            named = {} if parts is None else dict(zip(parts.names, parts.values_NK.unbind(1), strict=True))
            offered = {"lengths_N": lengths_N, "truncated_N": truncated_N, "parts": named, "metadata": list(metadata)}
            advantages_N = estimator(rewards_N, groups_N, **{name: offered[name] for name in sorted(self.asks)})
            if not isinstance(advantages_N, Tensor) or advantages_N.shape != rewards_N.shape:
                got = [*advantages_N.shape] if isinstance(advantages_N, Tensor) else type(advantages_N).__name__
                raise ValueError(f"advantage {name}: want a tensor of shape {[*rewards_N.shape]}, got {got}")
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
        weights_K = torch.tensor([float(weights[name]) for name in weighed], dtype=values_NK.dtype)
        return gdpo(values_NK, groups_N, weights_K)

    def with_token_returns(
        self, rows: Sequence[Tokens], *, kl_scale: float, summed: Callable[[Tensor], Tensor]
    ) -> list[Tokens]:
        """Return the rows with each token's advantage: the sample's, discounted, less its divergence to go; whitened.

        ``rows``: all rows of this rank in the step, with the advantages of the samples, and with ``old_T`` and
        ``reference_T`` where the divergence is in the reward of tokens. Collective.
        """
        scale = kl_scale * self.config.kl.reward_coef
        gaps = [self._gap(row) for row in rows]
        values = token_returns.advantages_of_tokens(rows, gaps, gamma=self.config.gamma, scale=scale, summed=summed)
        if self._whiten:
            values = whitened_rows(values, [row.mask_T for row in rows], summed)
        return [
            replace(row, advantages_T=value_T.to(row.advantages_T.dtype))
            for value_T, row in zip(values, rows, strict=True)
        ]

    def _gap(self, row: Tokens) -> Tensor:
        """Return the divergence that each token is charged for, nats; 0 where masked, or where tokens pay nothing."""
        if self.config.kl.reward_by != "token":
            return torch.zeros_like(row.advantages_T)
        return torch.where(row.mask_T, given(row.old_T) - given(row.reference_T), 0.0)

    def turn_advantages(self, rewards_N: Tensor, groups_N: Tensor, turns: TurnColumns, *, gamma: float) -> Tensor:
        """Return one advantage per turn, whitened over the trainable tokens of the step if the config whitens."""
        place = (rewards_N, groups_N, turns.rewards_C, turns.samples_C)
        advantages_C = token_returns.turn_advantages(*place, advantage=self.config.advantage, gamma=gamma)
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
        # Which tokens are harmful, or have a large covariance, depends on the advantages that the loss will see.
        rows = [self.advised(row, given(row.old_T)) for row in rows] if config.m2.limit or by_covariance else rows
        if config.weight.self_normalise:
            level = str(config.weight.level)
            weights = [(self._weights(row, given(row.old_T)), row) for row in rows]
            parts = [correction.weight_sums(own, row.mask_T, *row.by_sequence, level=level) for own, row in weights]
            sums = summed(torch.stack(parts).sum(0))
        if config.m2.limit:
            deltas = [log_ratio(given(row.old_T), row.rollout_T, row.mask_T) for row in rows]
            counted = [delta_T[self._m2_counted(row, delta_T)] for row, delta_T in zip(rows, deltas, strict=True)]
            squares_M = torch.cat([delta_M.double().square() for delta_M in counted])
            cut = correction.second_moment_cut(gathered(squares_M), config.m2.limit)
        if config.top_entropy < 1:
            entropies_M = torch.cat([given(row.old_entropy_T)[row.mask_T].double() for row in rows])
            floor = policy_losses.top_cut(gathered(entropies_M), config.top_entropy)
        if by_covariance:
            covariance = policy_losses.covariance_cut(rows, config, summed=summed, gathered=gathered)
        return Coupled(weight_sums=sums, m2_cut=cut, entropy_floor=floor, covariance=covariance)

    def _m2_counted(self, tokens: Tokens, delta_T: Tensor) -> Tensor:
        """Return a mask of the tokens with a limited second moment."""
        if self.config.m2.tokens == "all":
            return tokens.mask_T
        return correction.harmful(delta_T, tokens.advantages_T, tokens.mask_T)

    def _weights(self, tokens: Tokens, compared_T: Tensor) -> correction.ImportanceWeights:
        """Return the bounded weights of ``compared_T`` against mu; with gmpo their geometric means over responses."""
        weight, place = self.config.weight, (tokens.mask_T, *tokens.by_sequence)
        assert weight.action is not None
        low, high = weight.bounds
        delta_T = log_ratio(compared_T, tokens.rollout_T, tokens.mask_T)
        raw_T = correction.raw_weights(delta_T, *place, level=self._level)
        weights = correction.bounded(raw_T, tokens.mask_T, low=low, high=high, action=weight.action)
        return correction.geometric_means(weights, *place) if self.config.loss == "gmpo" else weights

    def rejected(self, tokens: Tokens, theta_T: Tensor, compared_T: Tensor, coupled: Coupled) -> dict[str, Tensor]:
        """Return the tokens that each rule rejects, by its name. ``theta_T``: log-probs of the policy, detached."""
        config, mask_T = self.config, tokens.mask_T
        place = (mask_T, *tokens.by_sequence)
        rejected: dict[str, Tensor] = {}
        if config.reject.rules or config.reject.veto:
            delta_T = log_ratio(compared_T, tokens.rollout_T, mask_T)
            for rule in config.reject.parsed:
                rejected[rule.name] = correction.outside(
                    delta_T, *place, metric=rule.metric, span=rule.span, low=rule.low, high=rule.high
                )
            for path, function in self._own_rejects.items():
                name = path.partition(":")[2]
                chosen_T = _chosen_by(path, function(delta_T, *place), mask_T)
                rejected[name] = chosen_T | rejected[name] if name in rejected else chosen_T
            if config.reject.veto:
                rejected["veto"] = correction.vetoed(delta_T, *place, threshold=config.reject.veto)
        if config.reject.binary_kl:
            rejected["binary_kl"] = correction.binary_kl_outside(
                compared_T, tokens.rollout_T, mask_T, limit=config.reject.binary_kl
            )
        if config.reject.opsm:
            rejected["opsm"] = correction.opsm(
                theta_T, tokens.rollout_T, tokens.advantages_T, *place, threshold=config.reject.opsm
            )
        if config.m2.limit:
            low, high = config.m2.kept
            start_T = log_ratio(given(tokens.old_T), tokens.rollout_T, mask_T)
            may_T = correction.outside_band(start_T, self._m2_counted(tokens, start_T), low=low, high=high)
            rejected["m2"] = correction.beyond(start_T, may_T, coupled.m2_cut)
        return rejected

    # ---- loss

    def token_loss(self, log_probs_T: Tensor, tokens: Tokens, coupled: Coupled) -> TokenLoss:
        """Return the weighted policy loss of every token; 0 where masked or rejected."""
        start_T = log_probs_T.detach() if tokens.old_T is None else tokens.old_T
        compared_T = self._compared(log_probs_T, tokens, start_T)
        anchor_T = tokens.rollout_T if self.config.anchor == "rollout" else compared_T
        if coupled.covariance is not None:
            tokens = replace(tokens, chosen_T=policy_losses.chosen(tokens, coupled.covariance))
        made = self.loss(log_probs_T, anchor_T, tokens, self.config)
        for name, value_T in made.metrics.items():
            if value_T.shape != log_probs_T.shape:
                got = [*value_T.shape]
                raise ValueError(
                    f"loss {self.config.loss}: metrics.{name}: want shape {[*log_probs_T.shape]}, got {got}"
                )
        loss_T, weights = made.loss_T, None
        if self.config.weight.level != "none":
            weights = self._weights(tokens, compared_T)
            if coupled.weight_sums is not None:
                weights = correction.self_normalised(weights, tokens.mask_T, coupled.weight_sums)
            loss_T = weights.weight_T * loss_T
        rejected = self.rejected(tokens, log_probs_T.detach(), compared_T, coupled)
        left_out_T: Tensor | None = None
        if self.config.top_entropy < 1:
            left_out_T = policy_losses.low_entropy(given(tokens.old_entropy_T), tokens.mask_T, coupled.entropy_floor)
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
        """Return the numerator of the weight: the proximal policy if the loss has that anchor, else the trained one."""
        if self.config.anchor != "proximal":
            return log_probs_T.detach()
        if self.config.proximal == "loglinear":
            return policy_losses.loglinear_proximal(log_probs_T, tokens.rollout_T, tokens.mask_T, tokens.lag_T)
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
        config, mask_T = self.config, tokens.mask_T
        loss = self.token_loss(log_probs_T, tokens, coupled)

        def aggregated(values_T: Tensor) -> Tensor:
            return aggregate(values_T, mask_T, tokens.sample_T, denominators, mode=self.mode)

        total = aggregated(loss.loss_T)
        divergence_T: Tensor | None = None
        if tokens.reference_T is not None:
            # For the metric and the adaptive coefficient: k3 whatever the loss uses, because it is never negative and
            # has no gradient here.
            divergence_T = kl_T(log_probs_T.detach(), tokens.reference_T, mask_T, estimator="k3")
        if config.kl.coef:
            place, estimator = (log_probs_T, given(tokens.reference_T)), config.kl.estimator
            if config.kl.corrected:
                penalty_T = corrected_kl(*place, tokens.rollout_T, mask_T, estimator=estimator)
            else:
                penalty_T = kl_T(*place, mask_T, estimator=estimator)
            total = total + kl_scale * config.kl.coef * aggregated(penalty_T)
        if self.by_listed:
            total = total + config.distill.coef * aggregated(self.listed_divergence(tokens, listed_TK))
        if entropy_coef is None:
            entropy_coef = config.entropy.coef
        if entropy_coef:
            total = total - entropy_coef * aggregated(entropy_T)
        return total, loss, divergence_T

    @property
    def by_listed(self) -> bool:
        """True if the loss has a divergence over the tokens that the teacher listed."""
        return self.config.distill.loss != "token"

    def listed_divergence(self, tokens: Tokens, listed_TK: Tensor | None) -> Tensor:
        """Return the divergence from the teacher over its listed tokens, [T]."""
        listed_TK, teacher_TK = given(listed_TK), given(tokens.teacher_top_TK)
        return top_k_divergence(listed_TK, teacher_TK, tokens.mask_T, kind=self.config.distill.loss)


def _own(name: str, setting: str) -> Any:
    """Return the function at an import path; another name as it is. Raises ValueError for one that cannot be called."""
    if ":" not in name:
        return name
    function = find_function(name, setting)
    check_call(function, OWN_ARGUMENTS[setting], path=name, setting=setting)
    return function


def sequence_weight_sums(log_probs_T: Tensor, tokens: Tokens) -> Tensor:
    """Return ``(sum W, sum W^2, number)`` of the row's sequence ratios W = pi / mu, float64 [3], for ``ess_lr``."""
    place = (tokens.mask_T, *tokens.by_sequence)
    delta_T = log_ratio(log_probs_T.detach(), tokens.rollout_T, tokens.mask_T).double()
    weights_N = sequence_sums(delta_T, *place).clamp(-DELTA_BOUND, DELTA_BOUND).exp()
    there_N = sequence_sums(torch.ones_like(delta_T), *place) > 0
    weights_N = torch.where(there_N, weights_N, 0.0)
    return torch.stack([weights_N.sum(), weights_N.square().sum(), there_N.sum().double()])


def _chosen_by(path: str, chosen_T: object, mask_T: Tensor) -> Tensor:
    """Return the tokens that a rule by import path rejects. Raises ValueError for a result of another kind."""
    if not isinstance(chosen_T, Tensor) or (chosen_T.shape, chosen_T.dtype) != (mask_T.shape, torch.bool):
        got = f"{chosen_T.dtype} of {[*chosen_T.shape]}" if isinstance(chosen_T, Tensor) else type(chosen_T).__name__
        raise ValueError(f"reject.rules {path}: want a bool tensor of shape {[*mask_T.shape]}, got {got}")
    return chosen_T & mask_T
