"""Lets Megatron-core run where there is no CUDA: it names the CUDA device in a few places, and this answers with the CPU.

Nothing is installed for good: ``megatron_device()`` is entered around building a model, a forward-backward pass and an optimizer step,
and left again. Where CUDA is present it does nothing at all.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """Answers ``device="cuda"``, ``Tensor.cuda()`` and ``Tensor.type()`` as Megatron-core 0.16 asks them.

    Its schedules and optimizers make their scalars on "cuda", and its optimizers recognise parameters by "torch.cuda.FloatTensor".
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        return func(*args)


def _is_cuda(device: Any) -> bool:
    return device == "cuda" or (isinstance(device, torch.device) and device.type == "cuda")


_mode = _CudaMeansCpu()
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda device=None: None,
}
"""What ``torch.cuda`` says meanwhile: rotary positions and gradient buffers ask for the device, checkpoints wait for it."""


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """While entered, Megatron's "cuda" is the device of this process. Not re-entrant; one thread at a time."""
    if torch.cuda.is_available():
        yield
        return
    originals = {name: getattr(torch.cuda, name) for name in _ANSWERS}
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, answer)
    try:
        with _mode:
            yield
    finally:
        for name, original in originals.items():
            setattr(torch.cuda, name, original)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Inside ``megatron_device()``: leave it for a stretch that calls torch often and needs none of it (the model's forward)."""
    if torch.cuda.is_available():
        yield
        return
    _mode.__exit__(None, None, None)
    try:
        yield
    finally:
        _mode.__enter__()
