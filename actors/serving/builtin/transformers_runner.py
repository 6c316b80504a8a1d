"""The model runner of every causal language model that the library transformers has. Knows no sequence.

It runs the library's own modules over a cache by row (``transformers_cache.py``). Adapters and prompts that begin with
blocks of other sequences are left to the decoder.

Shape letters: N = running rows, L = positions (padded), U = prompts of a prefill, T = tokens per prompt (padded), R =
rows of a prefill, P = scored places, V = vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tidemill.actors.serving.builtin.blocks import BlockTable
from tidemill.actors.serving.builtin.input_scores import LOGITS_AT_ONCE, InputScores, Scoring, scores_of
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.transformers_cache import RowCache, prefill_cache
from tidemill.actors.serving.builtin.transformers_weights import TransformersWeights


class TransformersRunner:
    """One model with a cache by row (see ``ModelRunner``)."""

    finds_prefixes = False

    def __init__(self, weights: TransformersWeights, probed: DynamicCache, *, num_blocks: int) -> None:
        """``probed``: as ``transformers_cache.probe`` returns it."""
        self.weights: TransformersWeights | None = weights
        self.device = weights.device
        self.adapters: dict[str, Adapter] = {}
        self.captures = False
        self.experts_BTGJ: NDArray[np.int64] | None = None
        self.memory = RowCache(probed, num_blocks=num_blocks)
        self._config = weights.model.config.get_text_config(decoder=True)

    def prefill(
        self,
        contexts: Sequence[NDArray[np.int32]],
        cached: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        adapter_names: Sequence[str],
    ) -> tuple[Tensor, int]:
        assert not any(cached) and not any(adapter_names), "neither is offered"
        scores_U: dict[int, Tensor] = {}
        num_padded = 0
        for prompts in self._together(contexts):
            cache = prefill_cache(self._config)
            lengths = [len(contexts[prompt]) for prompt in prompts]
            scores_UV = self._prefill([contexts[prompt] for prompt in prompts], lengths, cache)
            scores_U |= dict(zip(prompts, scores_UV, strict=True))
            rows = [row for row, prompt in enumerate(prompt_of_R) if prompt in scores_U and prompt in prompts]
            of_rows = [prompts.index(prompt_of_R[row]) for row in rows]
            self.memory.store(cache, lengths, [tables[row] for row in rows], of_rows)
            num_padded += len(prompts) * max(lengths)
        return torch.stack([scores_U[prompt] for prompt in prompt_of_R]), num_padded

    def _together(self, contexts: Sequence[NDArray[np.int32]]) -> Iterator[list[int]]:
        """Yield the numbers of contexts that are computed together: of one length where padding would reach states."""
        if not self.memory.has_states:
            yield list(range(len(contexts)))
            return
        by_length: dict[int, list[int]] = {}
        for number, context in enumerate(contexts):
            by_length.setdefault(len(context), []).append(number)
        yield from by_length.values()

    def _prefill(self, contexts: Sequence[NDArray[np.int32]], lengths: Sequence[int], cache: DynamicCache) -> Tensor:
        """Fill the cache with contexts, padded on the right. Returns the scores of their next tokens, [U, V]."""
        assert self.weights is not None
        ends = sorted(set(lengths))
        kept = torch.tensor([end - 1 for end in ends], device=self.device)
        out = self.weights.model(input_ids=self._padded(contexts), cache=cache, use_cache=True, logits_to_keep=kept)
        columns_U = torch.tensor([ends.index(length) for length in lengths], device=self.device)
        return out.logits[torch.arange(len(contexts), device=self.device), columns_U].float()

    def _padded(self, contexts: Sequence[NDArray[np.int32]]) -> Tensor:
        tokens_UT = np.zeros((len(contexts), max(map(len, contexts))), np.int64)
        for row, context in enumerate(contexts):
            tokens_UT[row, : len(context)] = context
        return torch.from_numpy(tokens_UT).to(self.device)

    def set_rows(self, tables: Sequence[BlockTable], adapter_names: Sequence[str]) -> None:
        self.memory.set_rows(tables)

    def decode(self, last_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Tensor:
        assert self.weights is not None
        mask_NL = self.memory.begin_step(positions_N)
        out = self.weights.model(
            input_ids=torch.from_numpy(last_N).to(self.device)[:, None],
            position_ids=torch.from_numpy(positions_N).to(self.device)[:, None],
            attention_mask=mask_NL,
            cache=self.memory,
            use_cache=True,
        )
        scores_NV: Tensor = out.logits[:, -1].float()
        return scores_NV

    def scores(self, batch: list[Scoring], version: int) -> list[InputScores]:
        """Compute the log-probs of given tokens. The scores of all tokens of a sequence are in memory at once."""
        return [result for part in self._divided(batch) for result in self._scores(part, version)]

    def _divided(self, batch: list[Scoring]) -> Iterator[list[Scoring]]:
        """Yield the sequences together if all of their scores fit ``LOGITS_AT_ONCE``, else one after the other."""
        longest = max(len(scoring.tokens) for scoring in batch)
        if len(batch) * longest * self._config.vocab_size <= LOGITS_AT_ONCE:
            yield batch
        else:
            yield from ([scoring] for scoring in batch)

    def _scores(self, batch: list[Scoring], version: int) -> Iterator[InputScores]:
        assert self.weights is not None
        first = min(scoring.start for scoring in batch)
        tokens_UT = self._padded([scoring.tokens for scoring in batch])
        kept = torch.arange(first, tokens_UT.shape[1], device=self.device)
        logits_UPV = self.weights.model(input_ids=tokens_UT, use_cache=False, logits_to_keep=kept).logits
        for scoring, logits_PV in zip(batch, logits_UPV, strict=True):
            of_places_PV = logits_PV[scoring.start - first : len(scoring.tokens) - 1 - first].float()
            yield scores_of(scoring, of_places_PV.__getitem__, self._config.vocab_size, version=version)

    def clear(self, *, free: bool) -> None:
        self.memory.set_rows([])
        if free:
            self.memory.free_memory()
        else:
            self.memory.reset_memory()
