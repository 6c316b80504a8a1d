"""The port between the batch and a model: forward passes of the running rows; and the runner of the decoder: weights,
blocks of keys and values, and rotary angles. Knows no sequence.

Families that the decoder lacks have a runner over models of the library transformers (``transformers_runner.py``).

Shape letters: N = running rows, U = prompts of a prefill, R = rows of a prefill (R >= U: rows may share a prompt), T =
new tokens per prompt (padded), E = hidden size, V = vocabulary; B = rows, G = layers with experts, J = experts of a
token.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.blocks import BLOCK, BlockTable
from tidemill.actors.serving.builtin.input_scores import InputScores, Scoring, scores
from tidemill.actors.serving.builtin.kv_memory import DecodeAttention, DecodePlan, KVMemory, PrefillAttention
from tidemill.actors.serving.builtin.lora import Adapter, AdapterRows
from tidemill.actors.serving.builtin.weights import Weights

FIRST_ANGLES = 128
"""Positions with angles at first; doubled as needed."""


class TokenMemory(Protocol):
    """Memory of the tokens of all rows, in blocks."""

    num_blocks: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks, used or not."""

    def touch(self, num_blocks: int) -> None:
        """Prepare the first ``num_blocks`` blocks for use."""

    def wipe(self, blocks: Sequence[int]) -> None:
        """Make blocks usable again that may hold numbers that are not finite."""


class ModelRunner(Protocol):
    """One model with memory for the tokens of its rows. Used by the decoding thread."""

    weights: Any
    """WeightSet of the runner's own kind; None from the release of their memory until new ones are set."""
    device: torch.device
    adapters: dict[str, Adapter]
    """Adapters by the names of requests; "" = the run's own, which all other rows have."""
    captures: bool
    """Keep the experts of the tokens of each pass, as ``experts_BTGJ``."""
    experts_BTGJ: NDArray[np.int64] | None
    """Experts of the last pass: of a prefill by context, padding included; of a decoding step by row."""
    finds_prefixes: bool
    """True if a prompt can begin with blocks that another sequence has filled; always if both join together."""

    @property
    def memory(self) -> TokenMemory: ...

    def prefill(
        self,
        contexts: Sequence[NDArray[np.int32]],
        cached: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        adapter_names: Sequence[str],
    ) -> tuple[Tensor, int]:
        """Compute different contexts, but for their first ``cached`` tokens, into the blocks of rows: ``tables[r]`` for
        context ``prompt_of_R[r]``. ``adapter_names``: of the contexts.

        Returns the scores of the next token of each row, [R, V], and the number of padded tokens.
        """

    def set_rows(self, tables: Sequence[BlockTable], adapter_names: Sequence[str]) -> None:
        """Set the blocks, and the names of the adapters, of the rows that are decoded."""

    def decode(self, last_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        """Compute the last token of every row, at its position. Returns the scores of the next one, [N, V]."""

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        """Compute the log-probs of given tokens, keeping no keys and values. Raises ValueError for NaN."""

    def clear(self, *, free: bool) -> None:
        """Drop all keys and values; with ``free``, their memory too."""


class DecoderRunner:
    """One model of the decoder with blocks of keys and values."""

    finds_prefixes = True

    def __init__(self, weights: Weights, *, num_blocks: int) -> None:
        self.weights: Weights | None = weights
        """None from the release of their memory until new ones are set."""
        self.device = weights.device
        self.adapters: dict[str, Adapter] = {}
        """Adapters by the names of requests; "" = the run's own, which all other rows have."""
        self.memory = KVMemory(weights, num_blocks)
        self._rope: decoder.RopeTable | None = None
        self._tables: Sequence[Sequence[int]] = []
        self._adapter_names: Sequence[str] = []
        self._plan: DecodePlan | None = None
        self.captures = False
        """Keep the experts of the tokens of each pass, as ``experts_BTGJ``."""
        self.experts_BTGJ: NDArray[np.int64] | None = None
        """Experts of the last pass: of a prefill by context, padding included; of a decoding step by row."""

    def prefill(
        self,
        contexts: Sequence[NDArray[np.int32]],
        cached: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        adapter_names: Sequence[str],
    ) -> tuple[Tensor, int]:
        lengths_U, cached_U = np.array([len(context) for context in contexts]), np.array(cached)
        new_U = lengths_U - cached_U
        tokens_UT = np.zeros((len(contexts), new_U.max()), np.int64)
        for row, context in enumerate(contexts):
            tokens_UT[row, : new_U[row]] = context[cached[row] :]
        positions_BT = np.arange(tokens_UT.shape[1])[None]
        if cached_U.any():
            positions_BT = np.minimum(positions_BT + cached_U[:, None], lengths_U[:, None] - 1)
        assert self.weights is not None
        x_UTE = self._forward(
            self.weights,
            torch.from_numpy(tokens_UT).to(self.device),
            self._angles(self.weights, torch.from_numpy(positions_BT).to(self.device), int(lengths_U.max())),
            PrefillAttention(self.memory, _blocks(tables), prompt_of_R, lengths_U, cached_U),
            self._rows_of(adapter_names),
        )
        last_U = torch.from_numpy(new_U - 1).to(self.device)
        scores_UV = decoder.logits(self.weights, x_UTE[torch.arange(len(contexts), device=self.device), last_U])
        return scores_UV[torch.tensor(prompt_of_R, device=self.device)], int(tokens_UT.size)

    def set_rows(self, tables: Sequence[BlockTable], adapter_names: Sequence[str]) -> None:
        self._tables, self._adapter_names = _blocks(tables), adapter_names
        self._plan = None

    def decode(self, last_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        assert self.weights is not None
        if self._plan is None:
            self._plan = DecodePlan(self.memory, self._tables)
        order = self._plan.order
        names = self._adapter_names
        if order is not None:
            last_N, positions_N = last_N[order], positions_N[order]
            names = [names[row] for row in order]
        blocks_N = self._plan.blocks_NL[np.arange(len(positions_N)), positions_N // BLOCK]
        at_N = torch.from_numpy(positions_N).to(self.device)
        attention = DecodeAttention(self.memory, self._plan.chunks, self.memory.rows(blocks_N, positions_N), at_N)
        angles = self._angles(self.weights, at_N[:, None], int(positions_N.max()) + 1)
        tokens_N1 = torch.from_numpy(last_N).to(self.device)[:, None]
        x_NE = self._forward(self.weights, tokens_N1, angles, attention, self._rows_of(names))[:, 0]
        if order is not None:
            back = np.argsort(order)
            x_NE = x_NE[torch.from_numpy(back).to(self.device)]
            self.experts_BTGJ = None if self.experts_BTGJ is None else self.experts_BTGJ[back]
        return decoder.logits(self.weights, x_NE)

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        assert self.weights is not None
        longest = max(len(scoring.tokens) for scoring in batch)
        angles = self._angles(self.weights, torch.arange(longest, device=self.device)[None], longest)
        return scores(self.weights, batch, angles, version, self._rows_of([scoring.adapter for scoring in batch]))

    def _rows_of(self, names: Sequence[str]) -> list[AdapterRows]:
        """Return the rows of each adapter; ``names``: of the adapters of all rows."""
        if not self.adapters:
            return []
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        return [
            AdapterRows(
                self.adapters[name], None if len(numbers) == len(names) else torch.tensor(numbers, device=self.device)
            )
            for name, numbers in rows.items()
            if name in self.adapters
        ]

    def _forward(
        self,
        weights: Weights,
        tokens_BT: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: decoder.Attention,
        adapters: Sequence[AdapterRows],
    ) -> Tensor:
        if not self.captures:
            self.experts_BTGJ = None
            return decoder.forward(weights, tokens_BT, rope, attention, adapters=adapters)
        chosen: list[Tensor] = []
        x_BTE = decoder.forward(weights, tokens_BT, rope, attention, chosen, adapters)
        self.experts_BTGJ = torch.stack(chosen, dim=2).cpu().numpy()
        return x_BTE

    def _angles(self, weights: Weights, positions_BT: Tensor, length: int) -> tuple[Tensor, Tensor]:
        known = 0 if self._rope is None else self._rope.length
        if self._rope is None or known < length:
            self._rope = decoder.RopeTable(weights, max(FIRST_ANGLES, length, 2 * known))
        return self._rope.at(positions_BT)

    def clear(self, *, free: bool) -> None:
        self.set_rows([], [])
        if free:
            self._rope = None
            self.memory.free()
        else:
            self.memory.reset()


def _blocks(tables: Sequence[BlockTable]) -> list[list[int]]:
    return [table.blocks for table in tables]
