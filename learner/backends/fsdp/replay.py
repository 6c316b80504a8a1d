"""The experts of each token: recorded or given, and taken again in training (routing replay), for the routers of any
family of transformers.

    R2: old log-probs: record -> ``PackedRow.experts`` -> training: replay, forward and recomputed
    R3: the samples' experts -> ``PackedRow.experts`` -> old log-probs and training: replay

The last ``topk`` of a router over all its experts is its choice. Inside the forward pass of a router that ``topk``
gives the known experts with their own values, so weights and gradients are those of the current router.
Sources: Zheng et al. 2025 (Group Sequence Policy Optimization), section 5.3; Ma et al. 2025 (arXiv 2510.11370).
Shape letters: T = tokens of the row, E = layers with experts, K = experts of a token, X = experts of a layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.trainer.backend import ReplayModes

_TOPK = (torch.topk, torch.Tensor.topk)


class Replay(ReplayModes):
    """The routers of one model, which runs its rows one after the other, each forward and backward."""

    def __init__(self, model: torch.nn.Module, *, replays: bool = False, given: bool = False) -> None:
        """``given``: the rows have their experts already. Raises ConfigRefused for a model without known routers."""
        super().__init__(given=given)
        self._row: PackedRow | None = None
        self._routers = [_Router(module) for module in model.modules() if _is_router(module)] if replays else []
        if replays and not self._routers:
            want = "none for a model without routers that transformers names"
            raise ConfigRefused("learner.routing_replay", want, type(model).__name__)
        for place, router in enumerate(self._routers):
            router.module.forward = partial(self._routed, place, router.module.forward)

    def own(self, experts_TEK: Tensor) -> tuple[Tensor, ...]:
        """Return the given experts, [T, layers with experts, K], of this model's layers, [T, K] each."""
        if not self._given:
            return ()
        return tuple(experts_TEK[:, place].contiguous() for place in range(len(self._routers)))

    def observe(self, ranks: Parallel) -> None:
        """Do nothing: routers of transformers give no affinities before groups and bias, so rows record no routing."""

    @contextmanager
    def row(self, packed: PackedRow) -> Iterator[None]:
        """Record or replay one row's forward and backward pass, which happen inside the context."""
        self._row = packed
        try:
            yield
        finally:
            self._row = None

    def _routed(self, place: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        row, router = self._row, self._routers[place]
        if row is None or not self._mode or (self._mode == "replay" and not row.experts):
            return forward(*arguments, **named)
        choice = _Choice(router, row.experts[place] if self._mode == "replay" else None)
        with choice:
            result = forward(*arguments, **named)
        if choice.chosen_TK is None:
            want = f"none for a model whose {type(router.module).__name__} chooses experts without torch.topk"
            raise ConfigRefused("learner.routing_replay", want, self._mode)
        if self._mode == "record":
            row.experts = (*row.experts[:place], choice.chosen_TK.detach().to(torch.int16), *row.experts[place + 1 :])
        return result


class _Router:
    """A router of transformers and its sizes."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module
        self.top_k = int(_first(self.module, ("top_k", "num_experts_per_tok")))
        self.num_experts = int(_first(self.module, ("num_experts", "num_local_experts", "n_routed_experts")))


class _Choice(TorchFunctionMode):
    """Context in which a ``topk`` of a router over its experts gives the known ones, and is recorded."""

    def __init__(self, router: _Router, experts_TK: Tensor | None) -> None:
        """``experts_TK``: the known experts, -1 = not known; None = the router chooses all."""
        super().__init__()
        self._router, self._experts_TK = router, experts_TK
        self.chosen_TK: Tensor | None = None
        """Experts of the last ``topk``."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or give the known experts in the place of its choice."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or not self._chooses(args[0], result):
            return result
        values, own = result
        if self._experts_TK is not None:
            experts = self._experts_TK.reshape(own.shape)
            own = torch.where(experts < 0, own, experts.to(own.dtype))
            values = args[0].gather(-1, own)
        self.chosen_TK = own.reshape(-1, own.shape[-1])
        return torch.return_types.topk((values, own))

    def _chooses(self, scores: Tensor, result: tuple[Tensor, Tensor]) -> bool:
        # A router by groups has other topks before: of scores within a group, and of groups.
        return scores.shape[-1] == self._router.num_experts and result[1].shape[-1] == self._router.top_k


def _is_router(module: torch.nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router")


def _first(module: Any, names: Sequence[str]) -> Any:
    """Return the first of the attributes that a router or its configuration has."""
    for name in names:
        for owner in (module, getattr(module, "config", None)):
            if getattr(owner, name, None) is not None:
                return getattr(owner, name)
    if "num_experts" in names:
        return module.weight.shape[0]
    raise ConfigRefused("learner.routing_replay", f"none for a router without {names[0]}", type(module).__name__)
