"""Forward passes of the running rows: weights, keys and values, and rotary angles. Knows no sequence.

Each running sequence has a row of keys and values, rows 0 .. n-1 in use and kept compact. Rows grow together, doubling,
up to the longest context: memory follows the lengths in use, not the longest possible ones.

Shape letters as in ``scheduler.py``. Of keys and values: S = slots, L = positions, K = key/value heads, G = query heads
per key/value head, H = K * G, D = head size, N = running rows, U = prompts of a prefill, T = tokens per prompt
(padded), R = rows of a prefill (R >= U: rows may share a prompt). Of experts: G = layers with experts, J = experts of a
token.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.input_scores import InputScores, Scoring, scores
from tidemill.actors.serving.builtin.weights import Weights

FIRST_LENGTH = 128
"""Positions allocated at first; doubled as needed."""


class KVSlots:
    """Keys and values, [layers, 2, S, L, K, D]. Unused positions are finite: a masked NaN would still spread."""

    def __init__(self, weights: Weights, slots: int, max_length: int) -> None:
        shape = weights.shape
        self._sizes = (shape.num_layers, 2, slots, shape.num_kv_heads, shape.head_dim)
        self._dtype, self._device = weights.dtype, weights.device
        self.max_length = max_length
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._rows_S = torch.arange(slots, device=weights.device)
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the memory of long rows back."""
        self._allocate(min(FIRST_LENGTH, self.max_length))

    def free(self) -> None:
        """Free all memory; ``reset`` comes before the next use."""
        self.length = 0
        self.layers.clear()
        self._store = torch.zeros(0, dtype=self._dtype, device=self._device)

    @property
    def size_bytes(self) -> int:
        """Bytes allocated now, unused positions included."""
        return self._store.untyped_storage().nbytes()

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions per row."""
        assert length <= self.max_length, (length, self.max_length)
        if length > self.length:
            old, old_length = self._store, self.length
            self._allocate(min(max(length, 2 * old_length), self.max_length))
            self._store[:, :, :, :old_length] = old

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row onto another one (compaction, or a prompt shared with a running sequence)."""
        self._store[:, :, target, :length] = self._store[:, :, source, :length]

    def wipe(self, row: int) -> None:
        """Zero a row that may hold numbers that are not finite."""
        self._store[:, :, row] = 0

    def _allocate(self, length: int) -> None:
        layers, pair, slots, heads, head_dim = self._sizes
        sizes = layers, pair, slots, length, heads, head_dim
        self.length = length
        self._store = torch.zeros(sizes, dtype=self._dtype, device=self._device)
        self.layers = [(layer[0], layer[1]) for layer in self._store]


class DecodeAttention:
    """Attention of one new token per row. The query heads of a key head are tokens of it: nothing is repeated."""

    def __init__(self, slots: KVSlots, positions_N: Tensor, length: int) -> None:
        self._slots, self._positions_N, self._length = slots, positions_N, length
        self._num_rows = positions_N.shape[0]
        self._rows_N = slots._rows_S[: self._num_rows]
        seen_NL = torch.arange(length, device=positions_N.device) <= positions_N[:, None]
        self._mask_N11L = torch.where(seen_NL, 0.0, float("-inf")).to(slots._dtype)[:, None, None]

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        keys_SLKD, values_SLKD = self._slots.layers[layer]
        keys_SLKD[self._rows_N, self._positions_N] = key_BTKD[:, 0]
        values_SLKD[self._rows_N, self._positions_N] = value_BTKD[:, 0]
        num_rows, _, num_kv_heads, head_dim = key_BTKD.shape
        attended_NKGD = functional.scaled_dot_product_attention(
            query_BTHD.reshape(num_rows, num_kv_heads, -1, head_dim),
            keys_SLKD[:num_rows, : self._length].transpose(1, 2),
            values_SLKD[:num_rows, : self._length].transpose(1, 2),
            attn_mask=self._mask_N11L,
        )
        return attended_NKGD.reshape(num_rows, 1, -1)


class PrefillAttention:
    """Causal attention of prompts from position 0, padded on the right, so that no real token attends to padding."""

    def __init__(self, slots: KVSlots, first_row: int, prompt_R: Tensor) -> None:
        self._slots, self._prompt_R = slots, prompt_R
        self._rows = slice(first_row, first_row + prompt_R.shape[0])

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        keys_SLKD, values_SLKD = self._slots.layers[layer]
        num_tokens = key_BTKD.shape[1]
        keys_SLKD[self._rows, :num_tokens] = key_BTKD[self._prompt_R]
        values_SLKD[self._rows, :num_tokens] = value_BTKD[self._prompt_R]
        return decoder.causal_attention(query_BTHD, key_BTKD, value_BTKD)


class ModelRunner:
    """One model with a row of keys and values for each running sequence. Used by the decoding thread."""

    def __init__(self, weights: Weights, *, max_running: int, max_context: int) -> None:
        self.weights: Weights | None = weights
        """None from the release of their memory until new ones are set."""
        self.device = weights.device
        self.slots = KVSlots(weights, max_running, max_context)
        self._rope: decoder.RopeTable | None = None
        self.captures = False
        """Keep the experts of the tokens of each pass, as ``experts_BTGJ``."""
        self.experts_BTGJ: NDArray[np.int64] | None = None
        """Experts of the last pass: of a prefill by context, padding included; of a decoding step by row."""

    def prefill(
        self, contexts: list[NDArray[np.int32]], prompt_of_R: list[int], *, first_row: int
    ) -> tuple[Tensor, int]:
        """Compute different contexts for the rows from ``first_row`` on, row r with context ``prompt_of_R[r]``. Returns
        the scores of the next token of each row, [R, V], and the number of padded tokens.
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
            self._angles(self.weights, torch.arange(tokens_UT.shape[1], device=self.device)[None]),
            PrefillAttention(self.slots, first_row, prompt_R),
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
        angles, attention = self._angles(self.weights, at_N[:, None]), DecodeAttention(self.slots, at_N, length)
        x_N1E = self._forward(self.weights, tokens_N1, angles, attention)
        return decoder.logits(self.weights, x_N1E[:, 0])

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        """Compute the log-probs of given tokens, keeping no keys and values. Raises ValueError for NaN."""
        assert self.weights is not None
        longest = max(len(scoring.tokens) for scoring in batch)
        angles = self._angles(self.weights, torch.arange(longest, device=self.device)[None], length=longest)
        return scores(self.weights, batch, angles, version)

    def _forward(
        self, weights: Weights, tokens_BT: Tensor, rope: tuple[Tensor, Tensor], attention: decoder.Attention
    ) -> Tensor:
        if not self.captures:
            self.experts_BTGJ = None
            return decoder.forward(weights, tokens_BT, rope, attention)
        chosen: list[Tensor] = []
        x_BTE = decoder.forward(weights, tokens_BT, rope, attention, chosen)
        self.experts_BTGJ = torch.stack(chosen, dim=2).cpu().numpy()
        return x_BTE

    def _angles(self, weights: Weights, positions_BT: Tensor, *, length: int = 0) -> tuple[Tensor, Tensor]:
        needed = max(self.slots.length, length)
        if self._rope is None or self._rope.length < needed:
            self._rope = decoder.RopeTable(weights, needed)
        return self._rope.at(positions_BT)

    def clear(self, *, free: bool) -> None:
        """Drop all keys and values; with ``free``, their memory and the memory of the angles too."""
        if free:
            self._rope = None
            self.slots.free()
        else:
            self.slots.reset()
