"""One complete set of weights, by the names of the model's files: the port of weight updates (``WeightSet``), and the
set of the decoder: fused storage, and views under Hugging Face names for transfers.

Projections that read the same input lie side by side in one tensor (query, key, value; gate, up), so a step needs fewer
and larger products; the named tensors are slices of them, so filling those fills the set. It is filled from a directory
or from the buckets of a push; both block. Knows no version and no file format but safetensors. A model of the library
transformers has a set of its own (``transformers_runner.py``).

Shape letters: V = vocabulary, E = hidden size, Q = rows of query, key and value together, H = heads of query and key
together, D = head size, X = experts, I = inner size of an expert.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tidemill.actors.errors import UnsupportedModel, UpdateRefused
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.store import snapshot_files

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ALIGNED_BYTES = 64
"""Alignment of torch's tensors on the CPU: products of a tensor with another one may differ in their last bits."""
MAPPED_BYTES = 64_000_000
"""Bytes of a weight file that are read from one mapping."""


class WeightSet(Protocol):
    """The tensors of one model; undefined until every tensor in ``named`` is filled and ``finalize`` was called."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[str, ...]
    """Names in their order in memory, as far as the set can have it: a push in it may need no copy."""
    named: dict[str, Tensor]
    """Tensors to write, by the names of the model's files. Names of tied tensors are in ``aliases``."""
    writes: int
    """Counter, increased whenever some of the tensors are about to be written."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of a tensor in files -> the name in ``named`` of the tensor to which the configuration ties it."""

    @property
    def unused(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of tensors in the model's files that the engine does not need. They may be sent and are not kept."""

    @property
    def adapter_shape(self) -> ModelShape | None:
        """Sizes of the modules that adapters may have; None = the runner of these weights takes no adapter."""

    @property
    def empty_copy(self) -> "Callable[[Sequence[str]], WeightSet]":
        """Function that makes an undefined set of the same model for an order of names. Refers to no weights."""

    @property
    def final(self) -> bool:
        """True when nothing was written since ``finalize``."""

    def finalize(self) -> None:
        """Compute what is derived from the named tensors, which are complete."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the named tensors."""

    def with_alias(self) -> dict[str, Tensor]:
        """Return the named tensors, and the tied ones under their own names too."""

    def place(self, bucket: Bucket) -> Tensor | None:
        """Return the memory of a bucket's tensors, flat uint8, if it has the layout of the bucket; else None."""


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """Tensors of one layer, fused."""

    input_norm: Tensor
    qkv_QE: Tensor
    qkv_bias: Tensor | None
    head_norm_HD: Tensor | None
    """Derived by ``Weights.finalize``: the query's norm once per query head, then the key's."""
    output: Tensor
    output_bias: Tensor | None
    attention_post_norm: Tensor | None
    mlp_norm: Tensor
    mlp_post_norm: Tensor | None
    router_XE: Tensor | None
    """Scores of the experts; None in a layer with one MLP."""
    gate_up: Tensor
    """Weights of one MLP [2 I, E], or of all experts [X, 2 I, E]; so is ``down``: [E, I] or [X, E, I]."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Weights:
    """The tensors of one model of the decoder (see ``WeightSet``)."""

    def __init__(
        self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, order: Sequence[str] = ()
    ) -> None:
        """``order``: names in their order in memory, as far as fused tensors allow: a push in it needs no copy."""
        self.shape, self.dtype, self.device, self.order = shape, dtype, device, tuple(order)
        self.named: dict[str, Tensor] = {}
        """Views, by Hugging Face name, of the names in ``shape.tensors()``."""
        self.aliases = {HEAD: EMBEDDING} if shape.tied else {}
        self.unused: dict[str, tuple[int, ...]] = {}
        self.writes = 0
        self._finalized = -1
        """``writes`` at the last ``finalize``."""
        self._placed: tuple[Bucket | None, Tensor | None] = None, None
        """The bucket that ``place`` was asked for last, and its memory: in each push there is the same one."""
        self._sizes = shape.tensors()
        self._starts, num_bytes = self._layout()
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        sizes = shape.num_layers, shape.num_heads + shape.num_kv_heads, shape.head_dim
        self._head_norm_LHD = torch.zeros(sizes, dtype=dtype, device=device) if shape.head_norm else None
        self.embedding_VE = self._one(EMBEDDING)
        self.layers = [self._layer(layer) for layer in range(shape.num_layers)]
        self.norm = self._one("model.norm.weight")
        self.head_VE = self.embedding_VE if shape.tied else self._one(HEAD)
        assert self.named.keys() == self._sizes.keys()

    @property
    def final(self) -> bool:
        return self._finalized == self.writes

    def finalize(self) -> None:
        self._finalized = self.writes
        if self._head_norm_LHD is None:
            return
        # A few operations for all layers: a GPU starts each of them more slowly than it computes it.
        heads = slice(0, self.shape.num_heads), slice(self.shape.num_heads, None)
        for part, norm in zip(heads, ("q_norm", "k_norm"), strict=True):
            of_layers = [
                self.named[f"model.layers.{layer}.self_attn.{norm}.weight"] for layer in range(self.shape.num_layers)
            ]
            self._head_norm_LHD[:, part] = torch.stack(of_layers)[:, None]

    @property
    def size_bytes(self) -> int:
        """Bytes of the named tensors, without derived ones and alignment."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.named.values())

    def with_alias(self) -> dict[str, Tensor]:
        return self.named | {alias: self.named[name] for alias, name in self.aliases.items()}

    @property
    def adapter_shape(self) -> ModelShape:
        return self.shape

    @property
    def empty_copy(self) -> "Callable[[Sequence[str]], Weights]":
        shape, dtype, device = self.shape, self.dtype, self.device
        return lambda order: Weights(shape, dtype=dtype, device=device, order=order)

    def place(self, bucket: Bucket) -> Tensor | None:
        if self._placed[0] is not bucket:
            self._placed = bucket, self._place(bucket)
        return self._placed[1]

    def _place(self, bucket: Bucket) -> Tensor | None:
        starts = []
        for spec, part in bucket.places():
            if spec.name not in self.named or getattr(torch, spec.dtype) != self.dtype:
                return None
            starts.append(self.named[spec.name].data_ptr() - self._memory.data_ptr() - part.start)
        if not starts or starts.count(starts[0]) != len(starts):
            return None
        return self._memory[starts[0] : starts[0] + bucket.num_bytes]

    def _layout(self) -> tuple[dict[str, int], int]:
        """Return the first byte of every piece by its first name, and the sum. Pieces are aligned like tensors."""
        fused = {name: names for names in self._fused() for name in names}
        starts: dict[str, int] = {}
        end = 0
        for name in [*self.order, *self._sizes]:
            names = fused.get(name, [name])
            if name in self._sizes and names[0] not in starts:
                starts[names[0]] = end
                num_bytes = sum(math.prod(self._sizes[part]) for part in names) * self.dtype.itemsize
                end += -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return starts, end

    def _fused(self) -> Iterator[list[str]]:
        for layer in range(self.shape.num_layers):
            experts = self.shape.experts_of(layer)
            blocks = [
                _projections(layer, "self_attn", "qkv"),
                *self._mlp_blocks(layer, 0 if experts is None else experts.count),
            ]
            for kind in ("weight", "bias"):
                for names in blocks:
                    if f"{names[0]}{kind}" in self._sizes:
                        yield [f"{name}{kind}" for name in names]

    def _piece(self, first: str, *sizes: int) -> Tensor:
        start = self._starts[first]
        return self._memory[start : start + math.prod(sizes) * self.dtype.itemsize].view(self.dtype).view(sizes)

    def _one(self, name: str) -> Tensor:
        self.named[name] = self._piece(name, *self._sizes[name])
        return self.named[name]

    def _optional(self, name: str) -> Tensor | None:
        return self._one(name) if name in self._sizes else None

    def _side_by_side(self, names: list[str]) -> Tensor | None:
        if names[0] not in self._sizes:
            return None
        sizes = [self._sizes[name] for name in names]
        fused = self._piece(names[0], sum(size[0] for size in sizes), *sizes[0][1:])
        self.named.update(zip(names, fused.split([size[0] for size in sizes]), strict=True))
        return fused

    def _layer(self, layer: int) -> LayerWeights:
        at = f"model.layers.{layer}."
        experts = self.shape.experts_of(layer)
        count = 0 if experts is None else experts.count
        qkv, (gate_up, down) = _projections(layer, "self_attn", "qkv"), self._mlp_blocks(layer, count)
        qkv_weight = self._side_by_side([name + "weight" for name in qkv])
        gate_up_weight = self._side_by_side([name + "weight" for name in gate_up])
        down_weight = self._side_by_side([name + "weight" for name in down])
        assert qkv_weight is not None and gate_up_weight is not None and down_weight is not None
        if self.shape.head_norm:
            self._one(at + "self_attn.q_norm.weight")
            self._one(at + "self_attn.k_norm.weight")
        return LayerWeights(
            input_norm=self._one(at + "input_layernorm.weight"),
            qkv_QE=qkv_weight,
            qkv_bias=self._side_by_side([name + "bias" for name in qkv]),
            head_norm_HD=None if self._head_norm_LHD is None else self._head_norm_LHD[layer],
            output=self._one(at + "self_attn.o_proj.weight"),
            output_bias=self._optional(at + "self_attn.o_proj.bias"),
            attention_post_norm=self._optional(at + "post_self_attn_layernorm.weight"),
            mlp_norm=self._one(at + "post_attention_layernorm.weight"),
            mlp_post_norm=self._optional(at + "post_mlp_layernorm.weight"),
            router_XE=self._optional(at + "mlp.gate.weight"),
            gate_up=gate_up_weight.unflatten(0, (count, -1)) if count else gate_up_weight,
            gate_up_bias=self._side_by_side([name + "bias" for name in gate_up]),
            down=down_weight.unflatten(0, (count, -1)) if count else down_weight,
            down_bias=self._side_by_side([name + "bias" for name in down]),
        )

    def _mlp_blocks(self, layer: int, experts: int) -> tuple[list[str], list[str]]:
        """Return the names that lie side by side in a layer's MLP, or in all of its experts: gate and up, down."""
        blocks = [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]
        halves = ("gate_up",) if self.shape.joint_gate_up else ("gate", "up")
        gate_up = [name for block in blocks for name in _projections(layer, block, halves)]
        return gate_up, [name for block in blocks for name in _projections(layer, block, ("down",))]


def _projections(layer: int, block: str, parts: Iterable[str]) -> list[str]:
    """Return the names of projections that lie side by side, without their kind (weight or bias)."""
    return [f"model.layers.{layer}.{block}.{part}_proj." for part in parts]


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a model directory (one, or several with an index). Raises UnsupportedModel
    without any, or for an index that names a missing file.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not names:
        raise UnsupportedModel(str(model_dir), "want a directory with *.safetensors")
    for name in names:
        if not (model_dir / name).exists():
            raise UnsupportedModel(str(model_dir / name), "named by the index, but does not exist")
    return [model_dir / name for name in names]


def read_safetensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model directory, read lazily on the CPU. Raises as ``weight_files``.

    Tensors are views of the mapped file, whose pages count as this process's memory until its last view is gone.
    Therefore the file is mapped anew every ``MAPPED_BYTES``.
    """
    from safetensors import safe_open

    for file in weight_files(model_dir):
        with file.open("rb") as held:  # the same file, also where another one takes its name meanwhile
            path = f"/proc/self/fd/{held.fileno()}"
            with safe_open(path, framework="pt", device="cpu") as tensors:
                names = list(tensors.keys())
            while names:
                with safe_open(path, framework="pt", device="cpu") as tensors:
                    num_bytes = 0
                    while names and num_bytes < MAPPED_BYTES:
                        tensor = tensors.get_tensor(names[0])
                        num_bytes += tensor.nbytes
                        yield names.pop(0), tensor
                    del tensor


def load_from_directory(weights: WeightSet, directory: Path) -> None:
    """Load and finalize a set of weights. A snapshot is verified byte by byte (SnapshotBroken); other directories have
    no checksums. Raises UpdateRefused unless every tensor is there once, with its shape.
    """
    if (directory / snapshot_files.MANIFEST).exists():
        snapshot_files.verify(directory)
    filled: set[str] = set()
    weights.writes += 1
    for name, tensor in read_safetensors(directory):
        target = weights.named.get(name)
        if target is None and (name in weights.aliases or name in weights.unused):
            continue
        if target is None or name in filled:
            raise UpdateRefused(
                f"{directory}: {name}: "
                + ("stored twice" if target is not None else "the model has no tensor of this name")
            )
        if target.shape != tensor.shape:
            raise UpdateRefused(f"{directory}: {name}: want shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
        target.copy_(tensor)
        filled.add(name)
    missing = weights.named.keys() - filled
    if missing:
        raise UpdateRefused(
            f"{directory}: {len(missing)} of {len(weights.named)} tensors are missing, among them {min(missing)}"
        )
    finalize(weights)


def load_from_bucket(
    weights: WeightSet, bucket: Bucket, message: Tensor, stream: "torch.cuda.Stream | None" = None
) -> dict[str, Tensor]:
    """Copy the tensors of a flat bucket into ``weights``, which are not finalized. ``stream``: as for ``copy_all``.
    Returns copies of tensors that are tied to others, for which ``weights`` have no memory.
    """
    aliases, copies = {}, []
    weights.writes += 1
    for spec, place in bucket.places():
        part, dtype = message[place], getattr(torch, spec.dtype)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()  # a sender that mixes types need not align them
        tensor = part.view(dtype).view(spec.shape)
        if spec.name in weights.named:
            copies.append((weights.named[spec.name], tensor))
        elif spec.name in weights.aliases:
            aliases[spec.name] = tensor.to(weights.dtype, copy=True)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()  # the sender may write there again
    copy_all(copies, stream)
    return aliases


def copy_all(copies: Sequence[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None" = None) -> None:
    """Copy the second tensor of each pair into the first; then its sender may write again. ``stream``: one for copies
    to a GPU alone, which do not wait for the tokens that are decoded meanwhile. None = on the CPU.
    """
    if stream is None:
        for target, source in copies:
            target.copy_(source)
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        with torch.cuda.stream(stream):
            for target, source in copies:
                if not source.is_cuda:
                    source = source.to(target.dtype)  # here: a GPU would need memory for it, in the other type
                target.copy_(source, non_blocking=True)
    finally:
        stream.synchronize()


def finalize(weights: WeightSet) -> None:
    """Compute the derived tensors of complete weights, and wait until all copies are done."""
    weights.finalize()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)  # the decoding thread must not overtake the copies


def empty_cache(device: torch.device) -> None:
    """Return memory that is not used any more to the accelerator, so that another process can have it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
