"""Settings of the files a run needs before it starts: a prompt file and a small model with random weights."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tidemill.bus.section import NotNegative, OneOf, Positive, section
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

TASKS = ("largest", "copy", "reverse", "sort", "sum", "walk")
SMALLEST_VOCABULARY = {"digits": 13, "gsm8k": 258}
"""Two special tokens and the ten digits and ``=``; two special tokens and all bytes."""
LARGEST_VOCABULARY = 97
"""Tokens of the character tokenizer, for the kind ``digits``."""
MODEL: JsonMapping = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "vocab_size": 16,
}
"""Default model, by names of ``config.json``; ``vocab_size`` depends on kind and task."""
RECORDED = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "rope_theta": "rope_theta",
    "initializer_range": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
    "max_position": "max_position_embeddings",
}
"""Names of the same values in records and digests."""


@section
@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """A small model with random weights and its prompts, made before the run. The model has the shape of Qwen3."""

    kind: Literal["digits", "gsm8k"] = "digits"
    """digits (made up, one character a token) | gsm8k (school mathematics, shipped; byte-level BPE trained on its
    text).
    """
    task: Annotated[str, OneOf(TASKS)] = "reverse"
    """For digits: largest | copy | reverse | sort | sum (of two numbers, with a calculator) | walk (a game;
    docs/rollouts.md).
    """
    min_digits: Positive = 2
    """Minimum number of digits of a prompt."""
    max_digits: int = 5
    """Maximum number of digits of a prompt."""
    fill: bool = False
    """Put ``.`` behind shorter numbers, so that all prompts are of one length (``48...=``)."""
    count: NotNegative = 2048
    """Prompts; for gsm8k the first so many, 0 = all."""
    seed: int = 0
    """Seed of the digits and of the weights."""
    model: JsonObject = field(default_factory=dict)
    """Values of the model's ``config.json`` that differ from a Qwen3 of 2 layers of width 64: ``{hidden_size: 32}``."""

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits: want <= max_digits, got {self.min_digits} > {self.max_digits}")
        if self.count == 0 and self.kind == "digits":
            raise ValueError(f"count: want > 0 (for gsm8k also 0 = all), got {self.count}")
        for name, value in self.model.items():
            if name not in MODEL:
                raise ValueError(f"model: want some of {', '.join(MODEL)}, got {name!r}")
            if type(value) not in (type(MODEL[name]), int) or (value is not False and value <= 0):
                raise ValueError(f"model.{name}: want a value such as {MODEL[name]}, got {value!r}")
        heads, kv_heads, head_dim = (
            self.values[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        if heads % kv_heads:
            raise ValueError(f"model.num_key_value_heads: want a divisor of {heads} attention heads, got {kv_heads}")
        if head_dim % 2:
            raise ValueError(f"model.head_dim: want an even number (rotary embedding), got {head_dim}")
        smallest, size = SMALLEST_VOCABULARY[self.kind], self.values["vocab_size"]
        if size < smallest or (self.kind == "digits" and size > LARGEST_VOCABULARY):
            largest = f" and <= {LARGEST_VOCABULARY} (one token a printable character)" if self.kind == "digits" else ""
            raise ValueError(f"model.vocab_size: want >= {smallest}{largest} for kind {self.kind}, got {size}")

    @property
    def values(self) -> JsonObject:
        """The fields of the ``config.json`` that depend on the settings."""
        by_task = {"sum": 17, "walk": 18}  # tasks that need further characters: ``+``, and ``+-``
        vocab_size = 512 if self.kind == "gsm8k" else by_task.get(self.task, 16)
        return {**MODEL, "vocab_size": vocab_size} | {name: type(MODEL[name])(self.model[name]) for name in self.model}

    def recorded(self) -> JsonObject:
        """Return the settings as digests of runs and records of prepared files have them."""
        settings = dataclasses.asdict(self) | {name: self.values[in_model] for name, in_model in RECORDED.items()}
        del settings["model"]
        return {**settings, "split": "train", "vocab_size": self.model.get("vocab_size", 0)}
