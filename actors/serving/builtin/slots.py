"""Keys and values of the running sequences: one row each, rows 0 .. n-1 in use and kept compact. Knows no sequence and no model.

Rows grow together, doubling, up to the longest context: memory follows the lengths in use, not the longest possible ones.

Shape letters: S = slots, L = positions, K = key/value heads, G = query heads per key/value head, H = K * G, D = head size,
N = running rows, U = prompts of a prefill, T = tokens per prompt (padded), R = rows of a prefill (R >= U: rows may share a prompt).
"""

import torch
from torch import Tensor
from torch.nn import functional

FIRST_LENGTH = 128
"""Positions allocated at first; doubled as needed."""


class KVSlots:
    """Keys and values of all layers, [layers, 2, S, L, K, D]. Unused positions hold finite numbers: a masked NaN would still spread."""

    def __init__(
        self, *, num_layers: int, slots: int, num_kv_heads: int, head_dim: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes = (num_layers, 2, slots, num_kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self.max_length = max_length
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._rows_S = torch.arange(slots, device=device)
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

    def decoding(self, positions_N: Tensor, length: int) -> "DecodeAttention":
        """Return the attention of one token per running row, at its position; ``length`` = the largest position + 1."""
        return DecodeAttention(self, positions_N, length)

    def prefilling(self, first_row: int, prompt_R: Tensor) -> "PrefillAttention":
        """Return the attention of whole prompts in rows ``first_row ..``; row r takes the keys of prompt ``prompt_R[r]``."""
        return PrefillAttention(self, first_row, prompt_R)

    def _allocate(self, length: int) -> None:
        layers, pair, slots, heads, head_dim = self._sizes
        self.length = length
        self._store = torch.zeros((layers, pair, slots, length, heads, head_dim), dtype=self._dtype, device=self._device)
        self.layers = [(layer[0], layer[1]) for layer in self._store]


class DecodeAttention:
    """Attention of one new token per row. The query heads of a key head are handled as tokens of it: nothing is repeated."""

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
    """Causal attention within prompts that start at position 0, padded on the right: no real token attends to padding."""

    def __init__(self, slots: KVSlots, first_row: int, prompt_R: Tensor) -> None:
        self._slots, self._prompt_R = slots, prompt_R
        self._rows = slice(first_row, first_row + prompt_R.shape[0])

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        keys_SLKD, values_SLKD = self._slots.layers[layer]
        num_tokens = key_BTKD.shape[1]
        keys_SLKD[self._rows, :num_tokens] = key_BTKD[self._prompt_R]
        values_SLKD[self._rows, :num_tokens] = value_BTKD[self._prompt_R]
        attended_BHTD = functional.scaled_dot_product_attention(
            query_BTHD.transpose(1, 2), key_BTKD.transpose(1, 2), value_BTKD.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return attended_BHTD.transpose(1, 2).flatten(2)
