"""Outputs of the modules of Megatron's model for single prompts, under names that other implementations of the model
share.

    embedding | layers.<i>.attention.qkv, .attention.core, .attention, .mlp.experts, .mlp, layers.<i> (its output) |
norm | log_probs

    rank: its layers, tokens, heads -> outputs of the stage (tensor-, context-parallel ranks) -> rank 0: all stages

The numbers of the layers are those of the whole model at every layout. ``.mlp.experts`` is 1 where a token is sent to
an expert, else 0. Shape letters: T = tokens of one prompt, with padding; C = those of this context-parallel rank; H =
hidden size, W = width of an output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.kernels.logprobs import log_probs_and_entropy
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout.parallel import Parallel, gather_parts, of_all_stages, own_part
from tidemill.learner.trainer.backend import ModelInput

Take = Callable[[Any, Any, Any], None]
LOG_PROBS = "log_probs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt(ModelInput):
    """This rank's part of a prompt, as an input of the model."""

    targets_T: Tensor


def _with_bias(output: Any) -> Tensor:
    """Return the output with its bias, where Megatron returns that apart."""
    value, bias = output[:2] if isinstance(output, tuple) else (output, None)
    summed: Tensor = value + bias if isinstance(bias, Tensor) and bias.ndim == 1 else value
    return summed


def _sent(output: tuple[Tensor, Tensor]) -> Tensor:
    """Return 1 for each token and expert to which a router has sent it, else 0."""
    return output[1].float()


@dataclass(frozen=True, slots=True)
class _Place:
    """A module and what is taken of it."""

    name: str
    module: Any
    together: Callable[[Tensor], Tensor]  # puts together the values [C, W] of the tensor-parallel ranks; collective
    of: Callable[[Any], Tensor] = _with_bias  # value in the output of the module


def module_outputs(
    policy: MegatronPolicy, prompts: Sequence[Sequence[int]], names: str = "*"
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules with matching names, in the order of computation: ``<prompt>.<module>`` -> [T,
    W].

    One prompt at a time under the current weights. Collective over all ranks; rank 0 gets the whole outputs of all
    stages, the others none. Latent attention has no attention.qkv.
    """
    ranks, found = policy.parallel, {}
    in_first_column = ranks.dp_rank == ranks.tp_rank == ranks.cp_rank == 0
    policy.memory.want("a forward pass")
    for number, tokens in enumerate(prompts):
        stage_outputs = _of_stage(policy, tokens, names)
        if not in_first_column:
            continue
        outputs = dict(of_all_stages(iter(stage_outputs), ranks))
        if ranks.rank == 0:
            for name in sorted(outputs, key=_order):
                last = len(tokens) - (name == LOG_PROBS)  # the last token has no target
                found[f"{number}.{name}"] = outputs[name][:last].float().cpu().numpy()
    return found


def _order(name: str) -> float:
    """Return the place of a module among those of other stages; modules of one layer are in order already."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    return int(layer) if layer else -1 if name == "embedding" else np.inf


@torch.no_grad()
def _of_stage(policy: MegatronPolicy, tokens: Sequence[int], names: str) -> list[tuple[str, Tensor]]:
    """Return the whole outputs [T, W] of this rank's stage, in the order of computation; collective over all ranks."""
    ranks, outputs = policy.parallel, dict[str, Tensor]()
    places = [place for place in _places(policy) if fnmatchcase(place.name, names)]

    def finish(prompt: _Prompt, hidden_CH: Tensor) -> tuple[Tensor, None]:
        """Take the log-probs. Returns a loss that is not used."""
        if fnmatchcase(LOG_PROBS, names):
            weight_VH = policy.head().weight_VH
            outputs[LOG_PROBS] = log_probs_and_entropy(hidden_CH, weight_VH, prompt.targets_T, group=ranks.tp_group)[0][
                :, None
            ]
        return hidden_CH.new_zeros(()), None

    with _hooked(places, outputs), megatron_device():
        policy.run([_prompt(tokens, ranks)], finish, forward_only=True)
    together = {place.name: place.together for place in places}
    named_values = [(name, together[name](value) if name in together else value) for name, value in outputs.items()]
    return [(name, gather_parts(value, ranks.cp_group) if ranks.cp_size > 1 else value) for name, value in named_values]


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
def _hooked(places: Sequence[_Place], outputs: dict[str, Tensor]) -> Iterator[None]:
    handles = [place.module.register_forward_hook(_taking(place, outputs)) for place in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _taking(place: _Place, outputs: dict[str, Tensor]) -> Take:
    def take(module: Any, inputs: Any, output: Any) -> None:
        # The rows behind the prompt are padding of the pipeline's schedule.
        if place.name not in outputs:
            value = place.of(output).detach()
            outputs[place.name] = value.reshape(-1, value.shape[-1]).clone()

    return take


def _places(policy: MegatronPolicy) -> Iterator[_Place]:
    ranks, config = policy.parallel, policy.config

    def tokens(value: Tensor) -> Tensor:
        """Return the tokens of all tensor-parallel ranks, which sequence parallelism divides."""
        return gather_parts(value, ranks.tp_group) if ranks.sequence_parallel else value

    def heads(value_CW: Tensor) -> Tensor:
        """Return the heads of all tensor-parallel ranks, in their order."""
        return gather_parts(value_CW.t(), ranks.tp_group).t() if ranks.tp_size > 1 else value_CW

    def query_key_value(value_CW: Tensor) -> Tensor:
        return torch.cat([heads(part) for part in _split(value_CW, config, ranks.tp_size)], dim=-1)

    for model in policy.chunks:
        if model.pre_process:
            yield _Place("embedding", model.embedding, tokens)
        for layer in model.decoder.layers:
            attention, at = layer.self_attention, f"layers.{layer.layer_number - 1}"
            if not config.multi_latent_attention:  # which has no joint projection
                yield _Place(f"{at}.attention.qkv", attention.linear_qkv, query_key_value)
            yield _Place(f"{at}.attention.core", attention.core_attention, heads)
            yield _Place(f"{at}.attention", attention, tokens)
            if (router := getattr(layer.mlp, "router", None)) is not None:
                yield _Place(f"{at}.mlp.experts", router, tokens, _sent)
            yield _Place(f"{at}.mlp", layer.mlp, tokens)
            yield _Place(at, layer, tokens)
        if model.post_process:
            yield _Place("norm", model.decoder.final_layernorm, tokens)


def _split(mixed_CW: Tensor, config: Any, tp_size: int) -> tuple[Tensor, ...]:
    """Return this rank's queries, keys and values; Megatron has them group by group."""
    groups, size = config.num_query_groups // tp_size, config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups
    parts = mixed_CW.unflatten(-1, (groups, queries + 2, size)).split((queries, 1, 1), dim=-2)
    return tuple(part.flatten(-3) for part in parts)
