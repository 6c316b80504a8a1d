"""Outputs of a model's modules for single prompts: hooks around one forward pass. The backend names the modules.

    prompt -> this rank's part -> hooks on the modules -> whole outputs [T, W]

Shape letters: T = tokens of one prompt, with padding; C = tokens of this context-parallel rank; H = hidden size, W =
width of an output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.learner.kernels.logprobs import log_probs_and_entropy
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout.parallel import Parallel, gather_parts, own_part
from tidemill.learner.trainer.port import ModelInput, Policy

Take = Callable[[Any, Any, Any], None]
LOG_PROBS = "log_probs"
"""Name of the log-probs of a prompt's tokens among the outputs, [T, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt(ModelInput):
    """This rank's part of a prompt, as an input of the model."""

    targets_T: Tensor


def with_bias(output: Any) -> Tensor:
    """Return the output with its bias, where a module returns it apart."""
    value, bias = (*output, None)[:2] if isinstance(output, tuple) else (output, None)
    summed: Tensor = value + bias if isinstance(bias, Tensor) and bias.ndim == 1 else value
    return summed


@dataclass(frozen=True, slots=True)
class Place:
    """A module and what is taken of it."""

    name: str
    module: Any
    together: Callable[[Tensor], Tensor] = torch.Tensor.contiguous
    """Puts together the values [C, W] of the tensor-parallel ranks; collective."""
    value_of: Callable[[Any], Tensor] = with_bias
    """Returns the value in the output of the module."""


@torch.no_grad()
def outputs_of(policy: Policy, places: Sequence[Place], tokens: Sequence[int], names: str) -> list[tuple[str, Tensor]]:
    """Return the whole outputs [T, W] of the places with matching names, in the order of computation, and where this
    rank computes them the log-probs. Collective over all ranks.
    """
    ranks, outputs = policy.parallel, dict[str, Tensor]()
    matching = [place for place in places if fnmatchcase(place.name, names)]

    def finish(prompt: _Prompt, hidden_CH: Tensor) -> tuple[Tensor, None]:
        """Take the log-probs. Returns a loss that is not used."""
        if fnmatchcase(LOG_PROBS, names):
            head = policy.head()
            log_probs_C, _ = log_probs_and_entropy(
                hidden_CH, head.weight_VH, prompt.targets_T, group=head.group, scale=head.scale, cap=head.cap
            )
            outputs[LOG_PROBS] = log_probs_C[:, None]
        return hidden_CH.new_zeros(()), None

    with _hooked(matching, outputs), policy.ready():
        policy.run([_prompt(tokens, ranks)], finish, forward_only=True)
    together = {place.name: place.together for place in matching}
    named_values = [(name, together[name](value) if name in together else value) for name, value in outputs.items()]
    return [(name, gather_parts(value, ranks.cp_group) if ranks.cp_size > 1 else value) for name, value in named_values]


def num_tokens(name: str, tokens: Sequence[int]) -> int:
    """Return the number of tokens that have this output: the last one has no target."""
    return len(tokens) - (name == LOG_PROBS)


def _prompt(tokens: Sequence[int], ranks: Parallel) -> _Prompt:
    """Return this rank's part of a prompt. Padding to a multiple of the ranks is a sequence of its own."""
    padding = -len(tokens) % (ranks.tp_size * ranks.cp_size)
    ends = [0, len(tokens), *([len(tokens) + padding] if padding else [])]
    ids_T, targets_T = torch.tensor([*tokens, *[0] * padding]), torch.tensor([*tokens[1:], *[0] * (padding + 1)])
    positions_T = torch.cat([torch.arange(end - start) for start, end in pairwise(ends)])
    ids_C, targets_C, positions_C = (
        own_part(values_T, ranks.cp_rank, ranks.cp_size).to(ranks.device)
        for values_T in (ids_T, targets_T, positions_T)
    )
    return _Prompt(tokens_T=ids_C, targets_T=targets_C, packed=packed_row(np.array(ends, np.int32), positions_C))


@contextmanager
def _hooked(places: Sequence[Place], outputs: dict[str, Tensor]) -> Iterator[None]:
    handles = [place.module.register_forward_hook(_taking(place, outputs)) for place in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _taking(place: Place, outputs: dict[str, Tensor]) -> Take:
    def take(module: Any, inputs: Any, output: Any) -> None:
        # The rows behind the prompt are padding of the pipeline's schedule.
        if place.name not in outputs:
            value = place.value_of(output).detach()
            outputs[place.name] = value.reshape(-1, value.shape[-1]).clone()

    return take
