"""Names of repositories of the Hugging Face Hub in settings that take the path of a model or of prompts:
``org/name[@REVISION]``, for prompts ``org/name[@REVISION][/CONFIG/SPLIT][@[a:b]]``. Opens no connection.

A name whose revision is a commit hash is *pinned*: that is what a run records, and what its row on the bus has. In a
process it stands for its directory in this machine's cache of the hub, if that has the commit. Source of the cache's
layout: huggingface.co/docs/huggingface_hub, "Understand caching".
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings.run_paths import texts
from tidemill.learner.data import SLICE

MODEL, DATASET = "model", "dataset"
MODEL_PATH = "model.path"
# Settings that may name a repository, and its kind.
KINDS = {
    MODEL_PATH: MODEL,
    "learner.critic.path": MODEL,
    "learner.algorithm.kl.reference": MODEL,
    "learner.lora.adapter": MODEL,
    "actor.teachers.*.model": MODEL,
    "data.path": DATASET,
    "data.sources.*.path": DATASET,
    "eval.sets.*.path": DATASET,
}
COMMIT = re.compile("[0-9a-f]{40}")
_REPO = r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)"
_FORMS = {
    MODEL: re.compile(rf"{_REPO}(?:@(?P<revision>[^@\s]+))?(?P<inside>)", re.ASCII),
    DATASET: re.compile(
        rf"{_REPO}(?:@(?P<revision>refs/(?:pr|convert)/[^/@\s]+|[^/@\s]+))?(?:/(?P<inside>[^@]+))?", re.ASCII
    ),
}
_CACHED = re.compile(r"(model|dataset)s--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?:/(.+))?")
_FILES = (".jsonl", ".parquet", ".json", ".arrow", ".gguf")  # Ends of names of files, which no repository is meant by


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name in a setting."""

    kind: str
    repo: str
    revision: str = ""  # Branch, tag, `refs/...` or commit hash; empty = the default branch
    # Of a data set: configuration and split; with a commit hash the file, directory or pattern in the repository.
    inside: str = ""
    rows: str = ""  # A slice, `@[a:b]`

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f"/{self.inside}" if self.inside else "") + self.rows

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit hash."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def storage(self) -> Path:
        """Directory of the repository in this machine's cache, which may not exist."""
        return cache() / f"{self.kind}s--{self.repo.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        """Directory of a pinned name's commit in this machine's cache, which may not exist."""
        return self.storage / "snapshots" / self.revision

    @property
    def path(self) -> str:
        """Path of a pinned name in this machine's cache, as a setting has it."""
        return f"{self.folder / self.inside}{self.rows}"


def cache() -> Path:
    """Return the directory of the hub's cache: HF_HUB_CACHE, else by the library's other variables (HF_HOME)."""
    from huggingface_hub import constants

    directory = os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE
    return Path(os.path.expandvars(os.path.expanduser(directory)))  # as the library reads its variable


def parse(kind: str, text: str) -> HubName | None:
    """Return the name that a text is; None for a path of this machine, and for what has another form."""
    sliced = SLICE.fullmatch(text) if kind == DATASET else None
    whole = sliced["path"] if sliced else text
    match = _FORMS[kind].fullmatch(whole)
    if match is None or match["repo"].endswith(_FILES) or ".." in whole.split("/"):
        return None
    parts = {part: match[part] or "" for part in ("repo", "revision", "inside")}
    name = HubName(kind=kind, **parts, rows=text[len(whole) :])
    # A file, or a path below a directory that exists here, is mistyped rather than a name.
    is_path = Path(whole).exists() or Path(name.repo.partition("/")[0]).is_dir()
    is_path |= not name.revision and name.inside.endswith(_FILES)
    return name if name.is_pinned or not is_path else None


def names_in(values: JsonObject) -> dict[str, HubName]:
    """Return the names in a configuration, by the path of their setting."""
    made = f"{values.get('directory')}/prepared/" if values.get("prepare") else None
    names = {}
    for _, _, setting, kind, text in _named_settings(values):
        name = None if made and text.startswith(made) else parse(kind, text)
        if name is not None:
            names[setting] = name
    return names


def locate(values: JsonObject) -> None:
    """Replace pinned names in a configuration by their directories, where this machine's cache has the commit."""
    for holder, key, _, kind, text in _named_settings(values):
        name = parse(kind, text)
        if name is not None and name.is_pinned and _has(name):
            holder[key] = name.path


def named(value: Any) -> Any:
    """Return a value of a configuration with pinned names in place of paths in this machine's cache."""
    if isinstance(value, str):
        return _name_of(value)
    if isinstance(value, dict):
        return {key: named(part) for key, part in value.items()}
    return type(value)(map(named, value)) if type(value) in (list, tuple) else value


def kept(name: HubName, began: HubName | None) -> HubName:
    """Return the name with the commit of the run's start, ``began``, unless that is of another repository.

    Raises ValueError for another commit.
    """
    if began is None or not began.is_pinned or (began.kind, began.repo) != (name.kind, name.repo):
        return name
    if name.is_pinned and name.revision != began.revision:
        cure = "undo this change, or start another run: set directory"
        raise ValueError(f"want {began.repo}@{began.revision}, with which the run began, got {name}; {cure}")
    return replace(name, revision=began.revision)


def _named_settings(values: JsonObject) -> Iterator[tuple[JsonObject, str, str, str, str]]:
    """Yield the map that holds a setting of ``KINDS``, its key there, its path, its kind and its text."""
    for holder, key, setting in list(texts(values, "")):
        kind = next((kind for pattern, kind in KINDS.items() if fnmatchcase(setting, pattern)), "")
        if kind:
            yield holder, key, setting, kind, holder[key]


def _has(name: HubName) -> bool:
    try:
        return name.folder.is_dir()
    except ModuleNotFoundError:  # an actor needs no library of the hub
        return False


def _name_of(text: str) -> str:
    match = _CACHED.search(text)
    if match is None or Path(text[: match.start()]) != cache():
        return text
    _, org, name, commit, inside = match.groups()
    return f"{org}/{name}@{commit}" + (f"/{inside}" if inside else "")
