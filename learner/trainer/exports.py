"""SHA-256 over exported weights."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest_of(exported: Iterable[tuple[str, Tensor]]) -> str:
    """Return SHA-256 over the names and the SHA-256 of each tensor, in any order. No tensor is kept for it."""
    sums = {
        name: hashlib.sha256(tensor.contiguous().cpu().view(torch.uint8).numpy().data).digest()
        for name, tensor in exported
    }
    total = hashlib.sha256()
    for name, of_tensor in sorted(sums.items()):
        total.update(name.encode() + of_tensor)
    return total.hexdigest()
