"""Low-rank adapters (LoRA) as tensors of a push: their names, their files, and the weights that they belong to.

    base W + adapter (A, B)   ->   W + scale * B A

A push of an adapter has the two matrices of each layer, under PEFT's names, instead of the merged weights. It names the
base by a digest, so that no engine adds an adapter to other weights. Imports torch only where tensors are touched.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.weightstore.errors import BadManifest

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.weightstore.format.checksums import ChecksumReport

PEFT = "base_model.model."  # Prefix of PEFT's names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # Files of PEFT's format
BASE = "tidemill_base"  # Field of adapter_config.json in a snapshot: digest of the weights that the adapter belongs to
PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
}
"""Fields of adapter_config.json with the values at which ``W + scale * B A`` is all that the adapter does."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterHeader:
    """The description of an adapter at the beginning of its push."""

    scale: float
    """Factor of the product of an adapter's two matrices."""
    num_tensors: Annotated[int, msgspec.Meta(ge=1)]
    """Number of the matrices: a push with fewer is incomplete."""
    base: str = ""
    """Digest of the weights to which the adapter is added; "" = they are sent in the same push."""

    def to_json(self) -> JsonObject:
        """Return the header as the map that ``parse`` reads."""
        header: JsonObject = msgspec.to_builtins(self)
        return header

    @classmethod
    def parse(cls, value: object) -> "AdapterHeader":
        """Return the header in a request. Raises BadManifest."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise BadManifest("adapter", "scale, num_tensors and base", str(error)) from None


def in_request(header: AdapterHeader | None) -> JsonObject:
    """Return the field of a request with this header; none without one."""
    return {} if header is None else {"adapter": header.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """The settings of a run's adapters, which are the same for all its versions."""

    scale: float
    peft: JsonObject
    """Content of adapter_config.json."""


def matrices_of(module: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a layer, which is named without ``.weight``."""
    return f"{PEFT}{module}.lora_A.weight", f"{PEFT}{module}.lora_B.weight"


def module_of(name: str) -> tuple[str, str] | None:
    """Return the layer and the letter (A or B) of a matrix under PEFT's name; None for another tensor."""
    module, _, letter = name.removeprefix(PEFT).removesuffix(".weight").rpartition(".lora_")
    if not module or letter not in ("A", "B") or matrices_of(module)["AB".index(letter)] != name:
        return None
    return module, letter


def merged(weight: "Tensor", a_RI: "Tensor", b_OR: "Tensor", scale: float) -> "Tensor":
    """Return a weight with an adapter added to it: computed in float32, in the weight's dtype."""
    import torch

    return torch.add(weight.float(), b_OR.float() @ a_RI.float(), alpha=scale).to(weight.dtype)


class MergedTensors(Mapping[str, "Tensor"]):
    """Weights with an adapter added to them. Each tensor is computed when it is read, and not kept."""

    def __init__(self, base: "Mapping[str, Tensor]", adapter: "Mapping[str, Tensor]", scale: float) -> None:
        self._base, self._adapter, self._scale = base, adapter, scale

    def __getitem__(self, name: str) -> "Tensor":
        weight, (a_name, b_name) = self._base[name], matrices_of(name.removesuffix(".weight"))
        if a_name not in self._adapter:
            return weight
        return merged(weight, self._adapter[a_name], self._adapter[b_name], self._scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def base_digest(report: "ChecksumReport") -> str:
    """Return the digest of an engine's weights by its report on all of them: equal for equal weights of one dtype."""
    rows = {"+".join(part.names): (part.dtype, part.sum, part.zeros) for part in report.parts}
    if rows.get(_HEAD) == rows.get(_EMBEDDING):  # tied: a learner may export it, an engine has one tensor
        rows.pop(_HEAD, None)
    return hashlib.sha256(json.dumps([report.scheme, sorted(rows.items())]).encode()).hexdigest()[:16]


def read_directory(directory: Path) -> "tuple[AdapterHeader, dict[str, Tensor]]":
    """Return header and tensors of an adapter in PEFT's format. Raises OSError, and BadManifest for one that does more
    than adding ``scale * B A``, or whose matrices have another rank than its configuration.

    The base of one that PEFT has written is not known: it is "".
    """
    from safetensors.torch import load_file

    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise BadManifest(str(path), "PEFT's configuration with r and lora_alpha", repr(error)) from None
    _check_plain(config, rank, alpha, path)
    tensors = load_file(directory / WEIGHTS)
    for name, tensor in tensors.items():
        # The scale is made of the rank, so another one would scale wrongly, and nothing would fail.
        if name.endswith(".lora_A.weight") and tensor.shape[:1] != (rank,):
            raise BadManifest(name, f"rank {rank}, as in {path}", f"shape {list(tensor.shape)}")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterHeader(scale=scale, num_tensors=len(tensors), base=str(config.get(BASE, ""))), tensors


def _check_plain(config: JsonMapping, rank: int, alpha: float, path: Path) -> None:
    kind = config.get("peft_type", "LORA")
    if str(kind).upper() != "LORA":
        raise BadManifest(f"{path}: peft_type", "LORA", kind)
    if rank < 1 or not math.isfinite(alpha):
        raise BadManifest(str(path), "r > 0 and a finite lora_alpha", f"{rank} and {alpha}")
    for name, plain in PLAIN.items():
        if name in config and config[name] not in plain:
            want = f"{plain[0]!r}, or no such field; merge the adapter into the weights otherwise"
            raise BadManifest(f"{path}: {name}", want, config[name])
