"""Quantized weights of released models, decoded into plain ones while they are read.

The formats are decoded here because transformers wants further packages for them, and kernels that a CPU does not have.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Settings = Mapping[str, Any]
"""``quantization_config`` of a model's configuration."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 by three bits; the fourth is the sign. Source: OCP Microscaling Formats 1.0, section 5.3.3."""
_SCALE_BIAS = 127
"""Exponent bias of the scales, E8M0. Source: the same, section 5.4.1."""
FP8_SCALE, _FP4_BLOCKS, _FP4_SCALES = "_scale_inv", "_blocks", "_scales"
"""Ends of the names of the parts of an encoded weight."""


def decoded_files(directory: Path, encoding: str, settings: Settings) -> dict[str, Tensor]:
    """Return all tensors of a directory's files by their plain names, in float32 where they were encoded.

    ``encoding``: a key of ``DECODERS``. The whole model is in memory.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return DECODERS[encoding](tensors, settings)


def _decode_fp8(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Decode weights of E4M3 with a factor for each block of rows and columns. Source: DeepSeek-V3's releases."""
    rows, columns = settings.get("weight_block_size") or (0, 0)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(FP8_SCALE)}
    for name, factors in tensors.items():
        if name.endswith(FP8_SCALE):
            weight = tensors[name.removesuffix(FP8_SCALE)].float()
            factors = factors.float()
            if rows:
                factors = factors.repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
                factors = factors.repeat_interleave(columns, -1)[..., : weight.shape[-1]]
            plain[name.removesuffix(FP8_SCALE)] = weight * factors
    return plain


def _decode_mxfp4(tensors: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Decode experts of E2M1 with a power of two for each 32 numbers: [experts, out, blocks, 16] -> [experts, in, out].

    Two numbers are in a byte, the first in its lower half. Source: gpt-oss' releases.
    """
    signed = torch.tensor([*_FP4, *(-magnitude for magnitude in _FP4)])
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith((_FP4_BLOCKS, _FP4_SCALES))}
    for name, blocks in tensors.items():
        if name.endswith(_FP4_BLOCKS):
            own_name = name.removesuffix(_FP4_BLOCKS)
            halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
            exponents = tensors[own_name + _FP4_SCALES].int() - _SCALE_BIAS
            numbers = torch.ldexp(signed[halves.long()], exponents[..., None])
            plain[own_name] = numbers.flatten(-2).transpose(-2, -1).contiguous()
    return plain


DECODERS: Mapping[str, Callable[[dict[str, Tensor], Settings], dict[str, Tensor]]] = {
    "fp8": _decode_fp8,
    "mxfp4": _decode_mxfp4,
}
"""Encodings of weights by transformers' ``quant_method``."""
