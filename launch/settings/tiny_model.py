"""A model directory in Hugging Face format with random weights, small enough to learn from nothing, and its tokenizer.

Torch, transformers and tokenizers are imported on use.
"""

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidemill.launch.settings.datasets import gsm8k_texts
from tidemill.launch.settings.prepare_config import PrepareConfig

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1

CHARACTERS = "".join(dict.fromkeys("0123456789= ,.+-*/<>()" + string.ascii_letters + string.punctuation))
"""Tokens of the character tokenizer in the order of their ids (from 2); a smaller vocabulary has only the first ones."""

VOCABULARY = {"sum": 17, "walk": 18}
"""Tokens of tasks of the digits game that need further characters: ``+``, and ``+-``."""


def make_model(directory: Path, config: PrepareConfig) -> None:
    """Write weights, configuration and tokenizer to ``directory``; the same bytes for the same config."""
    if config.kind == "gsm8k":
        tokenizer = bpe_tokenizer(gsm8k_texts(config.split), config.vocab_size or 512)
    else:
        tokenizer = character_tokenizer(config.vocab_size or VOCABULARY.get(config.task, 16))
    directory.mkdir(parents=True)
    _save_weights(directory, config, len(tokenizer))
    tokenizer.model_max_length = config.max_position
    tokenizer.save_pretrained(directory)


def character_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with one token per character; any other character raises."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: place for place, token in enumerate([PAD, EOS, *CHARACTERS][:vocab_size])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE on ``texts`` and return it; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer)


def _fast(tokenizer: object) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False)


def _save_weights(directory: Path, config: PrepareConfig, vocab_size: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rope_theta=config.rope_theta,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape)
    model.save_pretrained(directory, safe_serialization=True)
