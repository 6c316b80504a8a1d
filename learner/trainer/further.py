"""The loss of heads that predict the tokens behind the next one (MTP).

    for each head k: -log p(token i + k + 1), where that token is a trained one -> mean over heads and tokens

Shape letters: T = tokens of a packed micro-batch.
"""

from functools import partial

import torch
from torch import Tensor

from tidemill.learner.trainer.backend import Policy
from tidemill.learner.trainer.rows import Row


def further_loss(policy: Policy, row: Row, hidden_TH: Tensor, *, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the row's part of the mean over heads and ``tokens`` (trained ones of the minibatch), and its sums.

    Inside ``finish``. Its gradient is that of the heads alone.
    Source: DeepSeek-V3 (arXiv 2412.19437), equations 24 and 25.
    """
    trained_T = row.seen.mask_T | row.demonstrated_T
    assert row.seen.sequence_T is not None
    losses, counts = [], []
    predicts = partial(_predicts, trained_T, row.seen.sequence_T)
    for depth, log_probs_N in enumerate(policy.further_log_probs(row, hidden_TH, predicts), 1):
        losses.append(-log_probs_N.sum())
        counts.append(predicts(depth).sum())
    total = torch.stack(losses).sum()
    sums = {"mtp": total.detach().double(), "mtp_tokens": torch.stack(counts).sum().double()}
    return total / (len(losses) * max(1, tokens)), sums


def _predicts(trained_T: Tensor, sequence_T: Tensor, depth: int) -> Tensor:
    """Return where the token that a head predicts is a trained one of the same sequence."""
    later_T = trained_T.roll(-depth) & (sequence_T == sequence_T.roll(-depth))
    later_T[-depth:] = False
    return later_T
