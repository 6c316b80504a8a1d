"""The weights that are trained: all, all but the weights that ``learner.optimizer.freeze`` names, or adapters of low
rank alone (``learner.lora``).

    y = W x + scale * B (A x)        W frozen; A [r, in] and B [out, r] trained; B = 0 at the start

A linear layer keeps its instance, its name and its weight; its class is exchanged. So do the experts of a layer, whose
weights are one tensor for each projection: A [E, r, in] and B [E, out, r] have the matrices of every expert.
Shape letters: E = experts, R = rank, I = inputs, O = outputs.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.backends.fsdp.model import FsdpModel
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.lora import LoraConfig, Tuning
from tidemill.learner.settings.optimizer import is_frozen
from tidemill.learner.trainer.exports import first_matrix
from tidemill.weightstore.format.adapters import WEIGHTS, matrices_of, merged
from tidemill.weightstore.format.checksums import sum64

MARK = ".lora_"
"""In the names of all parameters of adapters, and of no other."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of the model belongs to an adapter."""
    return MARK in name


class Adapted(torch.nn.Linear):
    """A linear layer of transformers with an adapter; ``add`` is its constructor."""

    lora_A: Tensor
    lora_B: Tensor
    lora_scale: float

    def add(self, config: LoraConfig) -> None:
        """Add the matrices, without values."""
        self.lora_scale = config.scale
        self.lora_A = torch.nn.Parameter(self.weight.new_empty(config.rank, self.in_features))
        self.lora_B = torch.nn.Parameter(self.weight.new_empty(self.out_features, config.rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for [..., in]."""
        inner = torch.nn.functional.linear(x, self.lora_A)
        return torch.add(super().forward(x), torch.nn.functional.linear(inner, self.lora_B), alpha=self.lora_scale)


class LowRank:
    """The weight ``whole + scale * left @ right`` over the last two axes, as an operand of products alone.

    The sum is never computed. It would be as large as the experts of a layer, the backward pass would keep it for every
    layer and compute a gradient of its size, and in bfloat16 it would round small steps of the adapters away. A product
    with it is the product with ``whole``, by the same function, and two narrow ones beside it.
    """

    def __init__(self, whole: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        self.whole, self.left, self.right, self.scale = whole, left, right, scale

    def __getattr__(self, name: str) -> Any:
        """Return the shape, dtype or device. Raises ConfigRefused for all else that only a tensor has."""
        if name in ("shape", "dtype", "device"):
            return getattr(self.whole, name)
        raise _not_a_product(name)

    def __getitem__(self, experts: Any) -> "LowRank":
        """Return the weight of one expert, or of several."""
        if self.whole.dim() != 3 or isinstance(experts, tuple):
            raise _not_a_product("slices")
        return LowRank(self.whole[experts], self.left[experts], self.right[experts], self.scale)

    def transpose(self, first: int, second: int) -> "LowRank":
        """Return the weight with its last two axes exchanged."""
        dim = self.whole.dim()
        if {first % dim, second % dim} != {dim - 2, dim - 1}:
            raise _not_a_product("transpose")
        return LowRank(self.whole.mT, self.right.mT, self.left.mT, self.scale)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Return the product of a tensor and a weight, which torch calls this for. Raises ConfigRefused."""
        name, named = func.__name__, kwargs or {}
        at = next((place for place, argument in enumerate(args) if isinstance(argument, LowRank)), None)
        if name not in _PRODUCTS or at not in _PRODUCTS[name]:
            raise _not_a_product(name)
        weight = cast(LowRank, args[at])
        # x @ (left @ right) begins with left; (left @ right) @ x, and ``linear``, which transposes, with right.
        first, second = (weight.left, weight.right) if at and name != "linear" else (weight.right, weight.left)
        if name == "_grouped_mm":
            first, second = _aligned(first, second)
        offsets = {"offs": named["offs"]} if "offs" in named else {}

        def product(factor: Tensor, other: Tensor) -> Tensor:
            result: Tensor = func(*((other, factor) if at else (factor, other)), **offsets)
            return result

        whole: Tensor = func(*args[:at], weight.whole, *args[at + 1 :], **named)
        return torch.add(whole, product(second, product(first, args[1 - at])), alpha=weight.scale)


_PRODUCTS = {"linear": (1,), "matmul": (0, 1), "bmm": (0, 1), "_grouped_mm": (1,)}
"""Functions of torch by which transformers' experts multiply, and the possible places of a weight among the arguments.
"""


def _not_a_product(name: str) -> ConfigRefused:
    want = "no experts of this model, whose weights are more than factors of products; name linear layers"
    return ConfigRefused("learner.lora.targets", want, name)


def _aligned(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with a rank of whole 16 bytes, which ``grouped_mm`` wants of every row; zeros are added."""
    missing = -first.shape[-1] % (16 // first.element_size())
    if not missing:
        return first, second
    return torch.nn.functional.pad(first, (0, missing)), torch.nn.functional.pad(second, (0, 0, 0, missing))


class AdaptedExperts(torch.nn.Module):
    """First base of the class of experts with adapters; the second one is transformers'. ``add`` is its constructor.

    The experts compute in their own forward pass, whatever implementation was chosen, with ``LowRank`` weights.
    """

    lora_A: torch.nn.ParameterDict
    lora_B: torch.nn.ParameterDict
    lora_scale: float

    def add(self, parameters: Sequence[str], config: LoraConfig) -> None:
        """Add the matrices of these parameters, without values."""
        self.lora_scale = config.scale
        self.lora_A, self.lora_B = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name in parameters:
            experts, outputs, inputs = self.get_parameter(name).shape
            if self.is_stored_transposed:
                outputs, inputs = inputs, outputs
            new = self.get_parameter(name).new_empty
            self.lora_A[name] = torch.nn.Parameter(new(experts, config.rank, inputs))
            self.lora_B[name] = torch.nn.Parameter(new(experts, outputs, config.rank))

    @property
    def is_stored_transposed(self) -> bool:
        """True if transformers declares that it stores these weights as [E, in, out] (``is_transposed``): A is then
        [E, rank, in] and B is [E, out, rank], and the transpose of ``B A`` is added to the weight.

        Else a weight stored as [E, x, y] has A as [E, rank, y] and B as [E, x, rank], and ``B A`` is added: as in PEFT,
        which counts llama4 here, because transformers does not declare its [E, in, out].
        """
        return bool(getattr(self, "is_transposed", False))

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return what the experts compute with the adapters."""
        weights = {name: self._weight(name) for name in self.lora_A}
        self.__dict__.update(weights)  # in front of the parameters of these names, which ``__getattr__`` gives
        try:
            return super().forward(*arguments, **named)
        finally:
            for name in weights:
                del self.__dict__[name]

    def _weight(self, name: str) -> LowRank:
        left, right = self.lora_B[name], self.lora_A[name]
        if self.is_stored_transposed:
            left, right = right.mT, left.mT
        return LowRank(self._parameters[name], left, right, self.lora_scale)  # type: ignore[arg-type]


def add_adapters(transformer: torch.nn.Module, *, config: LoraConfig) -> None:
    """Freeze a model of transformers and add adapters without values, before it is divided; nothing with rank 0.

    Raises ConfigRefused for a target that the model lacks.
    """
    if not config.rank:
        return
    transformer.requires_grad_(False)
    linear = {name: module for name, module in transformer.named_modules() if type(module) is torch.nn.Linear}
    chosen = {name: module for name, module in linear.items() if _target(name) in config.targets}
    fused = dict(_fused_experts(transformer))
    present = {*map(_target, linear), *(f"experts.{name}" for _, names in fused.values() for name in names)}
    if missing := set(config.targets) - present:
        want = f"linear layers and experts of this model ({', '.join(sorted(present))})"
        raise ConfigRefused("learner.lora.targets", want, sorted(missing))
    for module in chosen.values():
        module.__class__ = Adapted
        module.add(config)  # type: ignore[operator]
    for experts, names in fused.values():
        if adapted := [name for name in names if f"experts.{name}" in config.targets]:
            kind = type(experts)
            experts.__class__ = type(kind.__name__, (AdaptedExperts, kind), {"__module__": kind.__module__})
            cast(AdaptedExperts, experts).add(adapted, config)


def _fused_experts(transformer: torch.nn.Module) -> Iterator[tuple[str, tuple[torch.nn.Module, list[str]]]]:
    """Yield (name, (module, names of its weights)) of experts that have one tensor for each projection."""
    for name, module in transformer.named_modules():
        weights = [weight for weight, tensor in module.named_parameters(recurse=False) if tensor.dim() == 3]
        if _target(name) == "experts" and weights:
            yield name, (module, weights)


def tuned(root: FsdpModel, tuning: Tuning) -> "Adapters | None":
    """Freeze weights of a divided model, or give its adapters values. Returns the adapters. Raises ConfigRefused."""
    if tuning.lora.rank:
        return Adapters(root, tuning.lora, seed=tuning.seed)
    parameters = dict(root.transformer.named_parameters())
    for name, parameter in parameters.items() if tuning.freeze else ():
        parameter.requires_grad_(not is_frozen(tuning.freeze, root.file_names(name), "the model"))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigRefused("learner.optimizer.freeze", "patterns that leave weights to train", list(tuning.freeze))
    return None


def _target(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """The matrices of one weight."""

    module: Adapted | AdaptedExperts
    names: tuple[str, str]
    """PEFT's, of A and B."""
    parameter: str = ""
    """Name of the experts' weight; empty = the weight of a linear layer."""

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B as they are on this rank: a divided model exchanges the instances."""
        if self.parameter:
            experts = cast(AdaptedExperts, self.module)
            return experts.lora_A[self.parameter], experts.lora_B[self.parameter]
        layer = cast(Adapted, self.module)
        return layer.lora_A, layer.lora_B

    def first(self, seed: str) -> Tensor:
        """Return a new A."""
        shape = self.matrices[0].shape
        return first_matrix(seed, shape[:-1].numel(), shape[-1]).view(shape)

    @property
    def file_shapes(self) -> tuple[list[int], list[int]]:
        """Shapes of A and B in files."""
        a, b = self.matrices
        outputs, rank = b.shape[-2:]
        return [a.shape[:-1].numel(), a.shape[-1]], [outputs, rank * b.shape[:-2].numel()]

    def to_files(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return whole matrices as PEFT has them: of experts, A [E x R, I] and B [O, R x E]."""
        return (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) if self.parameter else (a, b)

    def of_files(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return whole matrices from PEFT's."""
        if not self.parameter:
            return a, b
        experts, rank, _ = self.matrices[0].shape
        return a.unflatten(0, (experts, rank)), b.unflatten(1, (rank, experts)).permute(2, 0, 1)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return a whole weight with whole matrices added to it."""
        if self.parameter and cast(AdaptedExperts, self.module).is_stored_transposed:
            return merged(weight.mT, a, b, scale).mT.contiguous()
        return merged(weight, a, b, scale)


def _adapters_of(transformer: torch.nn.Module) -> Iterator[tuple[str, _Adapter]]:
    """Yield the adapters by the names of their weights, without ``.weight``."""
    for name, module in transformer.named_modules():
        if isinstance(module, Adapted):
            yield name, _Adapter(module=module, names=matrices_of(name))
        elif isinstance(module, AdaptedExperts):
            # PEFT wraps a module once for each parameter, in their order: the last one is outside.
            wrapped = len(module.lora_A)
            for depth, parameter in enumerate(module.lora_A, 1):
                wrapper = ".".join([name, *["base_layer"] * (wrapped - depth)])
                yield f"{name}.{parameter}", _Adapter(module=module, names=matrices_of(wrapper), parameter=parameter)


class Adapters:
    """All adapters of one sharded model: their export, their start and their place in a checkpoint."""

    @torch.no_grad()
    def __init__(self, root: FsdpModel, config: LoraConfig, *, seed: int) -> None:
        """``root``: a model after ``add_adapters``. Raises ConfigRefused for a directory with other adapters.

        A is drawn by ``seed`` and the name of its layer: the same for every number of ranks, and for Megatron.
        """
        self.config, self._root, self._base = config, root, ""
        self._adapters = dict(_adapters_of(root.transformer))
        for name, adapter in self._adapters.items():
            a, b = adapter.matrices
            _copy(a, adapter.first(f"{seed} {name}"))
            b.zero_()
        self.loaded = False
        """True if the adapters came from a directory: otherwise the model computes as without them."""
        if config.adapter:
            self.load(Path(config.adapter))

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its adapter added to it in float32, or as it is; collective over all ranks."""
        adapter = self._adapters.get(name.removesuffix(".weight"))
        return weight if adapter is None else adapter.merged(weight, *_whole(adapter), self.config.scale)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices under PEFT's names; collective over all ranks."""
        for adapter in self._adapters.values():
            yield from zip(adapter.names, adapter.to_files(*_whole(adapter)), strict=True)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Copy this rank's parts of the matrices in a directory of PEFT's. Raises ConfigRefused for other shapes."""
        path = directory / WEIGHTS
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for adapter in self._adapters.values():
                for name, shape in zip(adapter.names, adapter.file_shapes, strict=True):
                    if name not in names or list(file.get_slice(name).get_shape()) != shape:
                        got = file.get_slice(name).get_shape() if name in names else "no such tensor"
                        raise ConfigRefused(f"{path}: {name}", f"the shape {shape}", got)
                    names.discard(name)
                stored = adapter.of_files(*map(file.get_tensor, adapter.names))
                for matrix, values in zip(adapter.matrices, stored, strict=True):
                    _copy(matrix, values)
        if names:
            raise ConfigRefused(
                str(path), "tensors of the layers in learner.lora.targets, and no others", sorted(names)[0]
            )
        self.loaded = True

    # ---- in a checkpoint, and as parameters of the model

    def facts(self) -> JsonObject:
        """Return the facts that a checkpoint of these adapters must agree with; collective over all ranks, once."""
        config = self.config
        settings: JsonObject = {
            "rank": config.rank,
            "alpha": config.alpha,
            "rslora": config.rslora,
            "targets": sorted(config.targets),
        }
        return settings | {"base": self._digest()}

    @torch.no_grad()
    def _digest(self) -> str:
        """Return a digest of the frozen weights, which the adapters belong to."""
        if not self._base:
            sums = sorted((name, sum64([tensor])) for name, tensor in self._root.export())
            self._base = hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
        return self._base

    def names(self, letter: str = "") -> list[str]:
        """Return the names of the parameters of all adapters, or of one ``letter`` (A or B)."""
        return [name for name, _ in self._root.transformer.named_parameters() if f"{MARK}{letter}" in name]


def _whole(adapter: _Adapter) -> tuple[Tensor, Tensor]:
    """Return both matrices whole; collective over all ranks."""
    a, b = (
        matrix.full_tensor().detach() if isinstance(matrix, DTensor) else matrix.detach() for matrix in adapter.matrices
    )
    return a, b


def _copy(matrix: Tensor, values: Tensor) -> None:
    if isinstance(matrix, DTensor):
        whole = values.to(matrix.device)
        values = distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None).to_local()
        matrix.to_local().copy_(values)
    else:
        matrix.copy_(values)
