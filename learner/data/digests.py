"""Digest of the files of prompts and of the settings that determine their order. Knows no row."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tidemill.learner.data.formats import data_files
from tidemill.learner.data.row_functions import add_rows, is_function
from tidemill.learner.data.source import Source


def prompts_digest(sources: Sequence[Source], *, shuffle: bool, seed: int) -> str:
    """Return a digest of the files' content and of all settings that determine the order of prompts. Raises PromptError.

    That of one whole file is as in the releases that had nothing else: checkpoints have it.
    """
    files = [data_files(source.path) for source in sources]
    if len(sources) == 1 and sources[0].plain and not sources[0].path.is_dir() and len(files[0]) == 1:
        digest = hashlib.sha256(repr((sources[0].template, shuffle, seed)).encode())
        _add_content(digest, files[0][0])
        return digest.hexdigest()[:16]
    told: list[tuple[object, ...]] = [(one.template, one.system_prompt, one.start, one.stop, one.weight) for one in sources]
    own = [(one.reward, one.reward_key, one.sampling_key, one.tools_key) for one in sources]
    if any(map(any, own)):
        told += own  # only then: checkpoints of earlier releases have the digest without
    if any(one.responses_key for one in sources):
        told += [(one.responses_key,) for one in sources]
    if any(one.rollout_key for one in sources) or len({one.rollout for one in sources}) > 1:
        told += [(one.rollout, one.rollout_key) for one in sources]
    digest = hashlib.sha256(repr((told, shuffle, seed)).encode())
    for file in (file for of_source in files for file in [*of_source, None]):
        content = hashlib.sha256()
        if file is not None:
            _add_content(content, file)
        digest.update(content.digest())
    return digest.hexdigest()[:16]


def _add_content(digest: "hashlib._Hash", path: Path) -> None:
    if is_function(path):
        add_rows(digest, path)
        return
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
