"""Settings of one source of prompts: its path, slice, weight and columns. Reads no file."""

import re
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.section import PositiveFloat, section
from tidemill.learner.errors import PromptError

SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\]")
BOUND = re.compile(r"\s*(-?\d{1,18})?\s*")


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
    """Columns of prompt, label and metadata (``formats.value_at``); an empty label or metadata key is not read."""
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
        """Return the source of a path that may end with a slice, ``train.jsonl@[0:1000]``. Raises PromptError."""
        sliced = SLICE.fullmatch(path)
        if sliced is None:
            return cls(path=Path(path), **values)
        bounds = [_bound(path, sliced[name]) for name in ("start", "stop")]
        return cls(path=Path(sliced["path"]), start=bounds[0], stop=bounds[1], **values)

    @property
    def plain(self) -> bool:
        """True for a whole file, as every source was before there were several."""
        return replace(self, keys=("", "", ""), template="", rollout="") == Source(path=self.path, keys=("", "", ""))

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return str(self.path)
        return f"{self.path}@[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"


@section
@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One entry of ``data.sources``. A field that is None is as in ``data``."""

    path: Annotated[str, Field(min_length=1)]
    """File or directory of prompts, as in ``data.path``."""
    weight: PositiveFloat = 1.0
    """Times that a pass has each row: 2 = every row twice, 0.5 = half of the rows, the other half in the next pass."""
    prompt_key: str | None = None
    """Overrides ``data.prompt_key`` for this source."""
    label_key: str | None = None
    """Overrides ``data.label_key`` for this source."""
    metadata_key: str | None = None
    """Overrides ``data.metadata_key`` for this source."""
    template: str | None = None
    """Overrides ``data.template`` for this source."""
    system_prompt: str | None = None
    """Overrides ``data.system_prompt`` for this source."""
    reward: str | None = None
    """Overrides ``data.reward`` for this source."""
    reward_key: str | None = None
    """Overrides ``data.reward_key`` for this source."""
    sampling_key: str | None = None
    """Overrides ``data.sampling_key`` for this source."""
    tools_key: str | None = None
    """Overrides ``data.tools_key`` for this source."""
    rollout: str | None = None
    """Overrides ``data.rollout`` for this source."""
    rollout_key: str | None = None
    """Overrides ``data.rollout_key`` for this source."""
    responses_key: str | None = None
    """Overrides ``data.responses_key`` for this source."""

    def __post_init__(self) -> None:
        Source.at(self.path)


def rollout_named(name: str) -> str:
    """Return the name of a rollout as tasks have it: empty for single turns."""
    return "" if name == SINGLE_TURN else name


def _bound(path: str, text: str) -> int | None:
    bound = BOUND.fullmatch(text)
    if bound is None:
        raise PromptError(
            path, "a slice path@[a:b] of whole numbers, either of which may be left out", f"{text!r} in it"
        )
    return None if bound[1] is None else int(bound[1])
