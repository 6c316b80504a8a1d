"""Forward passes of the running rows: weights, keys and values, and rotary angles. Knows no sequence.

Shape letters as in ``scheduler.py``; G = layers with experts, J = experts of a token.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.input_scores import InputScores, Scoring, scores
from tidemill.actors.serving.builtin.slots import KVSlots
from tidemill.actors.serving.builtin.weights import Weights


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
        self.captures = False
        """Keep the experts of the tokens of each pass, as ``experts_BTGJ``."""
        self.experts_BTGJ: NDArray[np.int64] | None = None
        """Experts of the tokens of the last pass: those of a prefill by its contexts, padding included; of a decoding step by its rows."""

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
        x_UTE = self._forward(
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
        x_N1E = self._forward(self.weights, tokens_N1, self._angles(at_N[:, None]), self.slots.decoding(at_N, length))
        return decoder.logits(self.weights, x_N1E[:, 0])

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        """Compute the log-probs of given tokens, keeping no keys and values. Raises ValueError for scores that are NaN."""
        assert self.weights is not None
        longest = max(len(one.tokens) for one in batch)
        angles = self._angles(torch.arange(longest, device=self.device)[None], length=longest)
        return scores(self.weights, batch, angles, version)

    def _forward(self, weights: Weights, tokens_BT: Tensor, rope: tuple[Tensor, Tensor], attention: decoder.Attention) -> Tensor:
        if not self.captures:
            self.experts_BTGJ = None
            return decoder.forward(weights, tokens_BT, rope, attention)
        chosen: list[Tensor] = []
        x_BTE = decoder.forward(weights, tokens_BT, rope, attention, chosen)
        self.experts_BTGJ = torch.stack(chosen, dim=2).cpu().numpy()
        return x_BTE

    def _angles(self, positions_BT: Tensor, *, length: int = 0) -> tuple[Tensor, Tensor]:
        needed = max(self.slots.length, length)
        if self._rope is None or self._rope.length < needed:
            shape = self._shape
            self._rope = decoder.RopeTable(shape.rope, needed, head_dim=shape.head_dim, dtype=self._dtype, device=self.device)
        return self._rope.at(positions_BT)

    def clear(self, *, free: bool) -> None:
        """Drop all keys and values; with ``free``, their memory and that of the angles too."""
        if free:
            self._rope = None
            self.slots.free()
        else:
            self.slots.reset()
