"""The choice of kernels on one device: what decides about them, attention, and kernels of Triton.

Each choice is a pure function that also gives its reason.
"""

import functools
import importlib.util
import inspect
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tidemill.learner.errors import ConfigRefused

SDPA, VARLEN, CUDNN = "sdpa", "varlen", "cudnn"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZE, FLASH_MULTIPLE = 256, 8
"""Largest head size of torch's flash attention, and its divisor: the operator does not pad, as SDPA does."""
FLASH_CAPABILITY = (8, 0)  # oldest compute capability of torch's flash attention: Ampere
LONG_SEQUENCE = 4096
"""Tokens from which ``cudnn`` gives a sequence to cuDNN: there it took 0.70 of flash attention's time on an H200, from
8,192 tokens 0.57 (16 heads of 128); from 2,048 to 2,752 tokens 0.70 to 1.05, with 1,024 more than twice as much.
"""
CUDNN_CAPABILITY, CUDNN_VERSION, CUDNN_HEAD_SIZE = (9, 0), 91900, 128
"""Compute capability and oldest cuDNN (9.19) with which cuDNN's attention has run here, and its largest head size. On
capability 10.0 it was wrong for fewer than eight heads of keys (PyTorch issue 193893).
"""
FLASH_ARGUMENTS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask"),
)
"""Arguments of torch's operator for flash attention by their order."""


class Choice(NamedTuple):
    """A kernel and the reason for it."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class Site:
    """Facts that decide about kernels: the device, the model, and the abilities of the installed torch."""

    device: str
    """cpu | cuda"""
    dtype: torch.dtype
    head_size: int
    capability: tuple[int, int]
    """Compute capability of a CUDA device; (0, 0) on the CPU."""
    varlen: frozenset[str]
    """Parameters of torch's ``varlen_attn``; empty if this torch has none, and without CUDA, where it is not imported.
    """
    deterministic: bool
    compiler: str
    """Why torch.compile and Triton cannot work here; empty if they can."""
    expert_sizes: tuple[int, ...] = ()
    """Sizes of an expert's inputs and outputs; empty for a model without experts."""
    grouped: bool = True
    """True if the installed torch has a grouped product."""
    cudnn: int = 0
    """Version of cuDNN, as 91900 for 9.19.0; 0 = there is none."""


def choose_attention(setting: str, site: Site) -> Choice:
    """Return the kernel for ``auto | cudnn | varlen | sdpa``. Raises ConfigRefused for one that cannot work.

    ``varlen`` is torch's flash attention over sequences of any length, deterministic where torch's switch is on.
    ``cudnn`` is the same, but cuDNN computes long sequences (docs/decisions/049). Sources: ``varlen_attn`` of torch
    2.13 (flash attention 2: half precision; causal = window (-1, 0) since 2.11); PyTorch pull requests 172245 and
    179468.
    """
    if setting == SDPA:
        return Choice(SDPA, "learner.attention: sdpa")
    if obstacle := _obstacle(site):
        if setting in (VARLEN, CUDNN):
            raise ConfigRefused("learner.attention", "sdpa or auto", f"{setting}: {obstacle}")
        return Choice(SDPA, obstacle)
    flash = f"flash attention over the lengths of a row, {'' if site.deterministic else 'not '}deterministic"
    if setting == VARLEN:
        return Choice(VARLEN, flash)
    if obstacle := _cudnn_obstacle(site):
        if setting == CUDNN:
            raise ConfigRefused("learner.attention", "varlen or auto", f"cudnn: {obstacle}")
        return Choice(VARLEN, flash)
    return Choice(CUDNN, f"cuDNN for sequences of {LONG_SEQUENCE} tokens and more, else {flash}")


def _obstacle(site: Site) -> str:
    if site.device != "cuda":
        return f"the device is {site.device}, and flash attention needs CUDA"
    if not site.varlen:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if missing := {"window_size", "scale"} - site.varlen:
        return f"varlen_attn of torch {torch.__version__} has no {' and no '.join(sorted(missing))}"
    if site.dtype not in FLASH_DTYPES:
        return f"flash attention has no kernel for {str(site.dtype).removeprefix('torch.')}"
    if site.capability < FLASH_CAPABILITY:
        return (
            f"compute capability {site.capability[0]}.{site.capability[1]} is below "
            f"{FLASH_CAPABILITY[0]}.{FLASH_CAPABILITY[1]}"
        )
    if site.head_size > FLASH_HEAD_SIZE or site.head_size % FLASH_MULTIPLE:
        return (
            f"heads of size {site.head_size}: flash attention has multiples of {FLASH_MULTIPLE} up to {FLASH_HEAD_SIZE}"
        )
    return ""


def _cudnn_obstacle(site: Site) -> str:
    if site.deterministic:
        return "learner.deterministic: its gradients are not the same bits each time"
    if site.capability != CUDNN_CAPABILITY:
        return (
            "it has been checked with compute capability 9.0 alone, and this is "
            f"{site.capability[0]}.{site.capability[1]}"
        )
    if site.cudnn < CUDNN_VERSION:
        return f"it has been checked from cuDNN {CUDNN_VERSION} on, and this is {site.cudnn}"
    if site.head_size > CUDNN_HEAD_SIZE:
        return f"heads of size {site.head_size}: it has been checked up to {CUDNN_HEAD_SIZE}"
    return ""


def choose_own_kernels(name: str, setting: str, site: Site) -> Choice:
    """Return ``fused`` or ``separate``, as ``choose``, for kernels in ``triton_kernels.py``."""
    # They give the same bits for a row each time, so deterministic runs take them too.
    return choose(name, setting, Choice("fused", "CUDA with triton"), "separate", triton_obstacle(site))


def choose(name: str, setting: str, kernel: Choice, other: str, obstacle: str, doubt: str = "") -> Choice:
    """Return ``kernel`` or ``other`` for ``auto | always | never``, with the reason.

    ``doubt``: reason against it with ``auto`` alone. Raises ConfigRefused where ``always`` meets an obstacle.
    """
    if setting == "always" and obstacle:
        raise ConfigRefused(name, "auto or never", f"always: {obstacle}")
    if setting == "never":
        return Choice(other, f"{name}: never")
    if obstacle := obstacle or (doubt if setting == "auto" else ""):
        return Choice(other, obstacle)
    return kernel


def triton_obstacle(site: Site) -> str:
    """Return why kernels of Triton cannot work here; empty = they can."""
    return f"the device is {site.device}" if site.device != "cuda" else site.compiler


def this_site(dtype: torch.dtype, head_size: int) -> Site:
    """Return the facts of this machine, for a model without experts."""
    cuda = torch.cuda.is_available()
    operator = varlen_operator() if cuda else None
    return Site(
        device="cuda" if cuda else "cpu",
        dtype=dtype,
        head_size=head_size,
        capability=torch.cuda.get_device_capability() if cuda else (0, 0),
        varlen=frozenset() if operator is None else frozenset(inspect.signature(operator).parameters),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compiler=_compile_obstacle(),
        grouped=hasattr(torch.nn.functional, "grouped_mm"),
        cudnn=(torch.backends.cudnn.version() or 0) if cuda else 0,
    )


@functools.cache
def varlen_operator() -> Callable[..., Any] | None:
    """Return torch's ``varlen_attn``; None if this torch has none.

    Where the operator beneath it is the known one, return that: ``varlen_attn`` wraps it into a custom operator, whose
    Python takes 0.1 ms of the host for a call and its backward pass, in a small model as long as the kernels.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if {"window_size", "scale"} <= inspect.signature(varlen_attn).parameters.keys() and _flash_is_known():
        return flash_attention
    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)  # it logs every call
    return varlen_attn


def _flash_is_known() -> bool:
    """Return whether ``_flash_attention_forward`` has the arguments of torch 2.11 to 2.13, and perhaps more by name."""
    try:
        arguments = torch.ops.aten._flash_attention_forward.default._schema.arguments
    except AttributeError:
        return False
    ordered = tuple(argument.name for argument in arguments if not argument.kwarg_only)
    named = {argument.name for argument in arguments if argument.kwarg_only}
    return ordered == FLASH_ARGUMENTS and {"scale", "window_size_left", "window_size_right"} <= named


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute what ``varlen_attn`` does, also for fewer heads of keys and values than of queries."""
    causal, (window_left, window_right) = window_size == (-1, 0), window_size
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,  # no dropout
        causal,
        False,  # no mask for debugging
        scale=scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )[0]
    return out


def _compile_obstacle() -> str:
    """Return why torch.compile and Triton, which compiles its launcher with a C compiler, cannot work here."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compiler = os.environ.get("CC", "")
    if not any(shutil.which(name) for name in (compiler, "gcc", "clang") if name):
        return "triton needs a C compiler (CC, gcc or clang)"
    return ""
