"""Settings of the evaluation beside training."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.learner.data.config import DataConfig, refuse_stops
from tidemill.learner.data.rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from tidemill.learner.data.source import SourceConfig

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Names of evaluation sets: they are part of the names of metrics."""
MOST_SAMPLES = 1024
"""Most responses to one prompt."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One held-out set of prompts. A field that is None is as in training."""

    path: str
    """A .jsonl or .parquet file."""
    samples: int = 1
    """Responses to each prompt (k of mean@k and pass@k)."""
    limit: int = 0
    """Only the first prompts of the file; 0 = all."""
    passes_at: float = 1.0
    """A response passes with a score of at least this (pass@k)."""
    temperature: float | None = None
    """Sampling temperature; 0 = greedy; None = ``sampling.temperature``."""
    top_p: float = 1.0
    """Nucleus sampling."""
    top_k: int = -1
    """Most likely tokens that are sampled from; -1 = all."""
    max_new_tokens: int | None = None
    """Longest response, in tokens; None = ``sampling.max_new_tokens``."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response; None = ``sampling.stop``."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response, besides the model's end of sequence; None = ``sampling.stop_token_ids``."""
    prompt_key: str | None = None
    """Overrides ``data.prompt_key`` for this set."""
    label_key: str | None = None
    """Overrides ``data.label_key`` for this set."""
    metadata_key: str | None = None
    """Overrides ``data.metadata_key`` for this set."""
    template: str | None = None
    """Overrides ``data.template`` for this set."""
    system_prompt: str | None = None
    """Overrides ``data.system_prompt`` for this set; empty = none."""
    chat_template_args: dict[str, typing.Any] | None = None
    """Overrides ``data.chat_template_args`` for this set."""
    reward: str | None = None
    """Overrides ``data.reward`` for this set: the name that ``when: {reward: NAME}`` of ``actor.reward_parts`` refers to."""
    reward_key: str | None = None
    """Overrides ``data.reward_key`` for this set."""
    sampling_key: str | None = None
    """Overrides ``data.sampling_key`` for this set."""
    tools_key: str | None = None
    """Overrides ``data.tools_key`` for this set."""
    rollout: str | None = None
    """Overrides ``data.rollout`` for this set; single_turn = single turns."""
    rollout_key: str | None = None
    """Overrides ``data.rollout_key`` for this set."""

    def data(self, training: DataConfig) -> DataConfig:
        """Return the settings of the set's prompts: its own, else those of the training prompts."""
        names = {one.name for one in dataclasses.fields(SourceConfig)} - {"path", "weight", "responses_key"} | {"chat_template_args"}
        own: dict[str, typing.Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(training, path=self.path, sources={}, shuffle=False, max_prompt_tokens=0, responses_key="", **own)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: want a file of prompts, got nothing")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(f"samples: want 1 to {MOST_SAMPLES}, got {self.samples}")
        if self.limit < 0:
            raise ValueError(f"limit: want >= 0, got {self.limit}")
        if self.temperature and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            raise ValueError(f"temperature: want 0, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, got {self.temperature}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples: want 1 with temperature: 0, whose responses are all the same, got {self.samples}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: want above 0 and at most 1, got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k: want -1 or >= 1, got {self.top_k}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: want >= 1, got {self.max_new_tokens}")
        refuse_stops(self.stop, self.stop_token_ids)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation beside training, on the run's own engines and actors (docs/evaluation.md)."""

    every: int = 0
    """Evaluate every version that is a multiple of this number; 0 = no evaluation."""
    at_start: bool = True
    """Evaluate version 0, the initial weights, too."""
    at_end: bool = True
    """Evaluate the last version, too; the run ends after it."""
    sets: dict[str, typing.Any] = field(default_factory=dict)
    """Held-out sets by name: a map with the file's path, and settings that differ from training (docs/evaluation.md)."""
    best: str = ""
    """SET/METRIC (``mean`` or ``pass_at_<k>``): every version that is evaluated gets a checkpoint, and that of the best is kept."""
    stop_after: int = 0
    """End the run after this number of evaluations without a better ``best``; 0 = never."""
    max_open_tasks: int = 8
    """Most evaluation prompts that are out at a time; bounds the share of the engines that evaluation takes."""
    exact: bool = False
    """No step is trained before the evaluation of a version is over, so that all its tokens are of that version; false = of version 0."""
    stall_s: float = 600.0
    """Seconds without any result after which an evaluation ends with the results it has; missing ones are counted."""
    seed: int = 0
    """Seed of the responses: the same for every version."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every: want >= 0, got {self.every}")
        if self.max_open_tasks < 1:
            raise ValueError(f"max_open_tasks: want >= 1, got {self.max_open_tasks}")
        if self.stall_s <= 0:
            raise ValueError(f"stall_s: want > 0, got {self.stall_s}")
        parsed = self.parsed
        if self.every and not parsed:
            raise ValueError("sets: want at least one held-out set with every > 0, got none")
        self._refuse_best(parsed)

    def _refuse_best(self, parsed: Mapping[str, EvalSet]) -> None:
        if self.stop_after < 0:
            raise ValueError(f"stop_after: want >= 0, got {self.stop_after}")
        if self.stop_after and not self.best:
            raise ValueError(f"stop_after: want best: SET/METRIC with it, the score that is to rise, got {self.stop_after} alone")
        if not self.best:
            return
        if not self.every:
            raise ValueError(f"best: want every > 0 with it, got {self.best!r} and no evaluation")
        name, _, metric = self.best.partition("/")
        if name not in parsed:
            raise ValueError(f"best: want SET/METRIC with a set of {', '.join(parsed)}, got {self.best!r}")
        samples = parsed[name].samples
        known = ["mean", *(f"pass_at_{k}" for k in range(1, samples + 1) if k == samples or not k & (k - 1))]
        if metric not in known:
            raise ValueError(f"best: want SET/METRIC with a metric of {', '.join(known)}, got {self.best!r}")

    @property
    def parsed(self) -> dict[str, EvalSet]:
        """The sets by name, in their order. Raises ValueError that names the setting."""
        return {name: _parsed(name, values) for name, values in self.sets.items()}


def _parsed(name: str, values: object) -> EvalSet:
    where = f"sets.{name}"
    if not NAME.fullmatch(name):
        raise ValueError(f"sets: want names of 1 to 40 of A-Z a-z 0-9 _ -, got {name!r}")
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: want a map with at least path, got {values!r}")
    fields = {one.name: one for one in dataclasses.fields(EvalSet)}
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            raise ValueError(
                f"{where}.{key}: no such setting; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}")
            )
        _refuse_kind(f"{where}.{key}", fields[key].type, value)
    if "path" not in values:
        raise ValueError(f"{where}.path: want a file of prompts, got nothing")
    try:
        given: dict[str, typing.Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return EvalSet(**given)
    except ValueError as bad:
        raise ValueError(f"{where}.{bad}") from None


def _refuse_kind(where: str, kind: object, value: object) -> None:
    """Raise ValueError for a value of the wrong type. ``kind``: the annotation of the field."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    admitted: list[type] = [typing.get_origin(one) or one for one in kinds]
    if float in admitted:
        admitted.append(int)
    admitted = [list if one is tuple else one for one in admitted]
    if isinstance(value, bool) or not isinstance(value, tuple(admitted)):
        names = {str: "text", int: "a whole number", dict: "a map", list: "a list", float: "a number", type(None): "null"}
        raise ValueError(f"{where}: want {' or '.join(names[one] for one in admitted)}, got {value!r}")
