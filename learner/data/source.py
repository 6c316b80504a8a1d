"""Settings of one source of prompts: its path, slice, weight and columns. Reads no file."""

import difflib
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tidemill.bus.config import SINGLE_TURN
from tidemill.learner.errors import PromptError

SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\]")
BOUND = re.compile(r"\s*(-?\d{1,18})?\s*")
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Names of sources: they are part of settings and messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows of one file or directory, and how often a pass has them."""

    path: Path
    start: int | None = None
    """First row of the slice, as in Python; None = from the beginning."""
    stop: int | None = None
    """Row behind the slice, as in Python; None = to the end."""
    weight: float = 1.0
    """Times that a pass has each row: 2 = every row twice, 0.5 = half of the rows, the other half in the next pass."""
    keys: tuple[str, str, str] = ("prompt", "label", "")
    """Those of prompt, label and metadata, in the form of ``formats.value_at``; an empty label or metadata key is not read."""
    template: str = ""
    system_prompt: str = ""
    reward: str = ""
    """Name of the reward of rows that name none, in their metadata; empty = none."""
    reward_key: str = ""
    """Column with that name; empty = none."""
    sampling_key: str = ""
    """Column with limits of sampling; empty = none."""
    tools_key: str = ""
    """Column with tools for the chat template; empty = none."""
    rollout: str = ""
    """Rollout of rows that name none; empty = single turns."""
    rollout_key: str = ""
    """Column with the name of a row's rollout; empty = none."""
    responses_key: str = ""
    """Column with recorded responses, for rollouts of them; empty = they are in the prompt's chat messages."""

    @classmethod
    def at(cls, path: str, **values: typing.Any) -> "Source":
        """Return the source for a path that may end with a slice, ``train.jsonl@[0:1000]``. Raises PromptError for a wrong slice."""
        found = SLICE.fullmatch(path)
        if found is None:
            return cls(path=Path(path), **values)
        bounds = [_bound(path, found[name]) for name in ("start", "stop")]
        return cls(path=Path(found["path"]), start=bounds[0], stop=bounds[1], **values)

    @property
    def plain(self) -> bool:
        """True for a whole file, as every source was before there were several."""
        return replace(self, keys=("", "", ""), template="", rollout="") == Source(path=self.path, keys=("", "", ""))

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return str(self.path)
        return f"{self.path}@[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One entry of ``data.sources``. A field that is None is as in ``data``."""

    path: str
    weight: float = 1.0
    prompt_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    reward: str | None = None
    reward_key: str | None = None
    sampling_key: str | None = None
    tools_key: str | None = None
    rollout: str | None = None
    rollout_key: str | None = None
    responses_key: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: want a file or directory of prompts, got nothing")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight: want > 0, got {self.weight!r}; remove a source that is not used")
        Source.at(self.path)


def parse_sources(sources: Mapping[str, object]) -> dict[str, SourceConfig]:
    """Return the entries of ``data.sources`` in their order. Raises ValueError that names the setting."""
    return {name: _parsed(name, values) for name, values in sources.items()}


def _parsed(name: object, values: object) -> SourceConfig:
    where = f"sources.{name}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"sources: want names of 1 to 40 of A-Z a-z 0-9 _ -, got {name!r}")
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: want a map with at least path, got {values!r}")
    known = {one.name for one in fields(SourceConfig)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ValueError(
                f"{where}.{key}: no such setting; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}")
            )
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number if key == "weight" else isinstance(value, str)):
            raise ValueError(f"{where}.{key}: want {'a number' if key == 'weight' else 'text'}, got {value!r}")
    if "path" not in values:
        raise ValueError(f"{where}.path: want a file or directory of prompts, got nothing")
    try:
        return SourceConfig(**values)
    except ValueError as bad:
        raise ValueError(f"{where}.{bad}") from None


def rollout_named(name: str) -> str:
    """Return the name of a rollout as tasks have it: empty for single turns."""
    return "" if name == SINGLE_TURN else name


def _bound(path: str, text: str) -> int | None:
    found = BOUND.fullmatch(text)
    if found is None:
        raise PromptError(path, "a slice path@[a:b] of whole numbers, either of which may be left out", f"{text!r} in it")
    return None if found[1] is None else int(found[1])
