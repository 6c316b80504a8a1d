"""Settings of the section ``data``: files and columns of prompts, templates, the curriculum and filters."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field, Strict

from tidemill.bus.section import BASIC, NotNegative, OneOf, Positive, Share, ShortNamed, refusal, section
from tidemill.bus.wire.episode_limits import OF_TEMPLATE
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.data.filter_settings import Filters
from tidemill.learner.data.source import Source, SourceConfig, rollout_named

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
    """Several sources by name, instead of ``path``: maps with path, weight, and keys that differ from those here
    (docs/data.md).
    """
    prompt_key: str = "prompt"
    """Column with the prompt: text, or chat messages. Dots lead into maps: ``extra_info.question``; a column of that
    very name wins.
    """
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
    """Column with a row's own temperature, max_new_tokens (at most ``sampling.max_new_tokens``), stop and
    stop_token_ids, or null; empty = none.
    """
    tools_key: str = ""
    """Column with a row's tools (a list, or JSON text of one), or null: the chat template renders them. Empty = none.
    """
    rollout: str = ""
    """Name of the rollout, an entry of ``rollouts``, that makes the samples of rows that name none; empty or
    single_turn = single turns.
    """
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
