"""The model runner of every causal language model that the library transformers has. Knows no sequence.

It runs the library's own modules over a cache by row (``transformers_cache.py``). Adapters are left to the decoder: the
library's modules have no place for several at once, and another class for each projection of each family.

Shape letters: N = running rows, L = positions (padded), U = prompts of a prefill, T = tokens per prompt (padded), R =
rows of a prefill, P = scored places, V = vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.blocks import BlockTable
from tidemill.actors.serving.builtin.input_scores import LOGITS_AT_ONCE, InputScores, Scoring, scores_of
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.transformers_cache import RowCache, prefill_cache
from tidemill.actors.serving.builtin.transformers_weights import TransformersWeights

SELF_TEST_TOKENS = (3, 9)
"""Tokens of the rows of the self-test: with different lengths, so that one is padded."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest mean distance of log-probs in the self-test, in nats: rounding is far below, a wrong position above."""


class TransformersRunner:
    """One model with a cache by row (see ``ModelRunner``)."""

    def __init__(self, weights: TransformersWeights, probed: DynamicCache, *, num_blocks: int) -> None:
        """``probed``: as ``transformers_cache.probe`` returns it."""
        self.weights: TransformersWeights | None = weights
        self.device = weights.device
        self.adapters: dict[str, Adapter] = {}
        self.captures = False
        self.experts_BTGJ: NDArray[np.int64] | None = None
        self.memory = RowCache(probed, num_blocks=num_blocks)
        self.finds_prefixes = not self.memory.has_states  # a state at the end of a block is not kept
        self._config = weights.model.config.get_text_config(decoder=True)

    def prefill(
        self,
        contexts: Sequence[NDArray[np.int32]],
        cached: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        adapter_names: Sequence[str],
    ) -> tuple[Tensor, int]:
        assert not any(adapter_names), "they are merged into the weights"
        scores_U: dict[int, Tensor] = {}
        num_padded = 0
        for prompts in self._together(contexts, cached):
            num_cached, cache = cached[prompts[0]], prefill_cache(self._config)
            rows = [row for row, prompt in enumerate(prompt_of_R) if prompt in prompts]
            of_rows = [prompts.index(prompt_of_R[row]) for row in rows]
            self.memory.load(cache, num_cached, [tables[prompt_of_R.index(prompt)] for prompt in prompts])
            new = [contexts[prompt][num_cached:] for prompt in prompts]
            scores_UV = self._prefill(new, cache)
            scores_U |= dict(zip(prompts, scores_UV, strict=True))
            lengths = [len(contexts[prompt]) for prompt in prompts]
            self.memory.store(cache, lengths, [tables[row] for row in rows], of_rows, num_cached=num_cached)
            num_padded += len(prompts) * max(map(len, new))
        return torch.stack([scores_U[prompt] for prompt in prompt_of_R]), num_padded

    def _together(self, contexts: Sequence[NDArray[np.int32]], cached: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of contexts that are computed together: with as many cached tokens, and of one length where
        padding would reach states.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for number, context in enumerate(contexts):
            key = cached[number], len(context) if self.memory.has_states else 0
            groups.setdefault(key, []).append(number)
        yield from groups.values()

    def _prefill(self, contexts: Sequence[NDArray[np.int32]], cache: DynamicCache) -> Tensor:
        """Add contexts to the cache, padded on the right. Returns the scores of their next tokens, [U, V]."""
        assert self.weights is not None
        lengths = [len(context) for context in contexts]
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

    @torch.inference_mode()
    def self_test(self) -> float:
        """Decode two rows of different lengths as the engine does, and compare with plain forward passes. Returns the
        largest mean distance of a row's log-probs (nats). Raises UnsupportedModel for a larger one than ``LIMITS``.
        """
        contexts = [np.arange(length, dtype=np.int32) % self._config.vocab_size for length in SELF_TEST_TOKENS]
        tables = [BlockTable([row], 0, 0) for row in range(min(len(contexts), self.memory.num_blocks))]
        contexts = contexts[: len(tables)]
        numbers = range(len(tables))
        self.prefill([context[:-1] for context in contexts], [0] * len(tables), tables, numbers, [""] * len(tables))
        self.set_rows(tables, [])
        last_N = np.array([context[-1] for context in contexts], np.int64)
        decoded_NV = self.decode(last_N, np.array([len(context) - 1 for context in contexts])).log_softmax(-1)
        distance = 0.0
        for context, decoded_V in zip(contexts, decoded_NV, strict=True):
            assert self.weights is not None
            out = self.weights.model(input_ids=self._padded([context]), use_cache=False)
            plain_V = out.logits[0, -1].float().log_softmax(-1)
            distance = max(distance, float((plain_V.exp() * (plain_V - decoded_V).abs()).sum()))
        self.clear(free=False)
        limit = LIMITS[self.weights.dtype] if self.weights is not None else 0.0
        if not distance <= limit:
            want = f"want decoded rows whose log-probs differ by at most {limit} nats from a forward pass"
            raise UnsupportedModel(f"model_type {self._config.model_type}", f"{want}, got {distance}")
        return distance
