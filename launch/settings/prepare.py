"""Makes the files that a run needs before it starts, once: ``model/`` and ``prompts.jsonl``, with a record of their
settings.
"""

import hashlib
import json
import logging
import shutil
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus.errors import DetailedError
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings.datasets import gsm8k_texts, prompts, write_prompts
from tidemill.launch.settings.prepare_config import PrepareConfig

logger = logging.getLogger(__name__)

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1

CHARACTERS = "".join(dict.fromkeys("0123456789= ,.+-*/<>()" + string.ascii_letters + string.punctuation))
"""Tokens of the character tokenizer in the order of their ids (from 2); a smaller vocabulary has only the first ones.
"""


def make_model(directory: Path, config: PrepareConfig) -> None:
    """Write weights, configuration and tokenizer to ``directory``; the same bytes for the same config."""
    if config.kind == "gsm8k":
        tokenizer = bpe_tokenizer(gsm8k_texts(), config.values["vocab_size"])
    else:
        tokenizer = character_tokenizer(config.values["vocab_size"])
    directory.mkdir(parents=True)
    _save_weights(directory, config, len(tokenizer))
    tokenizer.model_max_length = config.values["max_position_embeddings"]
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
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer)


def _fast(tokenizer: object) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _save_weights(directory: Path, config: PrepareConfig, vocab_size: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    values = {**config.values, "vocab_size": vocab_size}
    shape = Qwen3Config(**values, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape)
    model.save_pretrained(directory, safe_serialization=True)


RECORD = "prepared.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Paths of the files."""

    model: Path
    prompts: Path

    @classmethod
    def in_(cls, directory: Path) -> "Prepared":
        """Return the paths of the files in ``directory``, whether they exist or not."""
        return cls(model=directory / "model", prompts=directory / "prompts.jsonl")


class PreparedOtherwise(DetailedError, ValueError):
    """The directory holds files made from another config, or files of unknown origin."""

    directory: Path
    reason: str
    template = "{directory}: {reason}; remove the directory, or choose another one"


def prepare(config: PrepareConfig, directory: Path) -> Prepared:
    """Make ``model/`` and ``prompts.jsonl``, unless they exist; return their paths. Raises PreparedOtherwise."""
    prepared, settings = Prepared.in_(directory), config.recorded()
    if refuse_other(config, directory):
        return prepared
    directory.mkdir(parents=True, exist_ok=True)
    _write_record(directory, settings, complete=False)
    _make(config, prepared)
    _write_record(directory, settings, complete=True)
    return prepared


def refuse_other(config: PrepareConfig, directory: Path) -> bool:
    """Return whether the files of ``config`` exist already. Raises PreparedOtherwise for any others."""
    prepared, settings = Prepared.in_(directory), config.recorded()
    record = _read_record(directory)
    if record is None and (prepared.model.exists() or prepared.prompts.exists()):
        raise PreparedOtherwise(
            directory, f"has a model or prompts but no {RECORD}: they were not made by this program"
        )
    if record is not None and record["config"] != settings:
        raise PreparedOtherwise(directory, f"was made from another config: {_differences(record['config'], settings)}")
    return record is not None and bool(record["complete"])


def digest(config: Mapping[str, object]) -> str:
    """Return the SHA-256 of a config, the same for the same values in any order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _make(config: PrepareConfig, prepared: Prepared) -> None:

    shutil.rmtree(prepared.model, ignore_errors=True)
    count = write_prompts(prepared.prompts, prompts(config))
    logger.info("prompts written file=%s count=%d", prepared.prompts, count)
    make_model(prepared.model, config)
    logger.info("model written directory=%s", prepared.model)


def _read_record(directory: Path) -> JsonObject | None:
    path = directory / RECORD
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["digest"] != digest(record["config"]):
        raise PreparedOtherwise(directory, f"{RECORD} was changed by hand")
    return dict(record)


def _write_record(directory: Path, config: Mapping[str, object], *, complete: bool) -> None:
    write_whole(
        directory / RECORD,
        json.dumps({"digest": digest(config), "complete": complete, "config": config}, indent=2) + "\n",
    )


def _differences(recorded: Mapping[str, object], settings: Mapping[str, object]) -> str:
    names = sorted({*recorded, *settings})
    return ", ".join(
        f"{n}: there {recorded.get(n)!r}, wanted {settings.get(n)!r}"
        for n in names
        if recorded.get(n) != settings.get(n)
    )
