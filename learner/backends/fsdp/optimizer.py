"""Adam, AdamW, SGD or Muon of torch over this rank's parts of the weights, with the state on the device or on the host.

The weights are float32, and so are their gradients, which the backward pass has reduced to each rank's part. A part may
be empty: a weight with fewer rows than there are ranks. Muon has each matrix whole on one rank:

    gradient -> momentum, each rank its part -> whole matrix on its owner -> orthogonal update -> parts
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.learner.backends.fsdp.policy import FsdpPolicy
from tidemill.learner.layout.sizes import OFFLOADED_AT_ONCE
from tidemill.learner.settings.optimizer import OptimizerConfig
from tidemill.learner.trainer.optimizer import Optimizer, add_momentum, orthogonal

ADAM, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""Tensors of the state of a weight, each of its shape: with Adam, and with SGD or Muon."""
SUMMED = 4096
"""Squares that are added up in float32."""
SMALL = 1.0e-6  # Megatron's addition to the norm in the factor of clipping


class Muon(torch.optim.AdamW):
    """AdamW of torch, and Muon for the groups with ``muon``. Its parameters are this rank's parts of the weights."""

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], weights: Mapping[Tensor, Tensor], *, lr: float, group: Any
    ) -> None:
        """``weights``: the DTensor of each part. ``group``: the ranks that have its parts."""
        super().__init__([dict(group) for group in groups], lr=lr, fused=True)
        self._weights, self._ranks = weights, group

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step over the parts that have a gradient, which are the same on all ranks. Collective."""
        matrices = [(part, group) for group in self.param_groups if group["muon"] for part in group["params"]]
        present = [(part, group, part.grad) for part, group in matrices if part.grad is not None]
        for part, _, _ in present:
            part.grad = None
        super().step()
        ranks = dist.get_world_size(self._ranks)
        for start in range(0, len(present), ranks):
            self._step_together(present[start : start + ranks])

    def _step_together(self, matrices: Sequence[tuple[Tensor, Mapping[str, Any], Tensor]]) -> None:
        """Update at most as many matrices as there are ranks: each rank computes the update of one."""
        rank, mine = dist.get_rank(self._ranks), None
        for owner, (part, group, gradient) in enumerate(matrices):
            moved = add_momentum(gradient, self.state[part]["momentum_buffer"], group["momentum"])
            whole = self._like(part, moved).full_tensor()
            if owner == rank:
                mine = orthogonal(whole)
        for owner, (part, group, _) in enumerate(matrices):
            weight = self._weights[part]
            update = mine if owner == rank and mine is not None else torch.empty(weight.shape, device=part.device)
            dist.broadcast(update, group=self._ranks, group_src=owner)
            part.mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(self._part_of(weight, update), alpha=-group["lr"])

    def _like(self, part: Tensor, values: Tensor) -> DTensor:
        weight = self._weights[part]
        assert isinstance(weight, DTensor)
        return DTensor.from_local(
            values, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
        )

    def _part_of(self, weight: Tensor, whole: Tensor) -> Tensor:
        [chunk] = weight.__create_chunk_list__()  # type: ignore[attr-defined]
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))]


class FsdpOptimizer(Optimizer):
    """Optimizer of the trained weights of one policy."""

    def __init__(self, policy: FsdpPolicy, config: OptimizerConfig, *, steps: int, offload: bool = False) -> None:
        """``offload``: keep the state in host memory, and move it to the device block by block in a step."""
        super().__init__(config, steps=steps, parallel=policy.parallel)
        self.parameters = {name: weight for name, weight in policy.named_tensors() if weight.requires_grad}
        """Trained weights of the model by name, each a DTensor."""
        self._parts = {name: local_part(weight).detach() for name, weight in self.parameters.items()}
        self._heads = policy.names_of_heads
        orthogonal = matrices_of(policy, self.parameters) if config.name == "muon" else frozenset()
        self.inner: torch.optim.Optimizer = self._open(config, orthogonal)
        """The optimizer of torch, over this rank's parts."""
        by_momentum = self.parameters.keys() if config.name == "sgd" else orthogonal
        self._moments = {name: MOMENTUM if name in by_momentum else ADAM for name in self.parameters}
        self._blocks = blocks(self.parameters, OFFLOADED_AT_ONCE) if offload else [list(self._parts)]
        self._offload, self.steps = offload, 0
        """``steps``: steps taken, those before a restart included."""
        with policy.memory.region():
            for name, part in self._parts.items():
                self.inner.state[part].update(self._new_state(part, self._moments[name]))

    def _new_state(self, part: Tensor, moments: Sequence[str]) -> dict[str, Tensor]:
        device = torch.device("cpu") if self._offload else part.device
        pinned = self._offload and part.is_cuda
        state = {name: torch.zeros_like(part, device=device, pin_memory=pinned) for name in moments}
        # A number of steps of its own for every weight, because torch counts it in place.
        return {"step": torch.zeros((), device=part.device), **state} if moments == ADAM else state

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name of the weight, name of the moment, this rank's part of it), for a checkpoint."""
        for name, part in self._parts.items():
            for moment in self._moments[name]:
                yield name, moment, self.inner.state[part][moment]

    def set_steps(self, steps: int) -> None:
        """Set the number of steps taken."""
        self.steps = steps
        for part in self._parts.values():
            if "step" in self.inner.state[part]:
                self.inner.state[part]["step"].fill_(steps)

    def zero_grad(self) -> None:
        """Forget the gradients; call it before the first row of a step."""
        for weight in self.parameters.values():
            weight.grad = None

    def step(self, step: int, *, loss: float, scale: float = 1.0) -> tuple[float | None, float]:
        """Clip and apply the gradients, and free them: between steps an engine may have the device's memory."""
        try:
            return super().step(step, loss=loss, scale=scale)
        finally:
            self.zero_grad()

    def _open(self, config: OptimizerConfig, orthogonal: Collection[str]) -> torch.optim.Optimizer:
        """Return the optimizer of the settings; ``orthogonal``: names of the matrices that Muon updates."""
        groups = [
            {
                "params": [
                    part
                    for name, part in self._parts.items()
                    if decays(name, part) is decayed and (name in orthogonal) is by_muon
                ],
                "wd_mult": float(decayed),
                "muon": by_muon,
            }
            for decayed, by_muon in ((True, False), (True, True), (False, False))
        ]
        groups = [group for group in groups if group["params"]]
        # One kernel for all weights of a group, on the CPU too, as Megatron's are here.
        if config.name == "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        if config.name == "muon":
            weights = {self._parts[name]: weight for name, weight in self.parameters.items()}
            return Muon(groups, weights, lr=config.lr, group=self._parallel.dp_group)
        return torch.optim.AdamW(groups, lr=config.lr, fused=True)

    def _gradients(self) -> Iterator[Tensor]:
        yield from self._of_parts().values()

    def _of_parts(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's parts by name. A weight that no loss has reached has none."""
        return {name: local_part(weight.grad) for name, weight in self.parameters.items() if weight.grad is not None}

    @torch.no_grad()
    def _reset(self) -> None:
        self.set_steps(0)
        for _, _, moment in self.moments():
            moment.zero_()

    @torch.no_grad()
    def _update(self, rate: float) -> float:
        gradients = self._of_parts()
        of_heads = [gradient for name, gradient in gradients.items() if name in self._heads]
        of_policy = [gradient for name, gradient in gradients.items() if name not in self._heads]
        # The loss of the heads must not shorten the policy's steps, so each group has a norm of its own.
        norm, norm_of_heads = self._norms(of_policy, of_heads)
        for part, size in ((of_policy, norm), (of_heads, norm_of_heads)):
            if part and (factor := self.max_norm / (size + SMALL)) < 1.0:
                torch._foreach_mul_(part, factor)
        config = self._config
        for group in self.inner.param_groups:  # in each step, because settings may change between two
            group["lr"], group["weight_decay"] = rate, config.weight_decay * group["wd_mult"]
            group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
            group["decoupled_weight_decay"], group["momentum"] = config.name != "adam", config.momentum
        for block in self._blocks:
            with self._on_device(block):
                for name in block:  # torch leaves out a weight without gradient, also one of another block
                    self._parts[name].grad = gradients.get(name)
                self.inner.step()
                for name in block:
                    self._parts[name].grad = None
        self.steps += 1
        return norm

    def _norms(self, *groups: Sequence[Tensor]) -> list[float]:
        """Return the norm of each group of gradients, over all parts of a copy of the model; the same on all ranks."""
        ranks = self._parallel
        squares = [[sum_of_squares(gradient).to(ranks.device) for gradient in group] for group in groups]
        zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
        totals = torch.stack([torch.stack([zero, *of_group]).sum() for of_group in squares])
        if ranks.dp_size > 1:
            dist.all_reduce(totals, group=ranks.shard_group or ranks.dp_group)
        if ranks.mirror_group is not None:  # two copies that add up in another order would drift apart
            dist.broadcast(totals, group=ranks.mirror_group, group_src=0)
        return [math.sqrt(float(total)) for total in totals]

    @contextmanager
    def _on_device(self, block: Sequence[str]) -> Iterator[None]:
        """Have the moments of a block on the device inside the context."""
        if not self._offload:
            yield
            return
        parts = [self._parts[name] for name in block]
        hosts = [
            {moment: self.inner.state[self._parts[name]][moment] for moment in self._moments[name]} for name in block
        ]
        for part, host in zip(parts, hosts, strict=True):
            moved = {name: moment.to(part.device, non_blocking=True, copy=True) for name, moment in host.items()}
            self.inner.state[part].update(moved)
        yield
        for part, host in zip(parts, hosts, strict=True):
            for name, moment in host.items():
                moment.copy_(self.inner.state[part][name], non_blocking=True)
            self.inner.state[part].update(host)
        if any(part.is_cuda for part in parts):
            torch.cuda.synchronize()  # the host's copies are read by a checkpoint, without the device


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares of float32 values within a rounding of float32, as float64.

    Sums of ``SUMMED`` squares are float32, the sum of these float64. That is as fast as a norm in float32, which was
    wrong by 0.2 % for 28 million values on a CPU; a norm in float64 took 20 times as long.
    """
    flat = values.reshape(-1)
    whole = flat.numel() // SUMMED * SUMMED
    rows, rest = flat[:whole].view(-1, SUMMED), flat[whole:]
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(rest)[None]])
    return norms.double().square().sum()


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, on the same memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def blocks(weights: Mapping[str, Tensor], size: int) -> list[list[str]]:
    """Return the names in runs of at most ``size`` elements, or of one weight that has more.

    They count whole weights, so that the runs are the same on all ranks, whatever parts these have.
    """
    runs: list[list[str]] = []
    room = 0
    for name, weight in weights.items():
        if weight.numel() > room or not runs:
            runs.append([])
            room = size
        runs[-1].append(name)
        room -= weight.numel()
    return runs


def decays(name: str, weight: Tensor) -> bool:
    """Return whether weight decay applies: to matrices, not to norms and biases (also of all experts in one tensor)."""
    return weight.dim() > 1 and not name.endswith("bias")


def matrices_of(policy: FsdpPolicy, parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the matrices of layers, and of experts in one tensor: no embedding, output layer or kernel of
    a convolution.
    """
    model = policy.root.transformer
    ends = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    return frozenset(
        name
        for name, weight in parameters.items()
        if decays(name, weight)
        and (weight.dim() == 2 or "experts" in name)
        and id(weight) not in ends
        and "embed" not in name
    )
