"""Sampling tokens from scores: temperature, top-k and top-p, seeded, a whole batch at once.

A draw depends on nothing but its own row: (seed, position) -> uniform number by a counter-based hash -> inverse of the
cumulative distribution in fp64. (The last bits of the scores depend on the batch, as they come from a batched product:
in fp32 that turns a draw about once in 10^5 tokens, in bf16 more often.) The log-prob returned is of the distribution
that was sampled from, fp32; of a greedy row (temperature 0) it is the untempered one, as SGLang gives it.

Shape letters: N = rows, V = vocabulary, F = rows with top-k or top-p.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.actors.generate_body import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NO_TOP_P = 2.0
"""Above any sum of probabilities, however it was rounded."""
NO_TOP_K = int(np.iinfo(np.int64).max)
"""Above the size of any vocabulary."""


def uniforms(seeds_N: NDArray[np.uint64], positions_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in (0, 1) for every (seed, position).

    Source: SplitMix64's output function (Steele, Lea, Flood 2014), applied to the seed, then to a counter on top of it,
    so that neighbouring seeds do not share a sequence shifted by one.
    """
    bits_N = _mix(_mix(seeds_N) + positions_N.astype(np.uint64) * GOLDEN) >> np.uint64(12)
    return (bits_N.astype(np.float64) + 0.5) * 2.0**-52


def _mix(state_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state_N = state_N + GOLDEN
    state_N = (state_N ^ (state_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_N = (state_N ^ (state_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state_N ^ (state_N >> np.uint64(31))


class Sampler:
    """Sampling parameters of every row of a batch; built when the batch changes, used for every step."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        greedy_N = np.array([sampling.temperature == 0 for sampling in params])
        temperatures_N = np.array([sampling.temperature or 1.0 for sampling in params], np.float32)
        top_p_N = np.array([sampling.top_p if sampling.top_p < 1 else NO_TOP_P for sampling in params])
        top_k_N = np.array(
            [min(sampling.top_k, NO_TOP_K) if sampling.top_k > 0 else NO_TOP_K for sampling in params], np.int64
        )
        filtered_N = ((top_p_N < 1) | (top_k_N != NO_TOP_K)) & ~greedy_N
        self._seeds_N = np.array(seeds, np.uint64)
        self._all_greedy, self._any_greedy = bool(greedy_N.all()), bool(greedy_N.any())
        self._greedy_N = torch.from_numpy(greedy_N).to(device)
        is_tempered = bool((temperatures_N != 1).any())
        self._temperatures_N1 = torch.from_numpy(temperatures_N).to(device)[:, None] if is_tempered else None
        self._filtered_F = torch.from_numpy(filtered_N.nonzero()[0]).to(device) if filtered_N.any() else None
        self._top_p_F1 = torch.from_numpy(top_p_N[filtered_N]).to(device)[:, None]
        self._top_k_F1 = torch.from_numpy(top_k_N[filtered_N]).to(device)[:, None]

    def draw(self, scores_NV: Tensor, positions_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return one token per row for the given positions, and its log-prob (not finite where the scores were not)."""
        if self._temperatures_N1 is not None:
            scores_NV = scores_NV / self._temperatures_N1
        log_probs_NV = torch.log_softmax(scores_NV, -1)
        if self._filtered_F is not None:
            log_probs_NV[self._filtered_F] = self._filter(log_probs_NV[self._filtered_F])
        if self._all_greedy:
            tokens_N = log_probs_NV.argmax(-1)
        else:
            tokens_N = self._invert(log_probs_NV, positions_N)
            if self._any_greedy:
                tokens_N = torch.where(self._greedy_N, log_probs_NV.argmax(-1), tokens_N)
        chosen_N = log_probs_NV.gather(1, tokens_N[:, None])[:, 0]
        return tokens_N.cpu().numpy(), chosen_N.cpu().numpy()

    def _invert(self, log_probs_NV: Tensor, positions_N: NDArray[np.int64]) -> Tensor:
        cumulative_NV = torch.cumsum(log_probs_NV.exp(), -1, dtype=torch.float64)
        total_N1 = cumulative_NV[:, -1:]
        uniform_N1 = torch.from_numpy(uniforms(self._seeds_N, positions_N)).to(log_probs_NV.device)[:, None]
        # Strictly below the total, or rounding could land behind the last token that has any probability.
        target_N1 = torch.minimum(uniform_N1 * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
        return torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0].clamp_max(log_probs_NV.shape[-1] - 1)

    def _filter(self, log_probs_FV: Tensor) -> Tensor:
        """Keep the ``top_k`` most probable tokens, and of all tokens the fewest that together reach ``top_p``;
        renormalise.

        Both limits look at the unfiltered distribution (as SGLang's "joint" order); ties go to the lower token id.
        """
        sorted_FV, order_FV = log_probs_FV.sort(stable=True, dim=-1, descending=True)
        probs_FV = sorted_FV.exp().double()
        before_FV = probs_FV.cumsum(-1) - probs_FV
        rank_V = torch.arange(log_probs_FV.shape[-1], device=log_probs_FV.device)
        dropped_FV = (rank_V >= self._top_k_F1) | (before_FV >= self._top_p_F1)
        dropped_FV[:, 0] = False
        kept_FV = torch.log_softmax(sorted_FV.masked_fill(dropped_FV, float("-inf")), -1)
        return torch.empty_like(log_probs_FV).scatter_(1, order_FV, kept_FV)
