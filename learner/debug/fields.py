"""Fields of a training step by response token, as a dump has them, of policy and critic.

Source of names and meanings: the training output of slime's debugging page.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tidemill.learner.algorithms.aggregation import TokenLoss
from tidemill.learner.algorithms.objective import Tokens

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
    """Return the fields, with old log-probs and the ratio against them if they are missing. ``first_pass``: the
    record's.
    """
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
