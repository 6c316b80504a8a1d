"""The vocabulary that openai-harmony reads, made from a tokenizer.json. ``tests/env/test_real_tokenizers.py`` has that
of gpt-oss.
"""

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.refusals import refusal
from tidemill.actors.text import rendering
from tidemill.actors.text.rendering import NAME, VARIABLE, HarmonyVocabulary


def write_tokenizer(directory: Path) -> Tokenizer:
    """Write a byte-level BPE, trained on texts with every byte, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["low lower lowest, newer and newest \u00fc\u00fc \U0001f30a \t\n"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def expected(tokenizer: Tokenizer) -> bytes:
    """Return a line for each token: its bytes in base64, its id; the bytes by the table of transformers."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    return b"".join(
        base64.b64encode(bytes(byte_of[one] for one in token)) + f" {number}\n".encode() for token, number in tokens
    )


def test_it_is_the_tokens_bytes_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = expected(write_tokenizer(tmp_path))
    assert content.count(b"\n") > 256, "it has merged tokens"
    monkeypatch.setattr(rendering, "SHA_256", hashlib.sha256(content).hexdigest())
    vocabulary = HarmonyVocabulary(tmp_path / "tokenizer.json")
    monkeypatch.delenv(VARIABLE, raising=False)
    with vocabulary.provided():
        directory = Path(os.environ[VARIABLE])
        assert [file.name for file in directory.iterdir()] == [NAME]
        assert (directory / NAME).read_bytes() == content
    assert VARIABLE not in os.environ and not directory.exists()
    monkeypatch.setenv(VARIABLE, "/mine")
    with vocabulary.provided():
        assert os.environ[VARIABLE] != "/mine"
    assert os.environ[VARIABLE] == "/mine"


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with refusal(ValueError, place=re.compile(r"tokenizer\.json$")):
        HarmonyVocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "content", [{}, [], {"model": {}}, {"model": {"vocab": []}}, {"model": {"vocab": {"\u4e2d": 1}}}, {"model": None}]
)
def test_what_is_no_byte_level_bpe_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with refusal(ValueError, place=str(tmp_path / "tokenizer.json")):
        HarmonyVocabulary(tmp_path / "tokenizer.json")
