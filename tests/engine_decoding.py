"""The decoder of the built-in engine without its scheduler: weights of a directory, room for keys and values, scores of
given tokens.
"""

from pathlib import Path

import torch

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.runner import DecodeAttention, KVSlots, PrefillAttention
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory

CPU = torch.device("cpu")


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> Weights:
    weights = Weights(ModelShape.read(model_dir), dtype=dtype, device=CPU)
    load_from_directory(weights, model_dir)
    return weights


def new_slots(weights: Weights, slots: int) -> KVSlots:
    return KVSlots(weights, slots, weights.shape.max_positions)


def decode_all(weights: Weights, tokens_BT: torch.Tensor, prefilled: int) -> torch.Tensor:
    """Return scores [B, T, V]: the first tokens in one prefill, the others one by one."""
    rows, length = tokens_BT.shape
    slots = new_slots(weights, rows + 2)
    slots.reserve(prefilled)
    table = decoder.RopeTable(weights, length)
    angles = table.at(torch.arange(prefilled)[None])
    x = decoder.forward(weights, tokens_BT[:, :prefilled], angles, PrefillAttention(slots, 0, torch.arange(rows)))
    found = [decoder.logits(weights, x)]
    for position in range(prefilled, length):
        slots.reserve(position + 1)
        positions = torch.full((rows,), position)
        attention = DecodeAttention(slots, positions, position + 1)
        x = decoder.forward(weights, tokens_BT[:, position, None], table.at(positions[:, None]), attention)
        found.append(decoder.logits(weights, x))
    return torch.cat(found, 1)
