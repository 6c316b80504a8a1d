"""The weights that are trained: all, all but the weights that ``learner.optimizer.freeze`` names, or adapters of low
rank alone (``learner.lora``).

    y = W x + scale * B (A x)        W frozen; A [r, in] and B [out, r] trained; B = 0 at the start

A linear layer keeps its instance, its name and its weight; its class is exchanged. Experts, which are one tensor of a
layer, get no adapters.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.backends.fsdp.model import FsdpModel
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.optimizer import LoraConfig, Tuning, is_frozen
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


def add_adapters(transformer: torch.nn.Module, *, config: LoraConfig) -> None:
    """Freeze a model of transformers and add adapters without values, before it is divided; nothing with rank 0.

    Raises ConfigRefused for a target that the model lacks.
    """
    if not config.rank:
        return
    transformer.requires_grad_(False)
    linear = {name: module for name, module in transformer.named_modules() if type(module) is torch.nn.Linear}
    chosen = {name: module for name, module in linear.items() if _target(name) in config.targets}
    if missing := set(config.targets) - set(map(_target, chosen)):
        present = ", ".join(sorted(set(map(_target, linear))))
        raise ConfigRefused("learner.lora.targets", f"linear layers of this model ({present})", sorted(missing))
    for module in chosen.values():
        module.__class__ = Adapted
        module.add(config)  # type: ignore[operator]


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


class Adapters:
    """All adapters of one sharded model: their export, their start and their place in a checkpoint."""

    @torch.no_grad()
    def __init__(self, root: FsdpModel, config: LoraConfig, *, seed: int) -> None:
        """``root``: a model after ``add_adapters``. Raises ConfigRefused for a directory with other adapters.

        A is drawn by ``seed`` and the name of its layer: the same for every number of ranks, and for Megatron.
        """
        self.config, self._root, self._base = config, root, ""
        self._adapters = {
            name: module for name, module in root.transformer.named_modules() if isinstance(module, Adapted)
        }
        for name, module in self._adapters.items():
            _copy(module.lora_A, first_matrix(f"{seed} {name}", config.rank, module.in_features))
            module.lora_B.zero_()
        self.loaded = False
        """True if the adapters came from a directory: otherwise the model computes as without them."""
        if config.adapter:
            self.load(Path(config.adapter))

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its adapter added to it in float32, or as it is; collective over all ranks."""
        module = self._adapters.get(name.removesuffix(".weight"))
        return weight if module is None else merged(weight, *_whole(module), self.config.scale)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole matrices under PEFT's names; collective over all ranks."""
        for name, module in self._adapters.items():
            yield from zip(matrices_of(name), _whole(module), strict=True)

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Copy this rank's parts of the matrices in a directory of PEFT's. Raises ConfigRefused for other shapes."""
        path = directory / WEIGHTS
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for layer, module in self._adapters.items():
                for name, matrix in zip(matrices_of(layer), (module.lora_A, module.lora_B), strict=True):
                    if name not in names or list(file.get_slice(name).get_shape()) != list(matrix.shape):
                        got = file.get_slice(name).get_shape() if name in names else "no such tensor"
                        raise ConfigRefused(f"{path}: {name}", f"the shape {list(matrix.shape)}", got)
                    _copy(matrix, file.get_tensor(name))
                    names.discard(name)
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


def _whole(module: Adapted) -> tuple[Tensor, Tensor]:
    """Return both matrices whole; collective over all ranks."""
    a_RI, b_OR = (
        matrix.full_tensor().detach() if isinstance(matrix, DTensor) else matrix.detach()
        for matrix in (module.lora_A, module.lora_B)
    )
    return a_RI, b_OR


def _copy(matrix: Tensor, values: Tensor) -> None:
    if isinstance(matrix, DTensor):
        whole = values.to(matrix.device)
        values = distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None).to_local()
        matrix.to_local().copy_(values)
    else:
        matrix.copy_(values)
