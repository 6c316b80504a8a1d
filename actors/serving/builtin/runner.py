"""The port between the batch and a model: forward passes of the running rows. Knows no sequence.

Two runners keep it: the decoder's (``decoder_runner.py``) for its families, and one over models of the library
transformers for every other family (``transformers_runner.py``).

Shape letters: N = running rows, U = prompts of a prefill, R = rows of a prefill (R >= U: rows may share a prompt), T =
new tokens per prompt (padded), V = vocabulary; B = rows, G = layers with experts, J = experts of a token.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.actors.serving.builtin.blocks import BlockTable
from tidemill.actors.serving.builtin.input_scores import InputScores, Scoring
from tidemill.actors.serving.builtin.lora import Adapter


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
