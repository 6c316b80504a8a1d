"""Context managers that let Megatron-core run without CUDA: where it names the CUDA device, it gets the CPU.

No patch is permanent: ``megatron_device()`` is entered around building a model, a forward-backward pass and an
optimizer step. With CUDA it does nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces ``device="cuda"``, ``Tensor.cuda()`` and ``Tensor.type()`` in the calls of Megatron-core 0.16.

    Its schedules and optimizers create their scalars on "cuda", and its optimizers recognise parameters by
    "torch.cuda.FloatTensor".
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # "torch.FloatTensor" -> "torch.cuda.FloatTensor", the spelling that Megatron's optimizers compare with.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        return func(*args)


def _is_cuda(device: Any) -> bool:
    return device == "cuda" or (isinstance(device, torch.device) and device.type == "cuda")


class _Stream:
    """A stream of a device that has none: its operations are done when they return."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        """Do nothing."""


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes for Megatron's exchange of tokens: its own function converts tensors on CUDA alone."""
    return tensor.detach().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_stream = _Stream()
_mode = _CudaMeansCpu()
_ANSWERS: Mapping[tuple[Any, str], Callable[..., Any]] = {
    (torch.cuda, "current_device"): lambda: torch.device("cpu"),
    (torch.cuda, "synchronize"): lambda device=None: None,
    (torch.cuda, "Stream"): lambda *_, **__: _stream,
    (torch.cuda, "current_stream"): lambda device=None: _stream,
    (torch.cuda, "stream"): lambda stream: contextlib.nullcontext(),
    (token_dispatcher, "maybe_move_tensor_to_cpu"): _to_host,
    (megatron_random, "_get_cuda_rng_state"): lambda *_, **__: None,
    (megatron_random, "_set_cuda_rng_state"): lambda *_, **__: None,
}
"""Replacements. Rotary positions and gradient buffers query the device, checkpoints synchronise with it, recomputation
saves and restores its generator, and the exchange of tokens between experts has a stream of its own.
"""


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Map "cuda" to the device of this process inside the context. Not re-entrant; one thread at a time."""
    if torch.cuda.is_available():
        yield
        return
    originals = {(owner, name): getattr(owner, name) for owner, name in _ANSWERS}
    for (owner, name), answer in _ANSWERS.items():
        setattr(owner, name, answer)
    try:
        with _mode:
            yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Suspend ``megatron_device()``, for code that calls torch often and never names CUDA (the model's forward)."""
    if torch.cuda.is_available():
        yield
        return
    _mode.__exit__(None, None, None)
    try:
        yield
    finally:
        _mode.__enter__()
