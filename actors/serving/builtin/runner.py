"""Forward passes of the running rows: weights, keys and values, and rotary angles. Knows no sequence.

Shape letters as in ``scheduler.py``.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.serving.builtin import decoder
from actors.serving.builtin.slots import KVSlots
from actors.serving.builtin.weights import Weights


class ModelRunner:
    """One model with a row of keys and values for each running sequence. Used by the decoding thread."""

    def __init__(self, weights: Weights, *, max_running: int, max_context: int) -> None:
        self.weights: Weights | None = weights
        """None from the release of their memory until new ones are set."""
        self.device = weights.device
        self._shape, self._dtype = weights.shape, weights.dtype
        self.slots = KVSlots(
            num_layers=weights.shape.num_layers,
            slots=max_running,
            num_kv_heads=weights.shape.num_kv_heads,
            head_dim=weights.shape.head_dim,
            max_length=max_context,
            dtype=weights.dtype,
            device=weights.device,
        )
        self._rope: decoder.RopeTable | None = None

    def prefill(self, contexts: list[NDArray[np.int32]], prompt_of_R: list[int], *, first_row: int) -> tuple[Tensor, int]:
        """Compute different contexts for the rows from ``first_row`` on, row r with context ``prompt_of_R[r]``.

        Returns the scores of the next token of each row, [R, V], and the number of padded tokens.
        """
        lengths_U = np.array([len(context) for context in contexts])
        tokens_UT = np.zeros((len(contexts), lengths_U.max()), np.int64)
        for row, context in enumerate(contexts):
            tokens_UT[row, : len(context)] = context
        prompt_R = torch.tensor(prompt_of_R, device=self.device)
        self.slots.reserve(tokens_UT.shape[1])
        assert self.weights is not None
        x_UTE = decoder.forward(
            self.weights,
            torch.from_numpy(tokens_UT).to(self.device),
            self._angles(torch.arange(tokens_UT.shape[1], device=self.device)[None]),
            self.slots.prefilling(first_row, prompt_R),
        )
        last_U = torch.from_numpy(lengths_U - 1).to(self.device)
        scores_UV = decoder.logits(self.weights, x_UTE[torch.arange(len(contexts), device=self.device), last_U])
        return scores_UV[prompt_R], int(tokens_UT.size)

    def decode(self, last_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        """Compute the last token of every row, at its position. Returns the scores of the next one, [N, V]."""
        length = int(positions_N.max()) + 1
        self.slots.reserve(length)
        assert self.weights is not None
        at_N = torch.from_numpy(positions_N).to(self.device)
        tokens_N1 = torch.from_numpy(last_N).to(self.device)[:, None]
        x_N1E = decoder.forward(self.weights, tokens_N1, self._angles(at_N[:, None]), self.slots.decoding(at_N, length))
        return decoder.logits(self.weights, x_N1E[:, 0])

    def _angles(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope.length < self.slots.length:
            shape = self._shape
            self._rope = decoder.RopeTable(shape.rope, self.slots.length, head_dim=shape.head_dim, dtype=self._dtype, device=self.device)
        return self._rope.at(positions_BT)

    def clear(self, *, free: bool) -> None:
        """Drop all keys and values; with ``free``, their memory and that of the angles too."""
        if free:
            self._rope = None
            self.slots.free()
        else:
            self.slots.reset()
