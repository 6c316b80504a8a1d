"""Settings of the evaluation beside training."""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from tidemill.bus.section import NotNegative, Positive, PositiveFloat, ShortNamed, section
from tidemill.learner.buffer.rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from tidemill.learner.data import DataConfig, SourceConfig, Stops, StopTokens

MAX_SAMPLES = 1024
"""Maximum number of responses to one prompt."""


@section
@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """One held-out set of prompts. A field that is None is as in training."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl or .parquet file."""
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Responses to each prompt (k of mean@k and pass@k)."""
    limit: NotNegative = 0
    """Only the first prompts of the file; 0 = all."""
    passes_at: float = 1.0
    """A response passes with a score of at least this (pass@k)."""
    temperature: float | None = None
    """Sampling temperature; 0 = greedy; None = ``sampling.temperature``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: int = -1
    """Most likely tokens that are sampled from; -1 = all."""
    max_new_tokens: Positive | None = None
    """Longest response, in tokens; None = ``sampling.max_new_tokens``."""
    stop: Stops | None = None
    """Strings that end a response; None = ``sampling.stop``."""
    stop_token_ids: StopTokens | None = None
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
    """Overrides ``data.reward`` for this set (``when: {reward: NAME}`` of ``actor.reward_parts``)."""
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
        """Return the settings of the set's prompts: its own, else the settings of the training prompts."""
        names = {field.name for field in dataclasses.fields(SourceConfig)} - {"path", "weight", "responses_key"} | {
            "chat_template_args"
        }
        own: dict[str, typing.Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(
            training, path=self.path, sources=ShortNamed(), shuffle=False, max_prompt_tokens=0, responses_key="", **own
        )

    def __post_init__(self) -> None:
        if self.temperature and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            raise ValueError(
                f"temperature: want 0, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, got {self.temperature}"
            )
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples: want 1 with temperature: 0, whose responses are all the same, got {self.samples}"
            )
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k: want -1 or >= 1, got {self.top_k}")


@section
@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation beside training, on the run's own engines and actors (docs/evaluation.md)."""

    every: NotNegative = 0
    """Evaluate every version that is a multiple of this number; 0 = no evaluation."""
    at_start: bool = True
    """Evaluate version 0, the initial weights, too."""
    at_end: bool = True
    """Evaluate the last version, too; the run ends after it."""
    sets: ShortNamed[EvalSet] = field(default_factory=ShortNamed)
    """Held-out sets by name: a map with the file's path, and settings that differ from training (docs/evaluation.md).
    """
    best: str = ""
    """SET/METRIC (``mean`` or ``pass_at_<k>``): each evaluated version gets a checkpoint, and the best is kept."""
    stop_after: NotNegative = 0
    """End the run after this number of evaluations without a better ``best``; 0 = never."""
    max_open_tasks: Positive = 8
    """Maximum number of evaluation prompts that are out at a time; it bounds their share of the engines."""
    exact: bool = False
    """True: no step is trained while a version is evaluated, so that all its tokens are of it; false: of version 0."""
    stall_s: PositiveFloat = 600.0
    """Seconds without any result after which an evaluation ends with the results it has; missing ones are counted."""
    seed: int = 0
    """Seed of the responses: the same for every version."""

    def __post_init__(self) -> None:
        if self.every and not self.sets:
            raise ValueError("sets: want at least one held-out set with every > 0, got none")
        self._refuse_best()

    def _refuse_best(self) -> None:
        if self.stop_after and not self.best:
            raise ValueError(
                f"stop_after: want best: SET/METRIC with it, the score that is to rise, got {self.stop_after} alone"
            )
        if not self.best:
            return
        if not self.every:
            raise ValueError(f"best: want every > 0 with it, got {self.best!r} and no evaluation")
        name, _, metric = self.best.partition("/")
        if name not in self.sets:
            raise ValueError(f"best: want SET/METRIC with a set of {', '.join(self.sets)}, got {self.best!r}")
        samples = self.sets[name].samples
        known = ["mean", *(f"pass_at_{k}" for k in range(1, samples + 1) if k == samples or not k & (k - 1))]
        if metric not in known:
            raise ValueError(f"best: want SET/METRIC with a metric of {', '.join(known)}, got {self.best!r}")
