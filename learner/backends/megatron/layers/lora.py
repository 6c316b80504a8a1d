"""Low-rank adapters on Megatron's split linear layers, in the parts that Hugging Face names: q_proj, k_proj, v_proj,
...

    y = W x + scale * B (A x)        W frozen; A [r, in] and B [out, r] trained; B = 0 at the start

Megatron has one layer for queries, keys and values, and one for gate and up; each part has an A and a B of its own
here, as in PEFT, so adapters of both trained elsewhere are the same tensors. A layer keeps its instance, its name and
its weight; its class is exchanged.

Over tensor-parallel ranks, B of a column-parallel layer is split by rows, and A of a row-parallel layer by columns; the
others are whole.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors import safe_open
from torch import Tensor
from torch.autograd.function import once_differentiable

from tidemill.learner.backends.megatron.layers.dense import FrozenColumn, FrozenRow
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel, of_all_stages, values_of_stages
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.trainer.exports import first_matrix
from tidemill.weightstore.format.adapters import WEIGHTS, matrices_of, merged
from tidemill.weightstore.format.checksums import sum64

MARK = ".lora_"
"""In the names of all parameters of adapters, and of no other."""
LAYERS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Layers of a decoder layer that can have adapters."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter of the model, by Megatron's name, belongs to an adapter."""
    return MARK in name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a layer's output that has a Hugging Face name of its own."""

    target: str
    """q_proj, ..."""
    width: int
    """Number of its elements in each of the layer's groups."""
    trained: bool
    """True if it has an adapter."""


class _LoraLayer(torch.nn.Module):
    """Mixin for Megatron's linear layers, to be the first base class; ``add`` is its constructor."""

    lora_parts: tuple[_Part, ...]
    lora_groups: int
    """Groups of the output. In each group the parts follow each other."""
    lora_scale: float
    _SPLIT: ClassVar[Mapping[str, int]]
    """Dimension that is split over tensor-parallel ranks, by the first letters of a parameter's name."""

    def add(
        self, parts: tuple[_Part, ...], groups: int, config: LoraConfig, first: Callable[[str, int], Tensor]
    ) -> None:
        """Add the parameters. ``first(target, columns)`` returns this rank's part of a new A with so many columns
        here.
        """
        self.lora_parts, self.lora_groups, self.lora_scale = parts, groups, config.scale
        weight: Tensor = self.weight  # type: ignore[assignment]
        for part in self._trained():
            a_RI = first(part.target, weight.shape[1]).to(weight)
            b_OR = torch.zeros(part.width * groups, config.rank, dtype=weight.dtype, device=weight.device)
            for letter, tensor in (("lora_A_", a_RI), ("lora_B_", b_OR)):
                parameter = torch.nn.Parameter(tensor)
                split = letter in self._SPLIT
                set_tensor_model_parallel_attributes(parameter, split, self._SPLIT.get(letter, -1), 1)
                # Without a split, each rank has the gradient of its own tokens only when they are divided between the
                # ranks.
                parameter.sequence_parallel = not split and self._own_tokens  # type: ignore[attr-defined]
                self.register_parameter(letter + part.target, parameter)

    @property
    def _own_tokens(self) -> bool:
        return bool(self.config.sequence_parallel)  # type: ignore[union-attr]

    def _trained(self) -> list[_Part]:
        return [part for part in self.lora_parts if part.trained]

    def _inner(self, x: Tensor) -> Tensor:
        """Return A x of all parts, one behind the other."""
        matrices = [getattr(self, f"lora_A_{part.target}") for part in self._trained()]
        return x @ (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).t()

    def _outers(self) -> list[Tensor]:
        """Return B of each part that has an adapter."""
        return [getattr(self, f"lora_B_{part.target}") for part in self._trained()]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the layer's checkpoint entries with those of the adapters, which Megatron's own class takes for
        unsplit.
        """
        entries: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        adapter_parameters = {
            name: parameter for name, parameter in self.named_parameters(recurse=False) if is_adapter(f".{name}")
        }
        axes = {name: self._SPLIT[name[:7]] for name in adapter_parameters if name[:7] in self._SPLIT}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return entries | make_sharded_tensors_for_checkpoint(
            adapter_parameters, prefix, axes, sharded_offsets, **groups
        )


class _Added(torch.autograd.Function):
    """``out + B inner`` in place, part by part: a tensor of the output's size more costs as much as the products."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, inner: Tensor, parts: tuple[_Part, ...], groups: int, *matrices: Tensor
    ) -> Tensor:
        """Return ``out``. ``matrices``: B of the trained parts, [part.width * groups, r]."""
        ctx.save_for_backward(inner, *matrices)
        ctx.parts, ctx.groups = parts, groups
        for place, inner_TR, b_OR in _each(out, inner, parts, groups, matrices):
            place += (inner_TR @ b_OR.t()).view(place.shape)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of out, inner and matrices."""
        inner, *matrices = ctx.saved_tensors
        grads_inner, grads_b = [], []
        for place, inner_TR, b_OR in _each(grad, inner, ctx.parts, ctx.groups, matrices):
            grad_TO = place.flatten(1)
            grads_inner.append(grad_TO @ b_OR)
            grads_b.append(grad_TO.t() @ inner_TR)
        return grad, torch.cat(grads_inner, dim=1).view(inner.shape), None, None, *grads_b


def _each(
    out: Tensor, inner: Tensor, parts: tuple[_Part, ...], groups: int, matrices: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield for each trained part its place in ``out``, [T, groups, width], its columns of ``inner``, [T, r], and B."""
    places_TGW = out.flatten(0, -2).unflatten(-1, (groups, -1)).split([part.width for part in parts], dim=-1)
    trained = [place for place, part in zip(places_TGW, parts, strict=True) if part.trained]
    yield from zip(trained, inner.flatten(0, -2).chunk(len(trained), dim=-1), matrices, strict=True)


class LoraColumn(_LoraLayer, FrozenColumn):
    """A column-parallel layer with adapters."""

    _SPLIT: ClassVar[Mapping[str, int]] = {"lora_B_": 0}

    def forward(self, input_: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Return output and bias of the layer, adapters included."""
        out, bias = super().forward(input_, *arguments, **named)
        inner = self._inner(input_)
        if self._own_tokens:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
        else:
            inner = copy_to_tensor_model_parallel_region(inner)
        added: Tensor = _Added.apply(out, self.lora_scale * inner, self.lora_parts, self.lora_groups, *self._outers())
        return added, bias


class LoraRow(_LoraLayer, FrozenRow):
    """A row-parallel layer with adapters."""

    _SPLIT: ClassVar[Mapping[str, int]] = {"lora_A_": 1}

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and bias of the layer, adapters included."""
        out, bias = super().forward(input_)
        inner = self._inner(input_)
        reduce = (
            reduce_scatter_to_sequence_parallel_region if self._own_tokens else reduce_from_tensor_model_parallel_region
        )
        [b_OR] = self._outers()
        return torch.add(out, reduce(inner) @ b_OR.t(), alpha=self.lora_scale), bias


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """One adapter on this rank."""

    name: str
    """Hugging Face name of its layer: model.layers.0.self_attn.q_proj."""
    layer: Any
    target: str

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """This rank's parts of A and B."""
        return getattr(self.layer, f"lora_A_{self.target}"), getattr(self.layer, f"lora_B_{self.target}")


class MegatronAdapters:
    """All adapters of one rank's model. Their export, their start and their place in a checkpoint."""

    def __init__(
        self, chunks: Sequence[GPTModel], bridge: Any, parallel: Parallel, config: LoraConfig, *, seed: int
    ) -> None:
        """Freeze the model's weights and add adapters to it, before it is wrapped. Raises ConfigRefused."""
        self.config, self._chunks, self._bridge, self._parallel = config, tuple(chunks), bridge, parallel
        self._base = ""
        for chunk in chunks:
            chunk.requires_grad_(False)
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        self._adapters = {
            adapter.name: adapter for layer in layers for place in LAYERS for adapter in self._on(layer, place, seed)
        }
        # A stage may lack a target that others have: the first layers of a model of experts may be the only ones with
        # an MLP.
        targets_of_stages = values_of_stages({adapter.target for adapter in self._adapters.values()}, parallel)
        targets_of_all = set().union(*targets_of_stages)
        if missing := set(config.targets) - targets_of_all:
            want = f"layers of this model that can have adapters ({', '.join(sorted(targets_of_all))})"
            raise ConfigRefused("learner.lora.targets", want, sorted(missing))
        if set() in targets_of_stages:
            want = "layers in every stage: lower learner.pipeline_parallel"
            raise ConfigRefused("learner.lora.targets", want, f"none in stage {targets_of_stages.index(set())}")
        self.loaded = False
        """True if the adapters came from a directory: otherwise the model computes as without them."""
        if config.adapter:
            self.load(Path(config.adapter))

    def _on(self, layer: Any, place: str, seed: int) -> Iterator[_Adapter]:
        """Add the adapters of one layer, and yield them."""
        module: Any = dict(layer.named_modules()).get(place)
        if type(module) not in _CLASSES:
            return
        names = self._bridge._weight_name_mapping_mcore_to_hf(f"decoder.layers.{layer.layer_number - 1}.{place}.weight")
        modules = [name.removesuffix(".weight") for name in names]
        parts = _parts(module, [name.rpartition(".")[2] for name in modules], self.config)
        if not any(part.trained for part in parts):
            return
        parent = {part.target: name for part, name in zip(parts, modules, strict=True)}
        module.__class__ = _CLASSES[type(module)]
        groups = 1 if len(parts) != 3 else module.config.num_query_groups // self._parallel.tp_size

        def first(target: str, columns: int) -> Tensor:
            """Return this rank's columns of a new A: the same whole matrix for every layout."""
            is_split = "lora_A_" in module._SPLIT
            all_columns = columns * (self._parallel.tp_size if is_split else 1)
            a_RI = first_matrix(f"{seed} {parent[target]}", self.config.rank, all_columns)
            return a_RI.chunk(all_columns // columns, dim=1)[self._parallel.tp_rank if is_split else 0].clone()

        module.add(parts, groups, self.config, first)
        yield from (
            _Adapter(name=parent[part.target], layer=module, target=part.target) for part in parts if part.trained
        )

    # ---- weights

    @torch.no_grad()
    def merged(self, exported: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield exported weights with the adapters added to them, in float32; the model's own tensors do not change.
        Collective (TP).
        """
        for name, tensor in exported:
            adapter = self._adapters.get(name.removesuffix(".weight"))
            if adapter is None:
                yield name, tensor
                continue
            yield name, merged(tensor, *self._whole(adapter), self.config.scale)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices of this stage under PEFT's names; collective over the tensor-parallel ranks."""
        for adapter in self._adapters.values():
            a_RI, b_OR = self._whole(adapter)
            yield from zip(matrices_of(adapter.name), (a_RI, b_OR), strict=True)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Copy this rank's parts of the matrices in a directory of PEFT's. Raises ConfigRefused for one of another
        shape.
        """
        path, rank, size = directory / WEIGHTS, self._parallel.tp_rank, self._parallel.tp_size
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for adapter in self._adapters.values():
                for letter, name, mine in zip("AB", matrices_of(adapter.name), adapter.matrices, strict=True):
                    split = adapter.layer._SPLIT.get(f"lora_{letter}_")
                    full_shape = [extent * (size if at == split else 1) for at, extent in enumerate(mine.shape)]
                    if name not in names or list(file.get_slice(name).get_shape()) != full_shape:
                        got = file.get_slice(name).get_shape() if name in names else "no such tensor"
                        raise ConfigRefused(f"{path}: {name}", f"the shape {full_shape}", got)
                    full_weight = file.get_tensor(name)
                    mine.copy_(full_weight if split is None else full_weight.chunk(size, dim=split)[rank])
                    names.discard(name)
        if names and self._parallel.pp_size == 1:  # with stages, the others have the rest
            raise ConfigRefused(
                str(path), "tensors of the layers in learner.lora.targets, and no others", sorted(names)[0]
            )
        self.loaded = True

    def _whole(self, adapter: _Adapter) -> tuple[Tensor, Tensor]:
        """Return both matrices whole."""
        splits = [adapter.layer._SPLIT.get(letter) for letter in ("lora_A_", "lora_B_")]
        a_RI, b_OR = (
            self._gathered(matrix.detach(), split) for matrix, split in zip(adapter.matrices, splits, strict=True)
        )
        return a_RI, b_OR

    def _gathered(self, mine: Tensor, split: int | None) -> Tensor:
        if split is None or self._parallel.tp_size == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self._parallel.tp_size)]
        dist.all_gather(parts, mine.contiguous(), group=self._parallel.tp_group)
        return torch.cat(parts, dim=split)

    # ---- in a checkpoint, and as parameters of the model

    def facts(self) -> dict[str, object]:
        """Return the facts that a checkpoint of these adapters must agree with; collective over the ranks of a copy of
        the model, once.
        """
        config = self.config
        settings = {
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
            weights = of_all_stages(self._bridge.export(self._chunks), self._parallel)
            sums = sorted((name, sum64([tensor])) for name, tensor in weights)
            self._base = hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
        return self._base

    def names(self, letter: str = "") -> list[str]:
        """Return Megatron's names of the parameters of all adapters, or of one ``letter`` (A or B), as a
        policy names them.
        """
        named = [(number, name) for number, chunk in enumerate(self._chunks) for name, _ in chunk.named_parameters()]
        return [
            f"{number}.{name}" if len(self._chunks) > 1 else name for number, name in named if f"{MARK}{letter}" in name
        ]


_CLASSES: Mapping[type, type] = {ColumnParallelLinear: LoraColumn, RowParallelLinear: LoraRow}


def _parts(layer: Any, targets: list[str], config: LoraConfig) -> tuple[_Part, ...]:
    """Return the parts of a layer's output on this rank: the queries, the keys and the values of a group of heads, or
    the two halves of a gated MLP.
    """
    if len(targets) == 3:
        model = layer.config
        widths = [
            model.num_attention_heads // model.num_query_groups * model.kv_channels,
            model.kv_channels,
            model.kv_channels,
        ]
    else:
        widths = [layer.weight.shape[0] // len(targets)] * len(targets)
    return tuple(
        _Part(target=target, width=width, trained=target in config.targets)
        for target, width in zip(targets, widths, strict=True)
    )
