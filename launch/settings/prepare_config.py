"""Settings of the files a run needs before it starts: a prompt file and a small model with random weights."""

from dataclasses import dataclass

TASKS = ("largest", "copy", "reverse", "sort", "sum", "walk")
SMALLEST_VOCABULARY = {"digits": 13, "gsm8k": 258}
"""Two special tokens and the ten digits and ``=``; two special tokens and all bytes."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """A small model with random weights and its prompts, made before the run. The model has the shape of Qwen3."""

    kind: str = "digits"
    """digits (made up, one character a token) | gsm8k (school mathematics, shipped; byte-level BPE trained on its text)."""
    task: str = "reverse"
    """For digits: largest | copy | reverse | sort | sum (of two numbers, with a calculator) | walk (a game; docs/rollouts.md)."""
    min_digits: int = 2
    """Fewest digits of a prompt."""
    max_digits: int = 5
    """Most digits of a prompt."""
    fill: bool = False
    """Put ``.`` behind shorter numbers, so that all prompts are of one length (``48...=``)."""
    count: int = 2048
    """Prompts; for gsm8k the first so many, 0 = all."""
    split: str = "train"
    """For gsm8k: train (7473 questions) | test (1319)."""
    seed: int = 0
    """Seed of the digits and of the weights."""
    layers: int = 2
    """Transformer layers."""
    hidden: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 2
    """Key/value heads; a divisor of ``heads``."""
    head_dim: int = 16
    """Width of one attention head."""
    intermediate: int = 128
    """Width of the MLP."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights."""
    tie_embeddings: bool = False
    """Output layer = embedding."""
    vocab_size: int = 0
    """Tokens; 0 = 16 for digits (17 with ``+`` for sum, 18 with ``+-`` for walk), 512 for gsm8k."""
    max_position: int = 512
    """Tokens of prompt + response."""

    def __post_init__(self) -> None:
        if self.kind not in SMALLEST_VOCABULARY:
            raise ValueError(f"kind: want digits or gsm8k, got {self.kind!r}")
        if self.task not in TASKS:
            raise ValueError(f"task: want one of {', '.join(TASKS)}, got {self.task!r}")
        if self.split not in ("train", "test"):
            raise ValueError(f"split: want train or test, got {self.split!r}")
        if not 1 <= self.min_digits <= self.max_digits:
            raise ValueError(f"min_digits: want 1 <= min_digits <= max_digits, got {self.min_digits} and {self.max_digits}")
        if self.count < 0 or (self.count == 0 and self.kind == "digits"):
            raise ValueError(f"count: want > 0 (for gsm8k also 0 = all), got {self.count}")
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "rope_theta",
            "initializer_range",
            "max_position",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: want a divisor of heads = {self.heads}, got {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: want an even number (rotary embedding), got {self.head_dim}")
        smallest = SMALLEST_VOCABULARY[self.kind]
        if self.vocab_size and self.vocab_size < smallest:
            raise ValueError(f"vocab_size: want 0 or >= {smallest} for kind {self.kind}, got {self.vocab_size}")
        if self.kind == "digits" and self.vocab_size > 97:
            raise ValueError(f"vocab_size: want <= 97 for kind digits (one token a printable character), got {self.vocab_size}")
