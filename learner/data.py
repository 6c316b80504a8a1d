"""Settings of the section ``data``: files and columns of prompts, templates, the curriculum and filters."""

import difflib
import json
import re
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.section import (
    BASIC,
    NotNegative,
    OneOf,
    Positive,
    PositiveFloat,
    Share,
    ShortNamed,
    refusal,
    section,
    short,
)
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.task_settings import OF_TEMPLATE
from tidemill.learner.errors import PromptError

SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\]")
BOUND = re.compile(r"\s*(-?\d{1,18})?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows of one file or directory, with the settings of ``data`` for them."""

    path: Path
    start: int | None = None
    """First row of the slice, as in Python; None = from the beginning."""
    stop: int | None = None
    """Row behind the slice, as in Python; None = to the end."""
    weight: float = 1.0
    keys: tuple[str, str, str] = ("prompt", "label", "")
    """Columns of prompt, label and metadata (``formats.value_at``); an empty label or metadata key is not read."""
    template: str = ""
    system_prompt: str = ""
    reward: str = ""
    reward_key: str = ""
    sampling_key: str = ""
    tools_key: str = ""
    rollout: str = ""
    rollout_key: str = ""
    responses_key: str = ""

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


BUILT_IN = ("equal_rewards", "gibberish", "length", "mean_reward", "repetition", "truncated")
"""Names of the filters that ship (``learner/filters.py``)."""
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _known(use: str) -> str:
    if use in BUILT_IN or _PATH.fullmatch(use):
        return use
    near = difflib.get_close_matches(use, BUILT_IN, n=1)
    hint = f" (nearest: {near[0]!r})" if near else ""
    raise refusal(f"{', '.join(BUILT_IN)}, or an import path module:function{hint}")


@section
@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """One filter, an entry of ``data.filters``."""

    name: SkipJsonSchema[str] = field(default="", init=False)
    use: Annotated[str, AfterValidator(_known)]
    """Name of a built-in filter, or import path ``module:function``."""
    options: JsonObject = field(default_factory=dict)
    """Passed to every call."""
    scope: Literal["group", "buffer"] = "group"
    """``group``: called with each complete group; ``buffer``: with all of them, before a step is planned."""
    count_only: bool = False
    """True: decisions are counted and have no effect."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one call of a filter by import path; the group is dropped after it."""
    workers: Annotated[int, Field(ge=1, le=256)] = 4
    """Child processes of a filter by import path, each with one call at a time."""

    def __post_init__(self) -> None:
        if self.scope == "buffer" and self.use in BUILT_IN:
            raise ValueError(f"scope: want group with the filter {self.use}, which decides on one group, got buffer")


Filters = ShortNamed[Annotated[FilterConfig, short("use", FilterConfig)]]
"""The filters by name, in their order; a text alone is ``use``. Names are parts of reasons and metrics."""


def identity_of(filters: Iterable[FilterConfig]) -> str:
    """Return what the content of a step depends on, as JSON; empty without filters, ``[]`` where they only count."""
    filters = list(filters)
    deciding = [
        [config.name, config.use, config.options, *(["buffer"] if config.scope == "buffer" else [])]
        for config in filters
        if not config.count_only
    ]
    return json.dumps(deciding, sort_keys=True, default=str) if filters else ""


SKIP, REFUSE = "skip", "refuse"
POLICIES = (SKIP, REFUSE)
"""Treatments of rows that cannot be used (``DataConfig.bad_rows``)."""
MAX_STOPS = 16
"""Maximum number of strings, and of tokens, at which a response ends."""
MAX_LETTERS = 200
"""Maximum length of a reward's name, and of these strings."""


def _stops(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > MAX_STOPS or not all(0 < len(text) <= MAX_LETTERS for text in texts):
        raise refusal(f"at most {MAX_STOPS} strings of 1 to {MAX_LETTERS} letters")
    return texts


Stops = Annotated[tuple[str, ...], Strict(False), AfterValidator(_stops)]
"""Strings at which a response ends, as many and as long as engines take."""
StopTokens = Annotated[tuple[NotNegative, ...], Strict(False), Field(max_length=MAX_STOPS)]


@section
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    path: Annotated[str, BASIC] = ""
    """A .jsonl or .parquet file, a directory of ``datasets`` (save_to_disk), ``org/name/CONFIG/SPLIT`` on the Hub, or
    ``python:module:function``, which returns rows; ``path@[a:b]`` = its rows a to b - 1 (docs/data.md).
    """
    sources: ShortNamed[SourceConfig] = field(default_factory=ShortNamed)
    """Several sources by name, instead of ``path``: path, weight, and keys that differ from those here."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages. Dots lead into maps, unless a column has that very name."""
    label_key: Annotated[str, BASIC] = "label"
    """Column with the value that the reward compares with (``reward_model.ground_truth``); empty = none."""
    metadata_key: str = ""
    """Column with a map that travels with the sample and reaches the reward; empty = none."""
    reward: str = ""
    """Name of the reward of all rows that name none: ``when: {reward: NAME}`` of ``actor.reward_parts`` refers to it.
    """
    reward_key: str = ""
    """Column with the name of a row's reward, or null; empty = none."""
    sampling_key: str = ""
    """Column with a row's temperature, max_new_tokens (at most the run's), stop, stop_token_ids; empty = none."""
    tools_key: str = ""
    """Column with a row's tools (a list, or JSON text of one), or null: the chat template renders them. Empty = none.
    """
    rollout: str = ""
    """Entry of ``rollouts`` for rows that name none; empty or single_turn = single turns."""
    rollout_key: str = ""
    """Column with the name of a row's rollout, single_turn, or null; empty = none."""
    responses_key: str = ""
    """Column with the recorded responses of a row, for a rollout with ``use: dataset`` (docs/sft.md); empty = the
    prompt column has chat messages, and those of the assistant are the response.
    """
    apply_chat_template: Annotated[bool, BASIC] = False
    """Turn chat messages (or text, as one user message) into text with the tokenizer's template."""
    template: str = ""
    """Text with ``{prompt}`` put around every text prompt; empty = as it is."""
    system_prompt: str = ""
    """System message before prompts that begin with none; makes chat messages of text prompts. Empty = none."""
    chat_template_args: JsonObject = field(default_factory=dict)
    """Further variables of the tokenizer's chat template, such as ``{enable_thinking: false}``."""
    bad_rows: Annotated[str, OneOf(POLICIES)] = SKIP
    """Rows that cannot be used (unreadable, a column missing, rejected by the chat template, too long): ``skip`` =
    leave them out, counted and named; ``refuse`` = end with the first one, before the run begins. If no row can be
    used, the run ends with both.
    """
    max_prompt_tokens: NotNegative = 0
    """Longer prompts are bad rows; 0 = the model's context less max_new_tokens."""
    shuffle: bool = True
    """Shuffle the prompts anew for each pass; false = the order of the file."""
    skip_easy: Share = 0.0
    """Leave a prompt out of the next passes when this share of its samples or more passed; 0 = never (docs/data.md)."""
    skip_hard: Annotated[float, Field(lt=1)] = -1.0
    """Leave a prompt out of the next passes when this share of its samples or fewer passed; negative = never."""
    skip_passes: Positive = 3
    """Passes for which such a prompt is left out; then it is asked again."""
    passes_at: float = 1.0
    """A sample passes with at least this score, for ``skip_easy`` and ``skip_hard``."""
    seed: int = 0
    """Seed of the order of prompts; derived from ``seed`` of the run."""

    filters: Filters = field(default_factory=Filters)
    """Functions that drop groups, mask samples or order them: ``{NAME: {use, options, ...}}`` (docs/filters.md)."""

    def __post_init__(self) -> None:
        if self.path and self.sources:
            got = f"both (path: {self.path!r}); remove one, or prepare, which sets path"
            raise ValueError(f"sources: want either this or path, got {got}")
        if reserved := OF_TEMPLATE & self.chat_template_args.keys():
            got = f"{sorted(reserved)}, which the program sets"
            raise ValueError(f"chat_template_args: want variables of the model's template, got {got}")
        for source in self.chosen:
            Source.at(source.path)
        if self.skip_easy and self.skip_hard >= self.skip_easy:
            raise ValueError(f"skip_hard: want < skip_easy = {self.skip_easy!r}, got {self.skip_hard!r}")

    @property
    def chosen(self) -> tuple[SourceConfig, ...]:
        """The entries of ``sources``, or ``path`` as the only one; empty without either."""
        return tuple(self.sources.values()) or ((SourceConfig(path=self.path),) if self.path else ())

    @property
    def used(self) -> list[Source]:
        """The sources, each with its own settings or the settings of this section. Raises ValueError."""
        return [self._source(source) for source in self.chosen]

    @property
    def names_rewards(self) -> bool:
        """True if rows or sources may name a reward."""
        return any(source.reward or source.reward_key for source in self.used)

    def rollouts(self, configured: Collection[str]) -> set[str]:
        """Return the rollouts that rows may have; where a column names them, all that are ``configured``."""
        named = {rollout_named(name) for name in (self.rollout, *(source.rollout for source in self.used))}
        columns = self.rollout_key or any(source.rollout_key for source in self.used)
        return (named | set(configured) if columns else named) - {""}

    @property
    def single_turns(self) -> bool:
        """True if rows may be answered by one call, without a program."""
        names = [source.rollout for source in self.used] or [self.rollout]
        return not all(map(rollout_named, names)) or any(source.rollout_key for source in self.used)

    @property
    def limits_rows(self) -> bool:
        """True if rows may have settings of sampling of their own."""
        return any(source.sampling_key for source in self.used)

    def _source(self, source: SourceConfig) -> Source:
        def setting_of(name: str) -> str:
            value: str | None = getattr(source, name)
            return str(getattr(self, name)) if value is None else value

        keys = (setting_of("prompt_key"), setting_of("label_key"), setting_of("metadata_key"))
        names = ["template", "system_prompt", "reward", "reward_key", "sampling_key", "tools_key"]
        names += ["rollout", "rollout_key", "responses_key"]
        return Source.at(source.path, weight=source.weight, keys=keys, **{name: setting_of(name) for name in names})
