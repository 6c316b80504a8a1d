"""Models of transformers from the configuration of a Hugging Face directory, without weights; with heads for further
tokens (MTP), as modules under the names of the files.

    hidden state of i, embedding of i + k -> norms, joined -> projection -> one layer -> norm: predicts i + k + 1

A head's layer is the family's own decoder layer. Embedding and output layer are the model's, and get no gradient, nor
do the model's hidden states: the heads are all that their loss trains, as in slime. Of several heads each reads the
states of the head before. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
Shape letters: T = tokens of a row, H = hidden size.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tidemill.bus.system.functions import described
from tidemill.learner.backends.fsdp.attention import PACKED, CurrentRow, give_row, mixers_of, separate_sequences
from tidemill.learner.backends.fsdp.family import Family, family_of
from tidemill.learner.checkpoints.decoding import DECODERS
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.choices import SDPA
from tidemill.learner.kernels.packed_rows import PackedRow
from tidemill.learner.layout.model_files import has_named_head

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


class PaddedRow(NamedTuple):
    """A row whose sequences are padded on the right to the longest."""

    sequences: int
    longest: int
    places_T: Tensor
    """Place of each token of the packed row among the ``sequences * longest`` tokens, in host memory."""

    @classmethod
    def of(cls, packed: PackedRow) -> "PaddedRow":
        lengths = [length for _, length in packed.spans]
        longest = max(lengths)
        places = [torch.arange(length) + number * longest for number, length in enumerate(lengths)]
        return cls(len(lengths), longest, torch.cat(places))


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
        padded = PaddedRow.of(packed)
        places_T = padded.places_T.to(tokens_T.device)
        tokens_SL = tokens_T.new_zeros(padded.sequences * padded.longest).index_copy(0, places_T, tokens_T)
        tokens_SL = tokens_SL.view(padded.sequences, padded.longest)
        positions_SL = torch.arange(padded.longest, device=tokens_T.device).expand_as(tokens_SL)
        states_SLH = base(input_ids=tokens_SL, position_ids=positions_SL, use_cache=False).last_hidden_state
        return states_SLH.flatten(0, 1)[places_T]  # type: ignore[no-any-return]

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
    # llama4 declares the prefix of its model with images.
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


class NumberedHead(torch.nn.Module):
    """Base of a head's class, in front of its layer's: ``model.layers.<number of layers + k>``."""

    eh_proj: torch.nn.Module
    enorm: torch.nn.Module
    hnorm: torch.nn.Module
    shared_head: Any

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states of the head, [1, T, H]."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        states: Tensor = self.shared_head.norm(super().forward(joined, **arguments))
        return states


class NamedHead(torch.nn.Module):
    """The head ``mtp`` of a family of Qwen."""

    def __init__(self, layer: torch.nn.Module, norm: torch.nn.Module, projection: torch.nn.Linear) -> None:
        super().__init__()
        self.fc, self.layers = projection, torch.nn.ModuleList([layer])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self.norm = norm

    def forward(self, hidden: Tensor, embedded: Tensor, **arguments: Any) -> Tensor:
        """Return the states of the head, [1, T, H]."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        states: Tensor = self.norm(self.layers[0](self.fc(torch.cat(parts, dim=-1)), **arguments))
        return states


def add_heads(model: Any, heads: int) -> None:
    """Add the heads to a model of transformers, without values."""
    base, config = base_of(model), model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    last = max(number for number, kind in enumerate(kinds) if kind == "full_attention")
    for _ in range(heads):
        layer = type(base.layers[last])(config, last)
        norm = type(base.norm)(config.hidden_size, eps=config.rms_norm_eps)
        projection = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if has_named_head(config.model_type):
            model.mtp = NamedHead(layer, norm, projection)
            continue
        # The names in the files want the layer itself, with further parts: it keeps its instance, and its class is
        # exchanged for one of the same name, by which layers are found.
        layer.__class__ = type(type(layer).__name__, (NumberedHead, type(layer)), {})
        layer.eh_proj, layer.enorm, layer.hnorm = projection, copy.deepcopy(norm), copy.deepcopy(norm)
        layer.shared_head = torch.nn.Module()
        layer.shared_head.norm = norm
        base.layers.append(layer)  # A pass of the model takes the first ``num_hidden_layers`` layers, so not this one.


def with_heads(kind: Any, heads: int) -> Any:
    """Return a class of models of transformers that are made with their heads: ``from_pretrained`` reads them, too."""

    def make(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        add_heads(self, heads)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def heads_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the heads of a model, in order."""
    return [module for module in model.modules() if isinstance(module, NumberedHead | NamedHead)]


def names_of_heads(model: torch.nn.Module) -> frozenset[str]:
    """Return the names in the model of all tensors of its heads."""
    prefixes = {id(head): name for name, head in model.named_modules()}
    return frozenset(
        f"{prefixes[id(head)]}.{name}"
        for head in heads_of(model)
        for name, _ in (*head.named_parameters(), *head.named_buffers())
    )


def further_states(model: Any, hidden_TH: Tensor, tokens_T: Tensor, positions_T: Tensor) -> Iterator[Tensor]:
    """Yield the states [T, H] of each head; the k-th predicts the token k + 1 places behind. Inside the root's pass.

    The last k states of each sequence have read the next sequence of the row, and predict nothing.
    """
    states, positions = hidden_TH.detach()[None], positions_T[None]
    angles = base_of(model).rotary_emb(states, positions)
    for depth, head in enumerate(heads_of(model), 1):
        with torch.no_grad():
            embedded = model.get_input_embeddings()(tokens_T.roll(-depth)[None])
        states = head(states, embedded, position_embeddings=angles, attention_mask=None, position_ids=positions)
        yield states[0]
