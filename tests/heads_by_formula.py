"""The functions of ``tidemill.learner.kernels.triton_kernels`` in torch's operations: a reference, and a
stand-in without Triton.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotated(q: Tensor, k: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _turned(q, cos_TF, sin_TF, interleaved), _turned(k, cos_TF, sin_TF, interleaved)


def _turned(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, interleaved: bool) -> Tensor:
    pairs = cos_TF.shape[1]
    turns, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    first, second = (turns[..., ::2], turns[..., 1::2]) if interleaved else (turns[..., :pairs], turns[..., pairs:])
    cosine, sine = cos_TF[:, None].to(x.dtype), sin_TF[:, None].to(x.dtype)
    both = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat([torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest], -1)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
