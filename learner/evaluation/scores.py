"""Scores of an evaluation: mean@k, pass@k, bootstrap intervals, lengths, best of a run. Functions of numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""Resamples of the bootstrap."""
INTERVAL = 0.95
"""Mass of the bootstrap interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """One scored response of an evaluation."""

    score: float
    num_tokens: int
    """Tokens that the model has sampled."""
    truncated: bool
    """It ran into its length limit."""
    oldest_version: int
    """Oldest version that generated one of its tokens; -1 for an empty response."""
    newest_version: int
    """Newest version that generated one of its tokens; -1 for an empty response."""


def scores(
    prompts: Mapping[int, Sequence[ScoredResponse]],
    *,
    num_prompts: int,
    samples: int,
    passes_at: float,
    versions: tuple[int, int],
) -> dict[str, float]:
    """Return the metrics of one set at one version.

    ``prompts``: the responses to each prompt that has any, of ``num_prompts`` prompts with ``samples`` responses each.
    ``versions``: the version, and the newest one with the same weights.
    A prompt without a response is in no mean; ``missing`` is the number of expected responses that are not there.

    - ``mean``: mean over prompts of the mean score of a prompt's responses (mean@k).
    - ``mean_low``, ``mean_high``: percentile bootstrap interval of ``mean`` over prompts, 95 % (Efron, 1979).
    - ``pass_at_<k>``, k = 1, 2, 4 ... samples: unbiased estimate of the probability that one of k responses passes
      (Chen et al., 2021, arXiv 2107.03374, equation 1), mean over the prompts with at least k responses.
    """
    answered = [list(responses) for responses in prompts.values() if responses]
    responses = [response for group in answered for response in group]
    metrics = {
        "prompts": float(len(answered)),
        "samples": float(len(responses)),
        "missing": float(num_prompts * samples - len(responses)),
    }
    if not responses:
        return metrics
    means = np.array([np.mean([response.score for response in group]) for group in answered])
    low, high = bootstrap(means)
    metrics |= {"mean": float(means.mean()), "mean_low": low, "mean_high": high}
    counts = [(len(group), sum(response.score >= passes_at for response in group)) for group in answered]
    for k in powers(samples):
        chances = [pass_at(k, total, passed) for total, passed in counts if total >= k]
        if chances:
            metrics[f"pass_at_{k}"] = float(np.mean(chances))
    version, newest_copy = versions
    sampled = [response for response in responses if response.newest_version >= 0]
    oldest = min((response.oldest_version for response in sampled), default=newest_copy)
    newest = max((response.newest_version for response in sampled), default=newest_copy)
    return metrics | {
        "tokens_mean": float(np.mean([response.num_tokens for response in responses])),
        "tokens_max": float(max(response.num_tokens for response in responses)),
        "truncated_share": float(np.mean([response.truncated for response in responses])),
        "versions_later": float(newest - version if newest > newest_copy else 0),
        "versions_later_min": float(oldest - version if oldest > newest_copy else 0),
    }


def powers(samples: int) -> list[int]:
    """Return 1, 2, 4 ... up to ``samples``, and ``samples`` itself."""
    numbers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return numbers if numbers[-1] == samples else [*numbers, samples]


def pass_at(k: int, total: int, passed: int) -> float:
    """Return 1 - C(total - passed, k) / C(total, k): the chance that one of k responses, drawn at random, passes."""
    return 1.0 - math.comb(total - passed, k) / math.comb(total, k)


def bootstrap(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of ``values``, [N], N >= 1; the same for the same values."""
    drawn = np.random.Generator(np.random.Philox(key=0)).integers(0, len(values), (RESAMPLES, len(values)))
    means = values[drawn].mean(axis=1)
    low, high = np.quantile(means, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A version with its score."""

    version: int
    step: int
    value: float


class BestScore:
    """Scores of the evaluated versions, higher is better."""

    def __init__(self, choice: str, *, stop_after: int = 0) -> None:
        """``choice``: SET/METRIC. ``stop_after``: evaluations without a better score that end the run; 0 = never."""
        self.set, _, self.metric = choice.partition("/")
        self._stop_after = stop_after
        self._scored: dict[int, Scored] = {}
        self.stopped = ""
        """The reason to end the run; empty = none. It stays, though the last version may have a better score."""

    def note(self, dataset: str, version: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Register the scores of one set at one version, which may be repeated. Returns whether they have the score."""
        value = metrics.get(self.metric, math.nan)
        if dataset != self.set or not math.isfinite(value):
            return False
        self._scored[version] = Scored(version=version, step=step, value=value)
        best = self.ranked[0]
        num_later = sum(scored_version > best.version for scored_version in self._scored)
        if self._stop_after and num_later >= self._stop_after and not self.stopped:
            self.stopped = (
                f"no {self.set}/{self.metric} above {best.value:.4g} (version {best.version}, step {best.step}) in "
                f"the {num_later} evaluations after it (eval.stop_after)"
            )
        return True

    @property
    def ranked(self) -> Sequence[Scored]:
        """All of them, the best first; of equal ones the earliest."""
        return sorted(self._scored.values(), key=lambda scored: (-scored.value, scored.version))
