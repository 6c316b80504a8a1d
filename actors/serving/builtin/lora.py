"""Low-rank adapters beside the weights: y = W x + scale * B (A x), for the rows of a batch that use them.

The parts of a fused projection (query, key and value; gate and up) have an A and a B each. Here the A of all parts lie
one below the other, and their B in blocks along the diagonal of one matrix, so that each projection costs two products
more. Knows no version and no sequence.

Shape letters: B = rows, T = tokens per row, I = input size, O = output size, R = ranks of all parts of a projection.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.updates import require_new
from tidemill.weightstore.format.adapters import AdapterHeader, matrices_of, module_of
from tidemill.weightstore.format.manifest import Bucket, TensorSpec, spec_of, unflatten

QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"
"""The fused projections of a layer."""


def _parts(shape: ModelShape) -> Mapping[str, tuple[str, ...]]:
    halves = ("mlp.gate_up_proj",) if shape.joint_gate_up else ("mlp.gate_proj", "mlp.up_proj")
    return {
        QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        OUTPUT: ("self_attn.o_proj",),
        GATE_UP: halves,
        DOWN: ("mlp.down_proj",),
    }


class Adapter:
    """The matrices of one adapter. Nothing writes them any more."""

    def __init__(self, named: Mapping[str, Tensor], scale: float, shape: ModelShape) -> None:
        """``named``: checked tensors by PEFT's names, in the engine's dtype, on its device."""
        self.named, self.scale = named, scale
        sizes = shape.tensors()
        self.layers: list[dict[str, tuple[Tensor, Tensor]]] = [
            {
                projection: matrices
                for projection, parts in _parts(shape).items()
                if (matrices := self._fused(sizes, [f"model.layers.{layer}.{part}" for part in parts])) is not None
            }
            for layer in range(shape.num_layers)
        ]
        """Of each layer: projection -> (A [R, I], B [O, R])."""

    def _fused(self, sizes: Mapping[str, tuple[int, ...]], modules: Sequence[str]) -> tuple[Tensor, Tensor] | None:
        present = {module: matrices_of(module) for module in modules if matrices_of(module)[0] in self.named}
        if not present:
            return None
        a_RI = torch.cat([self.named[a] for a, _ in present.values()])
        b_OR = a_RI.new_zeros(sum(sizes[f"{module}.weight"][0] for module in modules), len(a_RI))
        row = column = 0
        for module in modules:
            height = sizes[f"{module}.weight"][0]
            if module in present:
                part = self.named[present[module][1]]
                b_OR[row : row + height, column : column + part.shape[1]] = part
                column += part.shape[1]
            row += height
        return a_RI, b_OR


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that use one adapter."""

    adapter: Adapter
    rows: Tensor | None
    """Their numbers; None = all rows."""


def add(out_BTO: Tensor, x_BTI: Tensor, uses: Iterable[AdapterRows], layer: int, projection: str) -> Tensor:
    """Return ``out_BTO``, output of a projection for ``x_BTI``, with the adapters of its rows. It may be written."""
    for use in uses:
        matrices = use.adapter.layers[layer].get(projection)
        if matrices is None:
            continue
        a_RI, b_OR = matrices
        if use.rows is None:
            out_BTO = _added(out_BTO, x_BTI, a_RI, b_OR, use.adapter.scale)
        else:
            out_BTO[use.rows] = _added(out_BTO[use.rows], x_BTI[use.rows], a_RI, b_OR, use.adapter.scale)
    return out_BTO


def _added(out_BTO: Tensor, x_BTI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    inner_NR = x_BTI.flatten(0, -2) @ a_RI.t()
    return torch.addmm(out_BTO.flatten(0, -2), inner_NR, b_OR.t(), alpha=scale).view(out_BTO.shape)


class IncomingAdapter:
    """The matrices of an adapter that have been received so far."""

    def __init__(self, header: AdapterHeader, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.header = header
        self._shape, self._dtype, self._device = shape, dtype, device
        sizes, places = shape.tensors(), [part for parts in _parts(shape).values() for part in parts]
        self._sizes = {
            name: sizes[name]
            for layer in range(shape.num_layers)
            for place in places
            if (name := f"model.layers.{layer}.{place}.weight") in sizes
        }
        self._named: dict[str, Tensor] = {}

    def check_new(self, specs: Sequence[TensorSpec], announced: Iterable[str]) -> None:
        """Raise UpdateRefused unless these tensors have names and shapes of matrices of this model, and are new."""
        require_new((spec.name for spec in specs), {spec.name for spec in specs if self._fits(spec)}, set(announced))

    def _fits(self, spec: TensorSpec) -> bool:
        """Return False for a name without a layer. Raises UpdateRefused for a wrong shape."""
        match module_of(spec.name):
            case (module, letter) if (size := self._sizes.get(f"{module}.weight")) is not None:
                axis = 1 if letter == "A" else 0
                if len(spec.shape) != 2 or spec.shape[axis] != size[axis] or not all(spec.shape):
                    want = f"[rank, {size[1]}]" if letter == "A" else f"[{size[0]}, rank]"
                    raise UpdateRefused(f"{spec.name}: want shape {want}, got {list(spec.shape)}")
                if not getattr(torch, spec.dtype).is_floating_point:
                    raise UpdateRefused(f"{spec.name}: want floating-point numbers, got {spec.dtype}")
                return True
        return False

    def add(self, bucket: Bucket, message: Tensor) -> None:
        """Copy the tensors of a flat bucket, which were checked. Blocking."""
        self._copy(unflatten(bucket, message))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a file. Blocking. Raises as ``check_new``."""
        self.check_new([spec_of(name, tensor) for name, tensor in tensors.items()], ())
        self._copy(tensors.items())

    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._named |= {name: tensor.to(device=self._device, dtype=self._dtype, copy=True) for name, tensor in tensors}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the sender may write there again

    @property
    def named(self) -> Mapping[str, Tensor]:
        """The matrices received so far."""
        return self._named

    def check_complete(self) -> None:
        """Raise UpdateRefused unless all matrices were received, an A and a B of equal rank for each layer."""
        if len(self._named) != self.header.num_tensors:
            raise UpdateRefused(f"adapter: want {self.header.num_tensors} tensors, got {len(self._named)}")
        for module in self._modules():
            a, b = (self._named.get(name) for name in matrices_of(module))
            if a is None or b is None or a.shape[0] != b.shape[1]:
                shapes = [None if matrix is None else list(matrix.shape) for matrix in (a, b)]
                raise UpdateRefused(f"adapter: {module}: want A and B of one rank, got shapes {shapes}")

    def check_finite(self) -> None:
        """Raise UpdateRefused for numbers that are not finite, with which every response would fail. Blocking."""
        for name, tensor in self._named.items():
            if not tensor.isfinite().all():
                raise UpdateRefused(f"adapter: {name}: want finite numbers, got others among them")

    def _modules(self) -> Iterator[str]:
        for name in self._named:
            module = module_of(name)
            assert module is not None, "names are checked before"
            yield module[0]

    def built(self) -> Adapter:
        """Return the complete adapter. Blocking."""
        self.check_complete()
        return Adapter(self._named, self.header.scale, self._shape)
