"""The experts of each token: recorded or given, and taken again in training (routing replay).

    R2: old log-probs: record -> ``PackedRow.experts`` -> training: replay, forward and recomputed
    R3: the samples' experts -> ``PackedRow.experts`` -> old log-probs and training: replay

A small change of the weights, or another kernel, may send a token to other experts, so that its ratio of probabilities
jumps although the policy has hardly moved. The weights of the experts are those of the current router, which has a
gradient; only the choice is replayed.
Sources: Zheng et al. 2025 (Group Sequence Policy Optimization), section 5.3; Ma et al. 2025 (arXiv 2510.11370).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.parallel import Parallel, gather_parts
from tidemill.learner.trainer.port import ReplayModes


def balanced(scale_loss: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return Megatron's ``grad_scale_func`` for one minibatch: the balancing loss counts as its mean over all tokens.

    That is the sum over the rows of (loss of the row x tokens of the row) / ``tokens``. Ranks that share a row have
    parts of its loss, which their gradients add up. ``tokens``: of the minibatch on all data-parallel ranks, without
    padding.
    """

    def scale(value: Tensor) -> Tensor:
        """Scale the objective, which has a graph, or the number that Megatron gives for the balancing loss."""
        return scale_loss(value) if value.requires_grad else value / tokens

    return scale


class MegatronRouting(ReplayModes):
    """The routers of one model. Megatron's own setters act on all models of a process."""

    def __init__(self, chunks: Sequence[GPTModel] = (), *, given: bool = False) -> None:
        """``given``: the rows have their experts already."""
        super().__init__(given=given)
        self._all: dict[int, Any] = {layer: router for chunk in chunks for layer, router in _routers(chunk)}
        self._row: PackedRow | None = None
        by_chunk = [
            [(layer, router.router_replay) for layer, router in _routers(chunk) if router.router_replay]
            for chunk in chunks
        ]
        routers = [router for chunk_routers in by_chunk for router in chunk_routers]
        self._replays: list[Any] = [replay for _, replay in routers]
        ends = list(accumulate(map(len, by_chunk), initial=0))
        self._of_chunks = [slice(start, end) for start, end in pairwise(ends)]
        """Places of each chunk's routers among the routers of this rank."""
        # The layers of a stage are some of the model's.
        sparse = (
            [at for at, has_experts in enumerate(chunks[0].config.moe_layer_freq) if has_experts] if routers else []
        )
        self._places = [sparse.index(layer) for layer, _ in routers]

    def own(self, experts_TEK: Tensor) -> tuple[Tensor, ...]:
        """Return the given experts, [T, layers with experts, K], of this model's layers, [T, K] each."""
        return tuple(experts_TEK[:, place].contiguous() for place in self._places) if self._given else ()

    def _clear(self) -> None:
        for replay in self._replays:
            replay.clear_router_replay_action()
            replay.clear_indices()

    def observe(self, ranks: Parallel) -> None:
        """Keep in ``PackedRow.routed`` of every row from now on where its last pass sent its tokens.

        A layer costs a synchronization, and a collective where other ranks have other tokens of the row.
        """
        for layer, router in self._all.items():
            router.register_forward_hook(partial(self._note, layer, ranks))

    def _note(
        self, layer: int, ranks: Parallel, router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]
    ) -> None:
        if self._row is None:  # a pass of recomputation, which comes behind the first pass of its row
            return
        with torch.no_grad():
            weights_TE, sent_TE = outputs
            experts_TK = sent_TE.nonzero()[:, 1].view(-1, router.topk)
            noted: tuple[Tensor, ...] = (
                experts_TK.int(),
                weights_TE.gather(1, experts_TK),
                _affinities(router, inputs[0]),
            )
            # With experts, tensor parallelism is never without sequence parallelism.
            for size, group in ((ranks.tp_size, ranks.tp_group), (ranks.cp_size, ranks.cp_group)):
                noted = tuple(gather_parts(values, group) for values in noted) if size > 1 else noted
            # To the host at once: the rows of a step together would fill the device.
            self._row.routed[layer] = tuple(values.to("cpu", non_blocking=True) for values in noted)

    @contextmanager
    def row(self, packed: PackedRow, chunk: int) -> Iterator[None]:
        """Record or replay one row's pass through a chunk of the model, which happens inside the context."""
        self._row = packed
        try:
            with (
                self._recorded_or_replayed(packed, self._of_chunks[chunk])
                if self._replays and self._mode
                else nullcontext()
            ):
                yield
        finally:
            self._row = None

    @contextmanager
    def _recorded_or_replayed(self, packed: PackedRow, places: slice) -> Iterator[None]:
        """``places``: of the chunk's routers. Chunks of different rows alternate; each gets the rows in their order."""
        replays = self._replays[places]
        if self._mode == "record":
            _act(replays, RouterReplayAction.RECORD)
            yield
            packed.experts = (*packed.experts[: places.start], *_recorded(replays))
            return
        known = packed.experts[places]
        for replay, experts in zip(replays, known, strict=bool(known)):  # a row without known experts has none to set
            replay.set_target_indices(experts)
        _act(replays, RouterReplayAction.REPLAY_FORWARD if known else RouterReplayAction.RECORD)
        yield
        if not known:
            for replay, experts in zip(replays, _recorded(replays), strict=True):
                replay.replay_backward_list.append(experts)
        # The backward pass computes rows again in their order, and takes their experts in that order.
        _act(replays, RouterReplayAction.REPLAY_BACKWARD)


def _routers(chunk: GPTModel) -> Iterator[tuple[int, Any]]:
    """Yield the number in the whole model and the router of each layer with experts."""
    for layer in chunk.decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            yield layer.layer_number - 1, router


def _recorded(replays: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the experts of the last pass of each router, [T, K]."""
    return tuple(replay.get_recorded_indices().to(torch.int16) for replay in replays)


def _act(replays: Sequence[Any], action: RouterReplayAction) -> None:
    for replay in replays:
        replay.set_router_replay_action(action)


def _affinities(router: Any, hidden: Tensor) -> Tensor:
    """Return the affinity of each token to all experts, [T, E] float32, before groups, bias and choice."""
    logits_TE = router.gating(hidden).flatten(0, -2).float()
    return logits_TE.sigmoid() if router.score_function == "sigmoid" else logits_TE.softmax(-1)
