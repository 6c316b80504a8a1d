"""The decoder of the built-in engine without its scheduler: weights of a directory, blocks of keys and values, scores
of given tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.blocks import blocks_of
from tidemill.actors.serving.builtin.kv_memory import DecodeAttention, DecodePlan, KVMemory, PrefillAttention
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory

CPU = torch.device("cpu")


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> Weights:
    weights = Weights(ModelShape.read(model_dir), dtype=dtype, device=CPU)
    load_from_directory(weights, model_dir)
    return weights


def new_memory(weights: Weights, num_blocks: int) -> KVMemory:
    memory = KVMemory(weights, num_blocks)
    memory.touch(num_blocks)
    return memory


def prefill_attention(
    memory: KVMemory, tables: Sequence[Sequence[int]], prompt_of_row: Sequence[int], lengths: Sequence[int]
) -> PrefillAttention:
    return PrefillAttention(memory, tables, prompt_of_row, np.array(lengths), np.zeros(len(lengths), np.int64))


def decode_attention(memory: KVMemory, tables: Sequence[Sequence[int]], positions: Sequence[int]) -> DecodeAttention:
    """Return the attention of a step of few rows, which are in one chunk."""
    plan, at = DecodePlan(memory, tables), np.array(positions)
    assert plan.order is None
    blocks = np.array([table[position // 16] for table, position in zip(tables, positions, strict=True)])
    return DecodeAttention(memory, plan.chunks, memory.rows(blocks, at), torch.from_numpy(at))


def decode_all(weights: Weights, tokens_BT: torch.Tensor, prefilled: int) -> torch.Tensor:
    """Return scores [B, T, V]: the first tokens in one prefill, the others one by one."""
    rows, length = tokens_BT.shape
    each = blocks_of(length)
    memory = new_memory(weights, rows * each)
    # The blocks of a row lie apart, and not in order.
    tables = [list(range(row, rows * each, rows))[::-1] for row in range(rows)]
    table = decoder.RopeTable(weights, length)
    angles = table.at(torch.arange(prefilled)[None])
    attention = prefill_attention(memory, tables, range(rows), [prefilled] * rows)
    x = decoder.forward(weights, tokens_BT[:, :prefilled], angles, attention)
    found = [decoder.logits(weights, x)]
    for position in range(prefilled, length):
        positions = torch.full((rows,), position)
        x = decoder.forward(
            weights,
            tokens_BT[:, position, None],
            table.at(positions[:, None]),
            decode_attention(memory, tables, [position] * rows),
        )
        found.append(decoder.logits(weights, x))
    return torch.cat(found, 1)
