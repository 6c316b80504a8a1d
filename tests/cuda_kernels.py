"""Operations that raise on CUDA in the learner's deterministic mode, recorded where there is no CUDA.

Source: the documentation of ``torch.use_deterministic_algorithms`` (torch 2.13), the list of operations that throw a
RuntimeError.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _always(arguments: Mapping[str, Any]) -> bool:
    return True


def _of_floats(arguments: Mapping[str, Any]) -> bool:
    dtype = arguments.get("dtype") or arguments["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


UPSAMPLE = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
POOLS = ("avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
RAISING: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    **{f"{name}_backward": _always for name in (*POOLS, "fractional_max_pool2d", "fractional_max_pool3d")},
    **{f"reflection_pad{dims}d_backward": _always for dims in (1, 2, 3)},
    **{f"{name}_backward": _always for name in UPSAMPLE},
    **{
        name: _always
        for name in ("max_unpool2d", "max_unpool3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward")
    },
    **{
        name: _always
        for name in ("nll_loss_forward", "nll_loss2d_forward", "_ctc_loss_backward", "put", "put_", "histc")
    },
    "_embedding_bag_dense_backward": lambda arguments: arguments["mode"] == 2,
    "bincount": lambda arguments: arguments.get("weights") is not None,
    "median": lambda arguments: "dim" in arguments,
    "nanmedian": lambda arguments: "dim" in arguments,
    "cumsum": _of_floats,
    "cumsum_": _of_floats,
    "scatter_reduce": lambda arguments: arguments["reduce"] == "prod",
    "scatter_reduce_": lambda arguments: arguments["reduce"] == "prod",
}
"""Operators of aten, each with the condition on its arguments under which it raises."""


class RaisingOnCuda(TorchDispatchMode):
    """Records the operators called inside it, forward and backward, that would raise on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in RAISING:
            names = [argument.name for argument in func._schema.arguments]
            if RAISING[name](dict(zip(names, args, strict=False)) | (kwargs or {})):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


assert all(hasattr(torch.ops.aten, name) for name in RAISING), "an operator of the table has another name in this torch"
