"""Settings of the files a run needs before it starts: a prompt file and a small model with random weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tidemill.bus.section import NotNegative, OneOf, Positive, PositiveFloat, section

TASKS = ("largest", "copy", "reverse", "sort", "sum", "walk")
SMALLEST_VOCABULARY = {"digits": 13, "gsm8k": 258}
"""Two special tokens and the ten digits and ``=``; two special tokens and all bytes."""


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
    split: Literal["train", "test"] = "train"
    """For gsm8k: train (7473 questions) | test (1319)."""
    seed: int = 0
    """Seed of the digits and of the weights."""
    layers: Positive = 2
    """Transformer layers."""
    hidden: Positive = 64
    """Width of the residual stream."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: Positive = 2
    """Key/value heads; a divisor of ``heads``."""
    head_dim: Positive = 16
    """Width of one attention head."""
    intermediate: Positive = 128
    """Width of the MLP."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary embedding."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the random weights."""
    tie_embeddings: bool = False
    """Output layer = embedding."""
    vocab_size: NotNegative = 0
    """Tokens; 0 = 16 for digits (17 with ``+`` for sum, 18 with ``+-`` for walk), 512 for gsm8k."""
    max_position: Positive = 512
    """Tokens of prompt + response."""

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits: want <= max_digits, got {self.min_digits} > {self.max_digits}")
        if self.count == 0 and self.kind == "digits":
            raise ValueError(f"count: want > 0 (for gsm8k also 0 = all), got {self.count}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: want a divisor of heads = {self.heads}, got {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: want an even number (rotary embedding), got {self.head_dim}")
        smallest = SMALLEST_VOCABULARY[self.kind]
        if self.vocab_size and self.vocab_size < smallest:
            raise ValueError(f"vocab_size: want 0 or >= {smallest} for kind {self.kind}, got {self.vocab_size}")
        if self.kind == "digits" and self.vocab_size > 97:
            raise ValueError(
                f"vocab_size: want <= 97 for kind digits (one token a printable character), got {self.vocab_size}"
            )
