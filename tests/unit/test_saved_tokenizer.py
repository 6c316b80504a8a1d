"""The tokenizer of a directory is the same, whether transformers 4 or 5 has written it."""

import logging
from pathlib import Path

import pytest

from tests.tiny_models import with_tokenizer_of_5, write_tiny_model
from tidemill.actors.text.text import Text
from tidemill.learner.prompts.tokenizer import model_tokenizer, saved_tokenizer

TEXT = "What is three plus four? <|im_start|> seven<|im_end|>"
CHAT = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "seven"}]


def test_both_versions_directories_have_the_same_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = write_tiny_model(tmp_path / "4", "llama")
    new = with_tokenizer_of_5(old, tmp_path / "5")
    with caplog.at_level(logging.WARNING):
        first, second = (model_tokenizer(str(directory)) for directory in (old, new))
    assert not caplog.records
    for prompt in (TEXT, CHAT):
        assert list(first(prompt)) == list(second(prompt))
        assert list(first(prompt, whole=True)) == list(second(prompt, whole=True))
    read = Text.read(new)
    assert read is not None and read.encode(TEXT) == list(second(TEXT))
    assert saved_tokenizer(new).eos_token == saved_tokenizer(old).eos_token == "<|im_end|>"


def test_an_empty_directory_raises_what_transformers_does(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        saved_tokenizer(tmp_path)
