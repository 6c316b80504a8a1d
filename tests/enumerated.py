"""A policy small enough to be exact: three tokens, three steps, all 27 responses in one packed row with their
probabilities.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY, STEPS = 3, 3
RESPONSES = tuple(itertools.product(range(VOCABULARY), repeat=STEPS))
PREFIXES = tuple(prefix for length in range(STEPS) for prefix in itertools.product(range(VOCABULARY), repeat=length))


@dataclass(frozen=True)
class Policy:
    """Logits of the next token after every prefix, float64 [13, 3]."""

    logits_PV: Tensor

    @staticmethod
    def random(seed: int, *, like: "Policy | None" = None, spread: float = 1.0) -> "Policy":
        """Return a random policy, or one near another."""
        noise = spread * torch.randn(
            len(PREFIXES), VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        return Policy((like.logits_PV.detach() if like else 0) + noise)

    @property
    def log_probs_T(self) -> Tensor:
        """Return the log-prob of each token of each response in one row, [81]; with gradient where the logits have
        one.
        """
        table = self.logits_PV.log_softmax(-1)
        places = [(PREFIXES.index(response[:step]), response[step]) for response in RESPONSES for step in range(STEPS)]
        rows, columns = zip(*places, strict=True)
        return table[list(rows), list(columns)]

    @property
    def probabilities_N(self) -> Tensor:
        """Return the probability of each response, [27]."""
        return self.log_probs_T.view(-1, STEPS).sum(-1).exp()


SAMPLE_T = torch.repeat_interleave(torch.arange(len(RESPONSES)), STEPS)
MASK_T = torch.ones(len(SAMPLE_T), dtype=torch.bool)
PLACE = (MASK_T, SAMPLE_T, len(RESPONSES))


def per_token(values_N: Tensor) -> Tensor:
    """Return each response's value at its tokens."""
    return values_N.repeat_interleave(STEPS)


def expected(values_T: Tensor, under: Policy) -> Tensor:
    """Return ``E[sum of a response's token values]``, with the sampling held fixed."""
    return (per_token(under.probabilities_N.detach()) * values_T).sum()


def gradient(value: Tensor, of: Policy) -> Tensor:
    return torch.autograd.grad(value, of.logits_PV, retain_graph=True)[0]


def objective_gradient(policy: Policy, rewards_N: Tensor) -> Tensor:
    """Return the gradient of the expected reward, by differentiating the expectation itself."""
    return gradient((policy.probabilities_N * rewards_N).sum(), policy)
