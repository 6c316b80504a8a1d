"""Weights of a sharded model: read from a Hugging Face directory by rank 0, and exported under its names.

transformers keeps some weights in another form than their files (experts of a layer as one tensor). It converts them
while it loads, and back while it saves. The same conversions are used here, layer by layer.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from tidemill.bus.system.functions import described
from tidemill.learner.backends.fsdp.opening import encoding_of, plain_config, with_heads
from tidemill.learner.checkpoints.decoding import decoded_files
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.model_files import beside_text_in, stored_in
from tidemill.weightstore.format.manifest import unconverted_names

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(.*?\blayers\.\d+)\.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of dtypes in the headers of safetensors."""


def read_model(config: Any, directory: Path, *, heads: int = 0) -> Any:
    """Return the whole model of a directory in float32 on the CPU, with quantized weights decoded.

    ``heads``: for further tokens, which are read, too.

    Raises ConfigRefused where weights of the model are missing in the files, or have other shapes.
    """
    disable_progress_bar()  # of transformers, which a log has line by line
    encoding, plain = encoding_of(config), plain_config(config)
    options = {"config": plain, "dtype": torch.float32, "output_loading_info": True}
    try:
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(plain))
        if heads:
            kind = with_heads(kind, heads)
        if encoding:
            settings = config.quantization_config
            tensors = decoded_files(directory, encoding, settings)
            model, report = kind.from_pretrained(None, state_dict=tensors, **options)
        else:
            model, report = kind.from_pretrained(directory, use_safetensors=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigRefused("model.path", "files of the model's weights", described(error)) from error
    faults = [*sorted(report["missing_keys"]), *sorted(map(str, report["mismatched_keys"]))]
    if faults:
        raise ConfigRefused("model.path", f"files with all weights of {type(model).__name__}", f"not {faults[:3]}")
    if left_out := sorted(report["unexpected_keys"] - beside_text_in(directory).keys()):
        log.warning("weights_not_loaded count=%d first=%s directory=%s", len(left_out), left_out[0], directory)
    return model


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers of a model; a tied one once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def refuse_other_tensors(
    live: torch.nn.Module, source: torch.nn.Module, names: Collection[str], directory: Path
) -> None:
    """Raise ConfigRefused unless the tensors of ``source``, which has been read from a directory, have the names (those
    of the live model's files) and the shapes of the live ones: with others a model would be mixed of two.
    """
    present = {name: tuple(tensor.shape) for name, tensor in named_tensors(live) if name in names}
    other = {name: tuple(tensor.shape) for name, tensor in named_tensors(source)}
    for name in sorted(present.keys() | other.keys()):
        if present.get(name) != other.get(name):
            want = f"a model with the tensors of the trained one: {name} of {present.get(name, 'no size: it has none')}"
            raise ConfigRefused(str(directory), want, other.get(name, "none"))


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers that belong to a checkpoint (biases of routers)."""
    stored = model.state_dict().keys()
    yield from ((name, tensor) for name, tensor in named_tensors(model) if name in stored)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def distribute(
    model: torch.nn.Module,
    source: torch.nn.Module | None,
    names: Collection[str],
    *,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Copy the named tensors of ``source``, which the first rank of the group has, into the live model. Collective.

    Also buffers that no file has (angles of rotary positions), because a model made without memory has no values
    there. One whole tensor at a time is on the device.
    """
    values = dict(named_tensors(source)) if source is not None else {}
    for name, target in named_tensors(model):
        if name not in names:
            continue
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if source is not None:
            whole.copy_(values[name])
        if dist.get_world_size(group) > 1:
            dist.broadcast(whole, group=group, group_src=0)
        if isinstance(target, DTensor):
            whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
        local(target).copy_(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """Names and dtypes of a model's weights in its files."""

    conversions: tuple[Any, ...] = ()
    """transformers' conversions that the files needed."""
    wide: frozenset[str] = frozenset()
    """Names of tensors that the files have in float32, although most of theirs are narrower."""

    names: frozenset[str] = frozenset()
    """Names in memory of the tensors that were loaded. Others (adapters) are in no file."""
    kept: frozenset[str] = frozenset()
    """Those of them that the files have, too, and that transformers would rename all the same."""

    @classmethod
    def of(cls, model: Any, directory: Path) -> "FileForm":
        """Return the form of the files from which a model has been read."""
        weights = dict(named_weights(model))

        def renamed(name: str) -> Collection[str]:
            names: Collection[str] = revert_weight_conversion(model, {name: weights[name].to("meta")})
            return names

        return cls(
            conversions=tuple(model._weight_conversions),
            wide=wide_names(directory),
            names=frozenset(name for name, _ in named_tensors(model)),
            kept=unconverted_names(weights, stored_in(directory), renamed),
        )

    def export(
        self, model: Any, *, dtype: torch.dtype, device: torch.device, changed: Callable[[str, Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights in the form of the files, layer by layer, on ``device``. Collective.

        ``changed``: gets each weight by its name in memory, whole, in the same order on all ranks.
        """
        for part in _by_layer(named_weights(model)):
            whole = {
                name: changed(name, whole_tensor(tensor, device))
                for name, tensor in part.items()
                if name in self.names and name not in model.all_tied_weights_keys
            }
            for name, tensor in self.reverted(model, whole).items():
                wanted = torch.float32 if name in self.wide else dtype
                yield name, tensor.to(wanted) if tensor.is_floating_point() else tensor

    def reverted(self, model: Any, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model by their names in the files, joined or divided as there."""
        # The public conversion reads this attribute, which ``from_pretrained`` sets: on the first rank alone.
        model._weight_conversions = list(self.conversions)
        kept = {name: tensor for name, tensor in whole.items() if name in self.kept}
        return kept | revert_weight_conversion(model, {name: whole[name] for name in whole if name not in kept})

    def file_names(self, model: Any, name: str) -> list[str]:
        """Return the names in the files of a parameter of the model."""
        shape = model.get_parameter(name).shape
        return list(self.reverted(model, {name: torch.empty(shape, device="meta")}))


def whole_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole of a weight on ``device``. Collective over the ranks that have its parts."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor.to_local()
    if part.device != device:  # of a model in host memory; collectives are on the device
        placed = (tensor.device_mesh, tensor.placements)
        tensor = DTensor.from_local(
            part.to(device), *placed, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor()


def _by_layer(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the weights of each layer together, and each of the others alone."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer = _LAYER.match(name)
        layers.setdefault(layer[1] if layer else name, {})[name] = tensor
    yield from layers.values()


def wide_names(directory: Path) -> frozenset[str]:
    """Return the names of tensors in float32, where most numbers of the directory's weights are narrower."""
    sizes: dict[torch.dtype, int] = {}
    wide = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                entry = tensors.get_slice(name)
                dtype = _DTYPES.get(entry.get_dtype())
                if dtype is None:
                    continue
                sizes[dtype] = sizes.get(dtype, 0) + int(torch.Size(entry.get_shape()).numel())
                if dtype == torch.float32:
                    wide.append(name)
    return frozenset() if max(sizes, key=sizes.__getitem__, default=torch.float32) == torch.float32 else frozenset(wide)
