"""The vocabulary of gpt-oss for openai-harmony, which the library ``renderers`` encodes that family's chats with."""

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "o200k_base.tiktoken"
"""Name of the file that openai-harmony loads: a line for each token, its bytes in base64 and its id."""
SHA_256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Digest of that file, without which openai-harmony refuses it. Source: openai-harmony 0.0.8, src/tiktoken_ext/public_encodings.rs."""
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable with the directory of the file. Without it openai-harmony downloads the file."""


class HarmonyVocabulary:
    """The vocabulary of a gpt-oss model."""

    def __init__(self, tokenizer: Path) -> None:
        """``tokenizer``: a model's tokenizer.json. Raises OSError, or ValueError where it is of another model."""
        want = f"{tokenizer}: want the vocabulary of gpt-oss"
        try:
            vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"].items()
            of_character = {character: byte for byte, character in enumerate(_characters())}
            pieces = sorted((int(rank), bytes(of_character[character] for character in token)) for token, rank in vocabulary)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{want}, got one that is no byte-level BPE: {error!r}") from None
        self._content = b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in pieces)
        if hashlib.sha256(self._content).hexdigest() != SHA_256:
            raise ValueError(f"{want}, got another one, of {len(pieces)} tokens")

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let openai-harmony find the vocabulary inside, and nothing to download."""
        before = os.environ.get(VARIABLE)
        with tempfile.TemporaryDirectory(prefix="tidemill-harmony-") as directory:
            (Path(directory) / NAME).write_bytes(self._content)
            os.environ[VARIABLE] = directory
            try:
                yield
            finally:
                if before is None:
                    del os.environ[VARIABLE]
                else:
                    os.environ[VARIABLE] = before


def _characters() -> list[str]:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255.

    A byte that is a visible character in Latin-1 is that character; the others are, in their order, the characters from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
