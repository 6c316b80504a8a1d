"""The policy: a Megatron GPTModel built from a Hugging Face directory and wrapped for data parallelism."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from learner.megatron.bridge import open_bridge
from learner.megatron.cpu_shim import megatron_device
from learner.megatron.kernels import Wanted
from learner.megatron.memory import Memory, PlainMemory
from learner.megatron.parallel import Parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model, its data-parallel wrapper, and the bridge to its Hugging Face names."""

    module: GPTModel
    ddp: DistributedDataParallel
    """The wrapper that the schedule and the optimizer use."""
    bridge: Any
    parallel: Parallel
    memory: Memory = field(default_factory=PlainMemory)
    """Memory of the weights, their gradients and the optimizer's state."""

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig."""
        return self.bridge.config

    @property
    def dtype(self) -> str:
        """The key of ``DTYPES`` for weights and activations."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.config.params_dtype)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights under Hugging Face names, in a fixed order; collective over the tensor-parallel ranks.

        Without tensor parallelism they are views on the live weights. Raises MemoryReleased.
        """
        self.memory.want("the export of weights")
        yield from self.bridge.export(self.module)

    def digest(self) -> str:
        """Return the SHA-256 of the exported weights in the order of their names; it does not depend on how they are split."""
        total = hashlib.sha256()
        for name, tensor in sorted(self.export(), key=lambda item: item[0]):
            total.update(name.encode())
            total.update(tensor.contiguous().cpu().view(torch.uint8).numpy().data)
        return total.hexdigest()


def build_policy(model_dir: Path, *, dtype: str, parallel: Parallel, kernels: Wanted | None = None, memory: Memory | None = None) -> Policy:
    """Build the model on this rank, in ``memory``, and load the directory's weights into it. Returns the policy.

    Raises ConfigRefused for a model that the learner cannot train.
    """
    kind, memory = DTYPES[dtype], memory or PlainMemory()
    with megatron_device():
        bridge = open_bridge(model_dir, dtype=kind, tensor_parallel=parallel.tp_size, wanted=kernels)
        with memory.region():
            module = bridge.build()
            for parameter in module.parameters():
                # Only split parameters have the attributes by which Megatron's optimizer finds the parameters that several ranks share.
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            module.to(parallel.device)
            with torch.no_grad():
                bridge.load_weights([module], str(model_dir))
            inner = Float16Module(bridge.config, module) if kind == torch.bfloat16 else module
        with memory.region(scratch=True):  # of gradients, which each minibatch sets to zero first
            # float32, because gradients of many micro-batches and ranks are added up, each much smaller than the sum.
            ddp = DistributedDataParallel(bridge.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner)
    return Policy(module=module, ddp=ddp, bridge=bridge, parallel=parallel, memory=memory)


def reference_weights(policy: Policy, model_dir: Path, reference_dir: Path) -> "WeightBackup":
    """Return a backup with the weights of another model of the same architecture.

    They pass through the policy, which is loaded from ``model_dir`` again afterwards.
    """
    with megatron_device(), torch.no_grad():
        policy.bridge.load_weights([policy.module], str(reference_dir))
        backup = WeightBackup(policy)
        policy.bridge.load_weights([policy.module], str(model_dir))
    return backup


class WeightBackup:
    """A second copy of the weights (the proximal policy, the reference) that can replace them temporarily.

    The copy of weights on a CUDA device is in pinned host memory.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._copies = {name: _copy_on_host(parameter) for name, parameter in policy.module.named_parameters()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Copies by Megatron's names (for the checkpoint)."""
        return self._copies

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights. Raises MemoryReleased."""
        self._policy.memory.want("a copy of the weights")
        for name, parameter in self._policy.module.named_parameters():
            self._copies[name].copy_(parameter)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the copies by ``tensors`` (from a checkpoint), which has all of Megatron's names."""
        for name, copy in self._copies.items():
            copy.copy_(tensors[name])

    @contextmanager
    def switch(self) -> Iterator[None]:
        """Give the model the copied weights inside the context, and its own afterwards, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._policy.module.named_parameters():
            copy = self._copies[name]
            if parameter.device == copy.device:
                self._copies[name] = parameter.data
                parameter.data = copy
            else:  # release and resume know the parameter by its address, so only the content is swapped
                own = parameter.detach().clone()
                parameter.copy_(copy)
                copy.copy_(own)


def _copy_on_host(parameter: Tensor) -> Tensor:
    copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False)
    return copy.copy_(parameter.detach())
