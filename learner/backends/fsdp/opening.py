"""Models of transformers from the configuration of a Hugging Face directory, without weights."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from tidemill.bus.system.functions import described
from tidemill.learner.backends.fsdp.attention import PACKED, CurrentRow, give_row
from tidemill.learner.backends.fsdp.family import Family, family_of
from tidemill.learner.backends.fsdp.mixers import mixers_of, separate_sequences
from tidemill.learner.checkpoints.decoding import DECODERS
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import SDPA
from tidemill.learner.kernels.packed_rows import PackedRow

_RANDOM = ("dropout", "pdrop", "jitter_noise")
"""Ends of the names of settings that add noise to training: old log-probs of the same weights would differ by it."""


def read_config(model_dir: Path) -> Any:
    """Return the configuration of the causal language model in a directory, without dropout.

    Raises ConfigRefused for a type of model that transformers does not have.
    """
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        with torch.device("meta"):
            # The model of a directory with images, too, has the configuration of its text alone where that is a class.
            config = AutoModelForCausalLM.from_config(config, trust_remote_code=False).config
    except Exception as error:  # of any family's code
        reason = described(error).splitlines()[0]  # the rest of it names all types
        want = "a causal language model that transformers has, or that the module of learner.family registers"
        raise ConfigRefused("model.path", want, reason) from error
    encoding = encoding_of(config)
    if encoding not in ("", *DECODERS):
        raise ConfigRefused(
            "model.path", f"weights that are not quantized, or {' or '.join(DECODERS)}", f"quant_method {encoding}"
        )
    return without_noise(config)


def encoding_of(config: Any) -> str:
    """Return the name of the encoding of quantized weights; empty = they are plain."""
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method", "") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def plain_config(config: Any) -> Any:
    """Return a copy of a configuration without the encoding of its weights."""
    plain = copy.deepcopy(config)
    if encoding_of(plain):
        del plain.quantization_config
    return plain


def without_noise(config: Any) -> Any:
    """Return a copy of a configuration, with those of its parts, without dropout and noise of routers."""
    quiet = copy.deepcopy(config)
    for part in (quiet, *parts_of(quiet)):
        for name, value in list(vars(part).items()):
            if name.endswith(_RANDOM) and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(part, name, type(value)(0))
    return quiet


def parts_of(config: Any) -> Iterator[Any]:
    """Yield the configurations within a configuration: of text, of images."""
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield part
            yield from parts_of(part)


class Transformer(NamedTuple):
    """A model of transformers that computes rows in one layout."""

    model: Any
    row: CurrentRow
    mixers: tuple[str, ...]
    """Names of the modules that carry a state from token to token, and compute each sequence alone."""
    packed: bool
    """A row is one sequence for all layers but these and attention; else its sequences are padded to the longest."""

    def hidden_states(self, tokens_T: Tensor, packed: PackedRow) -> Tensor:
        """Return the hidden states behind the last norm, [T, H]. Raises ConfigRefused for a sequence that is longer
        than the angles of its positions allow.
        """
        self._refuse_long(packed)
        self.row.set(packed)
        base = base_of(self.model)
        if self.packed:
            positions_T = packed.position_ids_T
            assert positions_T is not None
            states = base(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
            return states.last_hidden_state[0]  # type: ignore[no-any-return]
        lengths = [length for _, length in packed.spans]
        tokens_SL = pad_sequence(list(tokens_T.split(lengths)), batch_first=True)
        positions_SL = torch.arange(tokens_SL.shape[1], device=tokens_T.device).expand_as(tokens_SL)
        states_SLH = base(input_ids=tokens_SL, position_ids=positions_SL, use_cache=False).last_hidden_state
        return torch.cat([states_LH[:length] for states_LH, length in zip(states_SLH, lengths, strict=True)])

    def _refuse_long(self, packed: PackedRow) -> None:
        limit, longest = same_angles(self.model.config), max(map(sum, packed.spans), default=0)
        if longest > limit > 0:
            # With longrope the longest sequence of a pass chooses the angles of all others.
            want = f"at most {limit} tokens of prompt and response with longrope ({self.model.config.model_type})"
            raise ConfigRefused("engine.max_context", want, longest)


def same_angles(config: Any) -> int:
    """Return the number of positions whose angles do not depend on the lengths of sequences; 0 = all."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(limits, default=0)


def base_of(model: Any) -> Any:
    """Return the part of a model that computes hidden states."""
    # The prefix that llama4 declares is that of its model with images.
    return model.model if model.base_model is model else model.base_model


def build(
    config: Any,
    *,
    packed: bool,
    kernel: str = SDPA,
    prepare: Callable[[Any], None] | None = None,
    family: Family | None = None,
) -> Transformer:
    """Return the model of a configuration on torch's default device, in float32 and training mode.

    ``packed``: rows are packed, else padded, with transformers' own attention. ``kernel``: of packed attention.
    ``prepare``: gets the model of transformers first, and may add layers. ``family``: None = by ``model_type``.
    """
    implementation = {"attn_implementation": PACKED} if packed else {}
    model = AutoModelForCausalLM.from_config(plain_config(config), dtype=torch.float32, **implementation)
    if prepare is not None:
        prepare(model)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # a policy may sample that token, whose row would get no gradient
    row = CurrentRow(kernel=kernel)
    if packed:
        give_row(model, row)
    family = family or family_of(model.config)
    mixers = [name for name, _ in mixers_of(model, family)]
    if packed:
        separate_sequences(model, row, family)
    return Transformer(model, row, tuple(mixers), packed)
