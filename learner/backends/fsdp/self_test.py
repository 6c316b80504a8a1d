"""The self-test of a model's family, at every start, on a small model of the same class.

transformers has hundreds of families, and some of them let one sequence of a packed row read another without an error.
So each family is tried: every sequence of a row alone against all of them together, and the output layer against the
logits of the whole model, with gradients. A family that leaks is computed in padded rows.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tidemill.bus.system.functions import described
from tidemill.learner.backends.fsdp.family import Family, family_of
from tidemill.learner.backends.fsdp.opening import Transformer, base_of, build
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.kernels.packed_rows import PackedRow, packed_row

log = logging.getLogger(__name__)

LENGTHS = (23, 1, 40, 17, 2)
"""Tokens of the sequences: longer and shorter than the windows and chunks of ``small_config``."""
TOLERANCE = {"cpu": 1e-3, "cuda": 1e-2}
"""Largest difference of log-probs, and of gradients relative to the largest. A leak gives 0.2 to 1, rounding on a CPU
2e-5. Kernels for CUDA round in lower precisions.
"""
LARGEST = 64_000_000
"""Parameters of the small model above which its test would take longer than a start may."""
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Settings by which families multiply or divide their logits."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Settings with the soft cap of the logits."""


class Head(NamedTuple):
    """Logits of hidden states h: ``cap * tanh(scale * h @ W.T / cap)``."""

    scale: float = 1.0
    cap: float = 0.0
    """0 = there is no cap."""

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        logits_TV = hidden_TH @ weight_VH.t() * self.scale
        return self.cap * torch.tanh(logits_TV / self.cap) if self.cap else logits_TV


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of the self-test of a family."""

    packed: bool
    """Rows are packed; else their sequences are padded to the longest."""
    head: Head
    mixers: bool
    """The family has layers that carry a state from token to token."""
    reason: str
    """Largest difference of packed rows from single sequences, or why they are padded."""


_FINDINGS: dict[tuple[str, str, Family | None], Findings] = {}


def findings_of(config: Any, device: torch.device, family: Family | None = None) -> Findings:
    """Return the findings of ``self_test``, which runs once in a process: a critic has the configuration of its
    policy.
    """
    key = (repr(config.to_dict()), device.type, family)
    if key not in _FINDINGS:
        _FINDINGS[key] = self_test(config, device, family)
    return _FINDINGS[key]


def self_test(config: Any, device: torch.device, family: Family | None = None) -> Findings:
    """Try the family of a configuration on the device of its training, whose kernels it takes: a second or two.

    ``family``: the user's rules; None = by ``model_type``.
    Raises ConfigRefused for a family whose logits do not come from its output layer, or that is wrong in padded rows,
    too.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device, torch.enable_grad():
        torch.manual_seed(0)
        try:
            family = family or family_of(config)
            return _tried(small_config(config, family), family, TOLERANCE[device.type])
        except ConfigRefused:
            raise
        except Exception as error:  # of any family's code
            raise _refused(config, f"a small model of its class: {described(error)}") from error


def _tried(config: Any, family: Family, tolerance: float) -> Findings:
    """Return the findings about the model of a small configuration. Raises ConfigRefused, and what the model raises."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config, packed=False, family=family).model.parameters())
    if size > LARGEST:
        raise _refused(config, f"no small model of its class: {size:,} parameters")
    plain = build(config, packed=False, family=family)
    randomize(plain.model)
    tokens = plain.model.get_input_embeddings().weight.shape[0]
    alone = Alone.of(plain, [torch.randint(3, tokens, (length,)) for length in LENGTHS])
    packed = _attempt(alone, lambda: _packed(plain, family), tolerance)
    if packed.fault:
        padded = _attempt(alone, lambda: plain, tolerance)
        if padded.fault:
            raise _refused(config, f"padded rows: {padded.fault}")
    return Findings(
        packed=not packed.fault,
        head=alone.head,
        mixers=bool(plain.mixers),
        reason=f"packed rows: {packed.fault}"
        if packed.fault
        else f"single sequences differ by {packed.difference:.0e}",
    )


def randomize(model: torch.nn.Module) -> None:
    """Draw weights with which the tokens of a small model depend on each other more than with its initial ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "bias" in name and "dt" not in name:
                parameter.normal_(0, 0.05)


def row_of(lengths: Sequence[int]) -> PackedRow:
    """Return the layout of a row with sequences of these lengths."""
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    return packed_row(np.cumsum([0, *lengths]).astype(np.int32), positions_T)


class Scores(NamedTuple):
    """Log-probs of a model, and gradients of their sum with fixed weights."""

    log_probs_T: Tensor
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module, logits_TV: Tensor, sequences: Sequence[Tensor]) -> "Scores":
        """Return the scores of a model's logits for the tokens of a row, each with the next one as its target."""
        targets_T = torch.cat(list(sequences)).roll(-1)
        log_probs_T = torch.log_softmax(logits_TV.float(), -1).gather(1, targets_T[:, None])[:, 0]
        model.zero_grad()
        (log_probs_T * torch.linspace(-1, 1, len(targets_T))).sum().backward()
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        return cls(log_probs_T.detach(), {name: grad.clone() for name, grad in named if grad is not None})

    def difference(self, other: "Scores") -> float:
        """Return the largest difference of a log-prob, or of a gradient relative to the largest gradient."""
        largest = max(float(grad.abs().max()) for grad in self.gradients.values())
        gaps = [
            float((grad - other.gradients.get(name, torch.zeros_like(grad))).abs().max()) / largest
            for name, grad in self.gradients.items()
        ]
        total = max(float((self.log_probs_T - other.log_probs_T).abs().max()), *gaps)
        return total if math.isfinite(total) else math.inf


class Alone(NamedTuple):
    """Values of transformers for each sequence alone."""

    sequences: list[Tensor]
    head: Head
    scores: Scores

    @classmethod
    def of(cls, plain: Transformer, sequences: list[Tensor]) -> "Alone":
        """Return it for a plain model. Raises ConfigRefused for logits that are no product with the output weight."""
        logits = [plain.model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences]
        head = _find_head(plain, sequences, logits)
        return cls(sequences, head, Scores.of(plain.model, torch.cat(logits), sequences))

    def difference(self, transformer: Transformer) -> float:
        """Return the largest difference of a model that computes all sequences as one row."""
        row = row_of([len(tokens) for tokens in self.sequences])
        hidden_TH = transformer.hidden_states(torch.cat(self.sequences), row)
        logits_TV = self.head.logits(hidden_TH, transformer.model.get_output_embeddings().weight)
        return self.scores.difference(Scores.of(transformer.model, logits_TV, self.sequences))


class _Attempt(NamedTuple):
    """A way to compute rows, tried."""

    difference: float
    fault: str
    """Empty if it is exact."""


def _attempt(alone: Alone, make: Callable[[], Transformer], tolerance: float) -> _Attempt:
    try:
        difference = alone.difference(make())
    except Exception as error:  # of any family's code
        return _Attempt(math.inf, described(error))
    exact = difference <= tolerance
    return _Attempt(difference, "" if exact else f"a sequence differs by {difference:.0e} from itself alone")


def _packed(plain: Transformer, family: Family) -> Transformer:
    """Return the model with the same weights, for packed rows."""
    packed = build(plain.model.config, packed=True, family=family)
    packed.model.load_state_dict(plain.model.state_dict())
    return packed


def _find_head(plain: Transformer, sequences: Sequence[Tensor], logits: Sequence[Tensor]) -> Head:
    """Return the way in which a family's logits follow from its hidden states. Raises ConfigRefused."""
    config = plain.model.config
    longest = max(range(len(sequences)), key=lambda place: len(sequences[place]))
    layer = plain.model.get_output_embeddings()
    if layer is None:
        raise _refused(config, "no output layer")
    with torch.no_grad():
        states = base_of(plain.model)(input_ids=sequences[longest][None], use_cache=False).last_hidden_state[0]
        for head in _heads(config):
            if torch.allclose(head.logits(states, layer.weight), logits[longest], rtol=1e-4, atol=1e-4):
                return head
    raise _refused(config, "logits that are not a product of hidden states and output weight, scaled and capped")


def _heads(config: Any) -> Iterator[Head]:
    config = config.get_text_config()
    factors = [float(factor) for name in _SCALES if (factor := getattr(config, name, None))]
    cap = next((float(cap) for name in _CAPS if (cap := getattr(config, name, None))), 0.0)
    for scale in (1.0, *factors, *(1 / factor for factor in factors)):
        yield Head(scale, cap)


def _refused(config: Any, got: str) -> ConfigRefused:
    return ConfigRefused("model.path", f"a family that passes the self-test ({config.model_type})", got)


HIDDEN, HEADS, VOCABULARY = 64, 4, 128
_LIMITS = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 8),
    "index_topk": 8,
    "max_window_layers": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    "zero_expert_num": 2,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    "num_nextn_predict_layers": 0,
}
"""Largest values by the names of transformers' settings."""
_WIDTHS, _WIDTH = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"), 32
"""Ends of the names of sizes within layers that nothing else depends on, and their largest value."""
_INDICES = ("full_attn_idxs", "moe_layers", "mlp_only_layers", "moe_layer_indices", "hybrid_layer_ids")
"""Settings that list the numbers of layers."""
_MOST_LAYERS = 8
Settings = dict[str, Any]


def small_config(config: Any, family: Family) -> Any:
    """Return a configuration of the same class with 2 to 8 small layers: the kinds of layers of the model, in order.

    ``family``: its rules. Windows, chunks, scales and caps stay; windows and chunks become shorter than the sequences
    of the self-test.
    """
    return type(config).from_dict(_small(config.to_dict(), config, family))


def _small(settings: Settings, config: Any, family: Family) -> Settings:
    """Return the settings of a small model of the same class as ``config``, whose settings they are."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    inner = {name: _small(settings[name], part, family) for name, part in parts.items() if part is not None}
    own = {native: name for name, native in config.attribute_map.items()}  # transformers' common name of a setting
    common = {own.get(name, name): value for name, value in copy.deepcopy(settings).items() if name not in inner}
    for name in ("_name_or_path", "dtype", "quantization_config"):
        common.pop(name, None)
    if hasattr(config, "num_hidden_layers"):
        if "num_attention_heads" in common:
            _cut_sizes(common)
        else:  # states alone: falcon_mamba
            _limit(common, 0)
        _cut_layers(common, config.num_hidden_layers)
        family.fit(common)
    if common.get("pad_token_id") is not None:
        common["pad_token_id"] = 0
    return {**{config.attribute_map.get(name, name): value for name, value in common.items()}, **inner}


def _cut_sizes(settings: Settings) -> None:
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    own_size = settings.get("head_dim") or settings.get("v_head_dim")
    head_size = own_size or hidden // heads
    kept_heads = min(heads, HEADS)
    for part in (settings, *(settings.get("per_layer_config") or {}).values()):
        _limit(part, heads)
    # Some layers take the hidden size for the size of all heads together.
    bound = hidden == heads * head_size or not own_size
    settings["hidden_size"] = kept_heads * head_size if bound else min(hidden, HIDDEN)
    if "mamba_expand" in settings and "mamba_n_heads" in settings:
        settings["mamba_d_head"] = settings["mamba_expand"] * settings["hidden_size"] // settings["mamba_n_heads"]


def _limit(settings: Settings, heads: int) -> None:
    """Cut sizes that stand for themselves. ``heads``: of the whole model."""
    for name, value in settings.items():
        limit = _LIMITS.get(name, _WIDTH if name.endswith(_WIDTHS) else None)
        settings[name] = value if limit is None else _limited(value, limit)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if isinstance(groups := settings.get(name), int):
            of_layer = settings.get("num_attention_heads", heads)
            settings[name] = min(of_layer, HEADS) if groups == of_layer else min(groups, HEADS // 2)
    if "num_attention_heads" in settings:
        settings["num_attention_heads"] = min(settings["num_attention_heads"], HEADS)


def _limited(value: Any, largest: int) -> Any:
    if isinstance(value, list):
        return [_limited(item, largest) for item in value]
    return min(value, largest) if isinstance(value, int) and not isinstance(value, bool) else value


def _cut_layers(settings: Settings, layers: int) -> None:
    """Keep the first layer of each kind, and as many again where later layers share what earlier ones computed."""
    special = {int(number): values for number, values in (settings.get("per_layer_config") or {}).items()}
    lists = {name: value for name, value in settings.items() if isinstance(value, list) and len(value) == layers}
    kinds = [
        (*(repr(value[number]) for value in lists.values()), repr(special.get(number))) for number in range(layers)
    ]
    kept = sorted({kinds.index(kind) for kind in kinds})[:_MOST_LAYERS]
    kept = kept if len(kept) > 1 else list(range(min(layers, 2)))
    if settings.get("num_kv_shared_layers"):
        settings["num_kv_shared_layers"] = len(kept)
        kept = [*kept, *kept]
    settings.update({name: [value[number] for number in kept] for name, value in lists.items()})
    if "num_hidden_layers" in settings:  # nemotron_h counts its list
        settings["num_hidden_layers"] = len(kept)
    if special:
        settings["per_layer_config"] = {
            place: special[number] for place, number in enumerate(kept) if number in special
        }
    for name in _INDICES:
        if isinstance(listed := settings.get(name), list):
            settings[name] = [place for place, number in enumerate(kept) if number in listed]
