"""A model directory, prompts and a configuration that pass every check, for tests that break one place. Loads no
torch.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tidemill.actors.serving.builtin.shape import ModelShape

VALUES: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WORDS = (
    "<pad>",
    "<eos>",
    "<unk>",
    *["what", "is", "plus", "minus", "the", "answer", "of", "and", "one", "two", "three", "four", "five"],
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
"""Events of the interpreter that start a process."""
_started: list[str] = []
_hooked: list[bool] = []


def write_model(directory: Path, *, chat_template: bool = True, **changes: Any) -> Path:
    """Write config.json, weights of zeros, and a tokenizer of words."""
    directory.mkdir(parents=True, exist_ok=True)
    values = VALUES | changes
    (directory / "config.json").write_text(json.dumps(values))
    shapes = ModelShape.of(values, where="test").tensors()
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<eos>"} | ({"chat_template": TEMPLATE} if chat_template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_prompts(file: Path, *rows: Any) -> Path:
    rows = rows or tuple({"prompt": "what is one plus two", "label": str(number)} for number in range(20))
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def write_run(directory: Path) -> Path:
    """Write ``run.yaml`` with ``model/`` and ``prompts.jsonl`` beside it."""
    settings = {
        "directory": str(directory / "run"),
        "model": {"path": str(write_model(directory / "model"))},
        "data": {"path": str(write_prompts(directory / "prompts.jsonl"))},
        "sampling": {"max_new_tokens": 16},
        "actor": {"reward": "exact"},
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


@contextmanager
def processes_started() -> Iterator[list[str]]:
    """Record the processes that this one starts while entered, as the interpreter itself reports them."""
    if not _hooked:
        sys.addaudithook(lambda event, _: _started.append(event) if event in STARTS else None)
        _hooked.append(True)
    _started.clear()
    yield _started
