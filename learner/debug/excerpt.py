"""A short text of one sampled sequence of a step, for the eye: the end of its prompt and the beginning of its response. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.bus.system.foreign import errors_as
from tidemill.learner.data.batch import StepBatch

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64
"""Tokens of either that are decoded."""
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 60, 120
"""Characters of either that are shown, before they are escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The text, and its probability."""

    prompt: str
    """End of the prompt."""
    response: str
    log_prob_mean: float
    """Over all sampled tokens of the sequence, as the engine reported them."""
    missing: str = ""
    """Reason why there is no text; empty = there is."""


def excerpt(batch: StepBatch, model_dir: Path) -> Excerpt | None:
    """Return the text of the first sequence with sampled tokens on this rank; None without one.

    It is decoded by ``tokenizer.json`` of the model directory. Without that there is no text, but the reason in ``missing``.
    """
    for row in batch.micro_batches:
        sampled_T = row.loss_mask_T & ~batch.demonstration_N[row.sample_T]
        for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
            if not sampled_T[start:end].any():
                continue
            mean = float(row.rollout_log_probs_T[start:end][sampled_T[start:end]].mean(dtype=np.float64))
            begin = start + int(sampled_T[start:end].argmax()) + 1  # a mask is at the token before its target
            prompt, response = row.tokens_T[max(start, begin - PROMPT_TOKENS) : begin], row.tokens_T[begin:end][:RESPONSE_TOKENS]
            try:
                texts = _decoded(model_dir, [prompt.tolist(), response.tolist()])
            except ValueError as error:
                return Excerpt(prompt="", response="", log_prob_mean=mean, missing=str(error))
            return Excerpt(prompt=texts[0][-PROMPT_CHARACTERS:], response=texts[1][:RESPONSE_CHARACTERS], log_prob_mean=mean)
    return None


def _decoded(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts, special tokens included. Raises ValueError without a tokenizer that can be read."""
    file = model_dir / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{file}: no such file")
    # The library raises plain Exception, and the file may have any content.
    with errors_as(lambda error: ValueError(f"{file}: {error}")):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return [tokenizer.decode(list(tokens), skip_special_tokens=False) for tokens in sequences]
