"""The experts of each token: chosen in the pass for old log-probs, and taken again in training (routing replay, R2).

    old log-probs: record -> ``PackedRow.experts`` -> training: replay, forward and recomputed

A small change of the weights, or another kernel, may send a token to other experts, so that its ratio of probabilities jumps although the
policy has hardly moved. Source: Zheng et al. 2025 (Group Sequence Policy Optimization), section 5.3.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from learner.megatron.attention import PackedRow


class Routing:
    """The routers of one model. Megatron's setters for all models of a process are not used: a second model would follow them."""

    def __init__(self, chunks: Sequence[GPTModel] = ()) -> None:
        routers = (getattr(layer.mlp, "router", None) for chunk in chunks for layer in chunk.decoder.layers)
        self._replays: list[Any] = [router.router_replay for router in routers if router is not None and router.router_replay is not None]
        self._mode = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the experts of every row that passes inside the context."""
        with self._in("record"):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Send the tokens of every row to its recorded experts inside the context; rows without a record choose."""
        with self._in("replay"):
            yield

    @contextmanager
    def _in(self, mode: str) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = ""
            for replay in self._replays:
                replay.clear_router_replay_action()
                replay.clear_indices()

    @contextmanager
    def row(self, packed: PackedRow) -> Iterator[None]:
        """Record or replay one row's pass through the model, which happens inside the context."""
        if self._mode == "record":
            self._act(RouterReplayAction.RECORD)
            yield
            packed.experts = tuple(replay.get_recorded_indices().to(torch.int16) for replay in self._replays)
        elif self._mode == "replay" and packed.experts:
            for replay, experts in zip(self._replays, packed.experts, strict=True):
                replay.set_target_indices(experts.long())
            self._act(RouterReplayAction.REPLAY_FORWARD)
            yield
            # The backward pass computes rows again in their order, and takes their experts in that order.
            self._act(RouterReplayAction.REPLAY_BACKWARD)
        else:
            yield

    def _act(self, action: RouterReplayAction) -> None:
        for replay in self._replays:
            replay.set_router_replay_action(action)
