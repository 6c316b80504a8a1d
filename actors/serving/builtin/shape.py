"""The shape of a model, read from its directory: sizes, rotary embedding, names and shapes of its tensors. No torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidemill.actors.errors import NotDecoded, UnsupportedModel
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.model_values import MISTRAL_WINDOW, as_older
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.rewards.model_text import EndTokens

FAMILIES = ("qwen3", "qwen2", "llama", "mistral", "glm4", "qwen3_moe")
"""Values of ``model_type`` that the decoder supports."""
HALVES, NEIGHBOURS = "halves", "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding; the decoder turns it into angles."""

    kind: str = "default"
    """default | linear | llama3."""
    theta: float = 10000.0
    factor: float = 1.0
    """Factor by which positions (linear) or low frequencies (llama3) are slowed down."""
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_context: int = 8192
    share: float = field(default=1.0, repr=False)
    """Share of each head that has positions, from its first element on. Not in the text of a shape, as ``pairs``."""
    pairs: str = field(default=HALVES, repr=False)
    """Which elements turn together: those at the same place of both halves of that share, or neighbours."""

    def size(self, head_dim: int) -> int:
        """Return the number of elements of a head that have positions."""
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of the mixtures of experts of a model."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts that each token goes to."""
    intermediate: int
    normalised: bool
    """True when the shares of a token's experts add up to 1."""
    layers: tuple[int, ...]
    """Layers that have experts instead of one MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a served model of any family."""

    family: str
    architecture: str
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    routed: RoutedShape | None = None
    """Sizes of the routing; None = the engine reports no experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder of the Llama family and of its relatives."""

    family: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    """True when the output projection is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    """True when queries and keys are normalised per head (Qwen3)."""
    rope: Rope
    eos_ids: tuple[int, ...]
    architecture: str
    experts: ExpertSizes | None = field(default=None, repr=False)
    """None = every layer has one MLP. Not in the text of a shape, which older runs have recorded."""
    post_norms: bool = field(default=False, repr=False)
    """True when a norm follows attention and MLP, before the residual (GLM-4)."""
    joint_gate_up: bool = field(default=False, repr=False)
    """True when the gate and up projections are one tensor of the files (GLM-4)."""

    def experts_of(self, layer: int) -> ExpertSizes | None:
        """Return the experts of a layer; None if it has one MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @classmethod
    def read(cls, model_dir: Path) -> "ModelShape":
        """Return the shape in config.json, with the end tokens of all files. Raises UnsupportedModel."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            eos_ids = EndTokens.read(model_dir).ids
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UnsupportedModel(str(path), f"want a Hugging Face configuration: {error}") from error
        return cls.of(config, eos_ids=eos_ids, where=str(path))

    @classmethod
    def of(cls, config: Mapping[str, object], *, eos_ids: tuple[int, ...] = (), where: str) -> "ModelShape":
        """Return the shape in the map of a config.json; ``where`` is its path in errors. Raises UnsupportedModel."""
        try:
            _check_family(config, where)  # first: others may have settings that no older form has
            config = as_older(config)
            _check_supported(config, where)
            return _from_config(config, eos_ids=eos_ids, where=where)
        except UnsupportedModel:
            raise
        except KeyError as error:
            raise UnsupportedModel(where, f"{error.args[0]} is missing") from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise UnsupportedModel(where, f"want sizes as a Hugging Face configuration has them: {error}") from error

    @property
    def routed(self) -> RoutedShape | None:
        """Sizes of the routing; None = no layer has experts."""
        experts = self.experts
        if experts is None or not experts.layers:
            return None
        return RoutedShape(
            num_layers=self.num_layers, layers=experts.layers, top_k=experts.per_token, num_experts=experts.count
        )

    @property
    def facts(self) -> ModelFacts:
        """The facts that an engine of any family reports."""
        return ModelFacts(
            family=self.family,
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            eos_ids=self.eos_ids,
            routed=self.routed,
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of every required tensor, without a tied output projection."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            shapes[at + "input_layernorm.weight"] = (self.hidden,)
            for part, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
            if self.head_norm:
                shapes[at + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[at + "self_attn.o_proj.weight"] = (self.hidden, queries)
            if self.output_bias:
                shapes[at + "self_attn.o_proj.bias"] = (self.hidden,)
            shapes[at + "post_attention_layernorm.weight"] = (self.hidden,)
            if self.post_norms:
                shapes |= {f"{at}post_{block}_layernorm.weight": (self.hidden,) for block in ("self_attn", "mlp")}
            shapes |= self._mlp(at + "mlp.", self.experts_of(layer))
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        return shapes

    def _mlp(self, at: str, experts: ExpertSizes | None) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        prefixes, inner = [at], self.intermediate
        if experts is not None:
            shapes[f"{at}gate.weight"] = (experts.count, self.hidden)
            prefixes, inner = [f"{at}experts.{number}." for number in range(experts.count)], experts.intermediate
        halves = {"gate_up": 2 * inner} if self.joint_gate_up else {"gate": inner, "up": inner}
        parts = [*((half, rows, self.hidden) for half, rows in halves.items()), ("down", self.hidden, inner)]
        for prefix in prefixes:
            for part, rows, columns in parts:
                shapes[f"{prefix}{part}_proj.weight"] = (rows, columns)
                if self.mlp_bias:
                    shapes[f"{prefix}{part}_proj.bias"] = (rows,)
        return shapes


def choose_runner(runner: str, read: Callable[[], ModelShape]) -> tuple[ModelShape | None, str]:
    """Return the shape of a model for the decoder, None = transformers runs it, and the reason of the choice.
    ``runner``: auto | decoder | transformers. ``read`` returns the shape, or raises UnsupportedModel, as this does for
    a model that ``decoder`` cannot run.
    """
    if runner == "transformers":
        return None, "engine.runner"
    try:
        return read(), "the decoder has this model"
    except NotDecoded as error:
        if runner == "decoder":
            raise
        return None, f"the decoder lacks this model ({error})"


def _check_family(config: Mapping[str, object], where: str) -> None:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise NotDecoded(f"{where}: model_type", f"the decoder has {', '.join(FAMILIES)}; got {family!r}")


def _check_supported(config: JsonMapping, where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise NotDecoded(f"{where}: hidden_act", f"want silu, got {config['hidden_act']!r}")
    if config.get("use_sliding_window") or set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise NotDecoded(f"{where}: use_sliding_window", "want full attention in every layer")
    window = config.get("sliding_window", MISTRAL_WINDOW)
    if config["model_type"] == "mistral" and window is not None and window < config.get("max_position_embeddings", 0):
        raise NotDecoded(f"{where}: sliding_window", f"want null, or at least max_position_embeddings, got {window}")
    if config.get("quantization_config"):
        raise NotDecoded(f"{where}: quantization_config", "want unquantised weights")


def _from_config(config: JsonMapping, *, eos_ids: tuple[int, ...], where: str) -> ModelShape:
    family, heads = str(config["model_type"]), int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        family=family,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family not in ("qwen2", "glm4") and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        head_norm=family in ("qwen3", "qwen3_moe"),
        rope=_rope(config, where) if family != "glm4" else _partial(_rope(config, where), config),
        eos_ids=eos_ids,
        architecture=(config.get("architectures") or [f"{family}ForCausalLM"])[0],
        experts=_experts(config) if family == "qwen3_moe" else None,
        post_norms=family == "glm4",
        joint_gate_up=family == "glm4",
    )


def _experts(config: JsonMapping) -> ExpertSizes:
    every, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return ExpertSizes(
        count=int(config["num_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=tuple(at for at in range(int(config["num_hidden_layers"])) if at not in dense and (at + 1) % every == 0),
    )


def _rope(config: JsonMapping, where: str) -> Rope:
    scaling: JsonObject = dict(config.get("rope_scaling") or {})
    kind, theta = scaling.get("rope_type", scaling.get("type", "default")), float(config.get("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(kind=kind, theta=theta, factor=float(scaling["factor"]))
    if kind == "llama3":
        return Rope(
            kind=kind,
            theta=theta,
            factor=float(scaling["factor"]),
            low_turns=float(scaling["low_freq_factor"]),
            high_turns=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    raise NotDecoded(f"{where}: rope_scaling", f"want default, linear or llama3, got {kind!r}")


def _partial(rope: Rope, config: JsonMapping) -> Rope:
    """Return the rotary embedding of neighbours in a share of each head."""
    return replace(rope, share=float(config.get("partial_rotary_factor", 0.5)), pairs=NEIGHBOURS)
