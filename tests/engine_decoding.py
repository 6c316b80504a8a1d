"""The decoder of the built-in engine without its scheduler: weights of a directory, room for keys and values, scores of
given tokens.
"""

from pathlib import Path

import torch

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.runner import KVSlots
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory

CPU = torch.device("cpu")


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> Weights:
    weights = Weights(ModelShape.read(model_dir), dtype=dtype, device=CPU)
    load_from_directory(weights, model_dir)
    return weights


def new_slots(weights: Weights, slots: int) -> KVSlots:
    shape = weights.shape
    return KVSlots(
        num_layers=shape.num_layers,
        slots=slots,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_length=shape.max_positions,
        dtype=weights.dtype,
        device=CPU,
    )


def decode_all(weights: Weights, tokens_BT: torch.Tensor, prefilled: int) -> torch.Tensor:
    """Return scores [B, T, V]: the first tokens in one prefill, the others one by one."""
    shape, (rows, length) = weights.shape, tokens_BT.shape
    slots = new_slots(weights, rows + 2)
    slots.reserve(prefilled)
    table = decoder.RopeTable(shape.rope, length, head_dim=shape.head_dim, dtype=weights.dtype, device=CPU)
    angles = table.at(torch.arange(prefilled)[None])
    x = decoder.forward(weights, tokens_BT[:, :prefilled], angles, slots.prefilling(0, torch.arange(rows)))
    found = [decoder.logits(weights, x)]
    for position in range(prefilled, length):
        slots.reserve(position + 1)
        positions = torch.full((rows,), position)
        x = decoder.forward(
            weights, tokens_BT[:, position, None], table.at(positions[:, None]), slots.decoding(positions, position + 1)
        )
        found.append(decoder.logits(weights, x))
    return torch.cat(found, 1)
