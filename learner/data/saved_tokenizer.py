"""The tokenizer of a model directory, by transformers: of whichever of its versions has written the directory."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEW_CLASS, EXTRA = "TokenizersBackend", "extra_special_tokens"
"""The class that transformers 5 names in tokenizer_config.json, and a key under which it has a list, where version 4 wants a map."""


def saved_tokenizer(directory: Path) -> Any:
    """Return the tokenizer. Raises OSError or ValueError for a directory without one.

    Version 4 lacks the class that version 5 names. Both classes only wrap tokenizer.json, which has the tokens and the rules.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.AutoTokenizer.from_pretrained(directory)
    file = directory / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    extra = values.get(EXTRA)
    more: dict[str, Any] = {EXTRA: {}, "additional_special_tokens": extra} if isinstance(extra, list) else {}
    if values.get("tokenizer_class") != NEW_CLASS:
        return transformers.AutoTokenizer.from_pretrained(directory, **more)
    with _without_a_warning():
        return transformers.PreTrainedTokenizerFast.from_pretrained(directory, **more)


@contextmanager
def _without_a_warning() -> Iterator[None]:
    """Silence the warning that the class is another one."""
    log = logging.getLogger("transformers.tokenization_utils_base")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
