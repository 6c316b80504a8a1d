"""Memory of keys and values in blocks, and attention over it. Knows no sequence.

A decoding step gathers the blocks of a few rows of similar length at a time into one buffer, which the processor's
cache holds, and attends there: a copy of the keys and values of all rows is never in memory.

Shape letters: P = blocks, K = key/value heads, G = query heads per key/value head, H = K * G, D = head size, N = rows
or tokens, L = positions of the gathered blocks, U = prompts of a prefill, T = tokens per prompt (padded), B = rows, V =
two: keys and values.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.blocks import BLOCK
from tidemill.actors.serving.builtin.weights import Weights

TOUCHED_AT_ONCE = 64
"""Blocks zeroed together when they are first used."""
CHUNK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Bytes gathered at once: on the CPU as much as its cache holds, on a GPU as few kernels as possible."""
SHORT = 8
"""Blocks of a row up to which padding costs less than another gather."""
QUERIES = 512
"""Tokens of a prompt that attend together to a prefix, which bounds their mask."""


class KVMemory:
    """Keys and values of all layers, [layers, V, P, K, BLOCK, D]. On the CPU a block that was never used takes no
    memory. Unused positions are finite: a masked NaN would still spread.
    """

    layers: list[tuple[Tensor, Tensor, Tensor]]
    """Of each layer its blocks [V * P * K, BLOCK * D], and its keys and values [P * K * BLOCK, D]."""

    def __init__(self, weights: Weights, num_blocks: int) -> None:
        shape = weights.shape
        self.heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.dtype, self.device = weights.dtype, weights.device
        self.num_blocks = num_blocks
        self._sizes = (shape.num_layers, 2, num_blocks, self.heads, BLOCK, self.head_dim)
        block = 2 * self.heads * BLOCK * self.head_dim
        self.blocks_at_once = max(1, CHUNK_BYTES[self.device.type] // (block * self.dtype.itemsize))
        self.reset()

    def reset(self) -> None:
        """Forget everything; give used memory back."""
        self.free()
        self._store = torch.empty(self._sizes, dtype=self.dtype, device=self.device)
        self.layers = [
            (layer.view(-1, BLOCK * self.head_dim), *layer.view(2, -1, self.head_dim)) for layer in self._store
        ]

    def free(self) -> None:
        """Free all memory; ``reset`` comes before the next use."""
        self._zeroed = 0
        self.layers = []
        self._store = self._gathered = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return self._store.untyped_storage().nbytes()

    def touch(self, num_blocks: int) -> None:
        """Prepare the first ``num_blocks`` blocks for use."""
        if num_blocks > self._zeroed:
            end = min(self.num_blocks, max(num_blocks, self._zeroed + TOUCHED_AT_ONCE))
            self._store[:, :, self._zeroed : end] = 0
            self._zeroed = end

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold numbers that are not finite."""
        self._store[:, :, list(blocks)] = 0

    def rows(self, blocks_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        """Return the rows of ``layers``' keys for the heads of tokens, [N * K]."""
        rows_NK = (blocks_N[:, None] * self.heads + np.arange(self.heads)) * BLOCK + positions_N[:, None] % BLOCK
        return torch.from_numpy(rows_NK.ravel()).to(self.device)

    def write(self, layer: int, rows: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Store keys and values of tokens in ``rows``."""
        _, keys, values = self.layers[layer]
        keys.index_copy_(0, rows, key_NKD.reshape(-1, self.head_dim))
        values.index_copy_(0, rows, value_NKD.reshape(-1, self.head_dim))

    def gather(self, layer: int, chunk: "Chunk") -> None:
        """Copy the blocks of rows into the chunk's ``keys_NKLD`` and ``values_NKLD``, valid until the next call."""
        torch.index_select(self.layers[layer][0], 0, chunk.index, out=chunk.gathered)

    def chunks(self, blocks_NL: NDArray[np.int64], counts: Sequence[int]) -> "list[Chunk]":
        """Divide rows into groups that are gathered together; ``counts``: blocks of each row, without padding."""
        return [self._chunk(rows, blocks_NL[rows, :longest]) for rows, longest in self.divide(counts)]

    def divide(self, counts: Sequence[int]) -> Iterator[tuple[slice, int]]:
        """Yield rows to gather together, and the largest number of blocks among them."""
        first = longest = 0
        for row, count in enumerate(counts):
            padded = max(longest, count)
            uneven = padded > SHORT and 2 * min(longest, count) < padded
            if row > first and (uneven or (row - first + 1) * padded > self.blocks_at_once):
                yield slice(first, row), longest
                first, longest = row, count
            else:
                longest = padded
        yield slice(first, len(counts)), longest

    def _chunk(self, rows: slice, blocks_NL: NDArray[np.int64]) -> "Chunk":
        index_VNKL = np.empty((2, len(blocks_NL), self.heads, blocks_NL.shape[1]), np.int64)
        np.add(blocks_NL[:, None] * self.heads, np.arange(self.heads)[:, None], out=index_VNKL[0])
        np.add(index_VNKL[0], self.num_blocks * self.heads, out=index_VNKL[1])
        index = torch.from_numpy(index_VNKL.ravel()).to(self.device)
        if len(self._gathered) < len(index):
            self._gathered = torch.empty((len(index), BLOCK * self.head_dim), dtype=self.dtype, device=self.device)
        return Chunk(rows, index, self._gathered[: len(index)], len(blocks_NL), self.heads)


class Chunk:
    """Rows that are gathered together, and views of the buffer that all chunks share."""

    def __init__(self, rows: slice, index: Tensor, gathered: Tensor, num_rows: int, heads: int) -> None:
        self.rows = rows
        self.index = index
        """Rows of a layer's blocks, [V * N * K * blocks]."""
        self.gathered = gathered
        """Buffer of the blocks, [V * N * K * blocks, BLOCK * D]."""
        self.keys_NKLD, self.values_NKLD = gathered.view(2, num_rows, heads, -1, gathered.shape[1] // BLOCK)
        self.length = self.keys_NKLD.shape[2]
        """Positions of each row, padded: a multiple of BLOCK."""


def padded(tables: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the blocks of rows, [N, blocks]; behind those of a row again its first one, where it is masked.

    A block of another row might have numbers that are not finite, which a mask does not keep out.
    """
    longest = max(map(len, tables))
    return np.array([[*table, *(table[0] for _ in range(longest - len(table)))] for table in tables], np.int64)


class DecodePlan:
    """Rows of a decoding step sorted by length and divided into chunks; valid until a row gets another block."""

    def __init__(self, memory: KVMemory, tables: Sequence[Sequence[int]]) -> None:
        self.order: list[int] | None = None
        """Rows in the order of the step; None = as they are."""
        counts = [len(table) for table in tables]
        if len(list(memory.divide(counts))) > 1:
            self.order = sorted(range(len(tables)), key=lambda row: -counts[row])
            tables, counts = [tables[row] for row in self.order], sorted(counts, reverse=True)
        self.blocks_NL = padded(tables)
        self.chunks = memory.chunks(self.blocks_NL, counts)


class DecodeAttention:
    """Attention of one new token per row. The query heads of a key head are tokens of it: nothing is repeated."""

    def __init__(self, memory: KVMemory, chunks: Sequence[Chunk], rows: Tensor, positions_N: Tensor) -> None:
        self._memory, self._rows = memory, rows
        # Products take half the time of the fused kernel, which is for many queries; in bfloat16 they are too coarse.
        is_plain = memory.device.type == "cpu" and memory.dtype == torch.float32
        kind = _Products if is_plain else _Fused
        self._parts = [(chunk, kind(chunk, self._mask(chunk, positions_N[chunk.rows]))) for chunk in chunks]

    def _mask(self, chunk: Chunk, positions_N: Tensor) -> Tensor:
        """Return 0 where a row attends, else -inf, [N, 1, 1, L]."""
        seen_N11L = torch.arange(chunk.length, device=positions_N.device) <= positions_N[:, None, None, None]
        return torch.where(seen_N11L, 0.0, -math.inf).to(self._memory.dtype)

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        memory = self._memory
        memory.write(layer, self._rows, key_BTKD, value_BTKD)
        query_NKGD = query_BTHD.reshape(len(query_BTHD), memory.heads, -1, memory.head_dim)
        attended = []
        for chunk, attend in self._parts:
            memory.gather(layer, chunk)
            attended.append(attend(query_NKGD[chunk.rows]))
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).reshape(len(query_BTHD), 1, -1)


class _Products:
    """Attention of a chunk by products of matrices. Returns [N * K, G, D]."""

    def __init__(self, chunk: Chunk, mask_N11L: Tensor) -> None:
        self._keys, self._values = chunk.keys_NKLD.flatten(0, 1).transpose(1, 2), chunk.values_NKLD.flatten(0, 1)
        self._mask = mask_N11L.expand(-1, chunk.keys_NKLD.shape[1], -1, -1).flatten(0, 1)
        self._scale = 1 / math.sqrt(chunk.keys_NKLD.shape[-1])

    def __call__(self, query_NKGD: Tensor) -> Tensor:
        scores = torch.baddbmm(self._mask, query_NKGD.flatten(0, 1), self._keys, alpha=self._scale)
        return torch.bmm(scores.softmax(-1), self._values)


class _Fused:
    """Attention of a chunk by torch's kernel. Returns [N, K, G, D]."""

    def __init__(self, chunk: Chunk, mask_N11L: Tensor) -> None:
        self._chunk, self._mask = chunk, mask_N11L

    def __call__(self, query_NKGD: Tensor) -> Tensor:
        chunk = self._chunk
        return functional.scaled_dot_product_attention(
            query_NKGD, chunk.keys_NKLD, chunk.values_NKLD, attn_mask=self._mask
        )


class PrefillAttention:
    """Causal attention of prompts, padded on the right, so that no real token attends to padding. The first
    ``cached_U`` tokens of a prompt are in its blocks already.
    """

    def __init__(
        self,
        memory: KVMemory,
        tables: Sequence[Sequence[int]],
        prompt_of_R: Sequence[int],
        lengths_U: NDArray[np.int64],
        cached_U: NDArray[np.int64],
    ) -> None:
        """``tables``: the blocks of each row that begins; the rows of a prompt follow each other. The first one writes
        the prompt, the others what is behind the full blocks that they share.
        """
        self._memory, longest = memory, int((lengths_U - cached_U).max())
        blocks_RL = padded(tables)
        owners = [prompt_of_R.index(prompt) for prompt in range(len(lengths_U))]
        sources, blocks, positions = [], [], []
        for row, prompt in enumerate(prompt_of_R):
            length, cached = lengths_U[prompt], cached_U[prompt]
            written = np.arange(cached if row == owners[prompt] else length - length % BLOCK, length)
            sources.append(prompt * longest + written - cached)
            blocks.append(blocks_RL[row, written // BLOCK])
            positions.append(written)
        self._sources = torch.from_numpy(np.concatenate(sources)).to(memory.device)
        self._rows = memory.rows(np.concatenate(blocks), np.concatenate(positions))
        self._chunks: list[Chunk] = []
        if cached_U.any():
            self._chunks = memory.chunks(blocks_RL[owners], [len(tables[owner]) for owner in owners])
            ends_U = torch.from_numpy(cached_U).to(memory.device)
            self._positions_UT = ends_U[:, None] + torch.arange(longest, device=memory.device)

    def __call__(self, layer: int, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor) -> Tensor:
        key_NKD, value_NKD = (heads.flatten(0, 1)[self._sources] for heads in (key_BTKD, value_BTKD))
        self._memory.write(layer, self._rows, key_NKD, value_NKD)
        if not self._chunks:
            return decoder.causal_attention(query_BTHD, key_BTKD, value_BTKD)
        return torch.cat([self._behind(chunk, layer, query_BTHD[chunk.rows]) for chunk in self._chunks])

    def _behind(self, chunk: Chunk, layer: int, query_BTHD: Tensor) -> Tensor:
        """Attend to a prefix and to the tokens behind it. Returns [B, T, H * D]."""
        self._memory.gather(layer, chunk)
        at_L, attended = torch.arange(chunk.length, device=query_BTHD.device), []
        for first in range(0, query_BTHD.shape[1], QUERIES):
            part = slice(first, first + QUERIES)
            seen_B1TL = at_L <= self._positions_UT[chunk.rows, part][:, None, :, None]
            query_BHTD = query_BTHD[:, part].transpose(1, 2)
            attended.append(
                functional.scaled_dot_product_attention(
                    query_BHTD, chunk.keys_NKLD, chunk.values_NKLD, attn_mask=seen_B1TL, enable_gqa=True
                )
            )
        return torch.cat(attended, 2).transpose(1, 2).flatten(2)
