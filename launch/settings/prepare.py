"""``prepare``: a small model with random weights and a prompt file (the digits game, or the shipped GSM8K), made once
before a run; their settings, and the record of the settings that they were made with.
"""

import dataclasses
import hashlib
import json
import logging
import random
import shutil
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from tidemill.bus.errors import DetailedError
from tidemill.bus.section import NotNegative, OneOf, Positive, section
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.launch.settings.run_paths import DATA

logger = logging.getLogger(__name__)

TASKS = ("largest", "copy", "reverse", "sort", "sum", "walk")
# Two special tokens and the ten digits and `=`; two special tokens and all bytes.
SMALLEST_VOCABULARY = {"digits": 13, "gsm8k": 258}
LARGEST_VOCABULARY = 97  # Tokens of the character tokenizer, for the kind `digits`
# Default model, by names of `config.json`; `vocab_size` depends on kind and task.
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
# Names of the same values in records and digests.
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


# ---- prompts

# Text before the answer in a line of GSM8K.
GOLD_MARKER = "####"
FILLER = "."  # Character that fills up short prompts of the digits game (`prepare.fill`)


def prompts(config: PrepareConfig) -> Iterator[dict[str, str]]:
    """Return the prompts that ``config`` describes, the same ones every time."""
    if config.kind == "gsm8k":
        return islice(gsm8k_prompts(DATA / "gsm8k/train.jsonl"), config.count or None)
    return digits_prompts(config)


def digits_prompts(config: PrepareConfig) -> Iterator[dict[str, str]]:
    """Yield prompts such as ``482=`` with their label: the largest digit of 482, itself, its reverse, or its digits in
    order.

    For the task ``sum``: ``12+7=`` with the label ``19``. For ``walk``: ``3.7=`` with the label ``7``.
    """
    rng = random.Random(config.seed)
    if config.task == "sum":
        yield from sum_prompts(config, rng)
        return
    if config.task == "walk":
        yield from walk_prompts(config, rng)
        return
    for _ in range(config.count):
        length = rng.randint(config.min_digits, config.max_digits)
        digits = "".join(rng.choice("0123456789") for _ in range(length))
        filler = FILLER * (config.max_digits - length) if config.fill else ""
        yield {"prompt": f"{digits}{filler}=", "label": solve(config.task, digits)}


def sum_prompts(config: PrepareConfig, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield sums of two numbers without leading zeros."""
    for _ in range(config.count):
        lengths = [rng.randint(config.min_digits, config.max_digits) for _ in range(2)]
        first, second = (rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1) for length in lengths)
        filler = FILLER * (2 * config.max_digits + 1 - len(f"{first}+{second}")) if config.fill else ""
        yield {"prompt": f"{first}+{second}{filler}=", "label": str(first + second)}


def walk_prompts(config: PrepareConfig, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield ways from one digit to another (``actors/episodes/programs/walk.py``)."""
    for _ in range(config.count):
        at, goal = rng.sample("0123456789", 2)
        yield {"prompt": f"{at}.{goal}=", "label": goal}


def solve(task: str, digits: str) -> str:
    """Return the right response to a prompt of the digits game. Raises ValueError for an unknown task."""
    match task:
        case "largest":
            return max(digits)
        case "copy":
            return digits
        case "reverse":
            return digits[::-1]
        case "sort":
            return "".join(sorted(digits))
    raise ValueError(f"task: want largest, copy, reverse or sort, got {task!r}")


def gsm8k_prompts(path: Path) -> Iterator[dict[str, str]]:
    """Yield each GSM8K question with its label, the number after ``####``. Raises ValueError without one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            _, marker, gold = row["answer"].rpartition(GOLD_MARKER)
            if not marker or not gold.strip():
                want = f"text that ends in '{GOLD_MARKER} number'"
                raise ValueError(f"{path}:{number}: answer: want {want}, got {row['answer']!r}")
            yield {"prompt": row["question"], "label": gold.strip()}


def gsm8k_texts() -> Iterator[str]:
    """Yield questions and worked answers unchanged, to train a tokenizer on."""
    with (DATA / "gsm8k/train.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["question"]
            yield row["answer"]


def write_prompts(path: Path, rows: Iterable[dict[str, str]]) -> int:
    """Write prompts to a JSONL file and return their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


# ---- model and record

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1

# Tokens of the character tokenizer in the order of their ids (from 2); a smaller vocabulary has only the first ones.
CHARACTERS = "".join(dict.fromkeys("0123456789= ,.+-*/<>()" + string.ascii_letters + string.punctuation))


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
    from transformers.utils.logging import disable_progress_bar

    values = {**config.values, "vocab_size": vocab_size}
    shape = Qwen3Config(**values, bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape)
    disable_progress_bar()  # of a single file
    model.save_pretrained(directory)


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
    # The record comes first: files that a kill left are known to be of this program, and are made again.
    _write_record(directory, settings, complete=False)
    shutil.rmtree(prepared.model, ignore_errors=True)
    count = write_prompts(prepared.prompts, prompts(config))
    logger.info("prompts written file=%s count=%d", prepared.prompts, count)
    make_model(prepared.model, config)
    logger.info("model written directory=%s", prepared.model)
    _write_record(directory, settings, complete=True)
    return prepared


def refuse_other(config: PrepareConfig, directory: Path) -> bool:
    """Return whether the files of ``config`` exist already. Raises PreparedOtherwise for any others."""
    prepared, settings = Prepared.in_(directory), config.recorded()
    record = _read_record(directory)
    if record is None and (prepared.model.exists() or prepared.prompts.exists()):
        reason = f"has a model or prompts but no {RECORD}: they were not made by this program"
        raise PreparedOtherwise(directory, reason)
    if record is not None and record["config"] != settings:
        raise PreparedOtherwise(directory, f"was made from another config: {_differences(record['config'], settings)}")
    return record is not None and bool(record["complete"])


def digest(config: Mapping[str, object]) -> str:
    """Return the SHA-256 of a config, the same for the same values in any order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _read_record(directory: Path) -> JsonObject | None:
    path = directory / RECORD
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["digest"] != digest(record["config"]):
        raise PreparedOtherwise(directory, f"{RECORD} was changed by hand")
    return dict(record)


def _write_record(directory: Path, config: Mapping[str, object], *, complete: bool) -> None:
    record = {"digest": digest(config), "complete": complete, "config": config}
    write_whole(directory / RECORD, json.dumps(record, indent=2) + "\n")


def _differences(recorded: Mapping[str, object], settings: Mapping[str, object]) -> str:
    names = [name for name in sorted({*recorded, *settings}) if recorded.get(name) != settings.get(name)]
    return ", ".join(f"{name}: there {recorded.get(name)!r}, wanted {settings.get(name)!r}" for name in names)
