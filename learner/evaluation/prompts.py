"""The held-out prompts of an evaluation, as tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidemill.bus.wire.episode_limits import Budget
from tidemill.bus.wire.messages import Kind, Sampling, Task
from tidemill.learner.errors import PromptError
from tidemill.learner.evaluation.rounds import MARK, Place, Rounds, SetSize
from tidemill.learner.prompts.bad_rows import all_bad
from tidemill.learner.prompts.prompt_file import PromptFile, sampler_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompts:
    """One set: its prompts, in the order of the file, and how responses are sampled."""

    name: str
    prompts: PromptFile
    sampling: Sampling
    samples: int
    passes_at: float
    limit: int = 0
    """Only the first rows; 0 = all."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Limits of episodes, by rollout."""

    def size(self) -> SetSize:
        """Return the facts that a round needs. Tokenizes every prompt. Raises PromptError when none can be used."""
        number = min(self.limit or len(self.prompts), len(self.prompts))
        rows = tuple(self._usable(number))
        identity = f"{self.prompts.digest} {self.sampling} {self.samples} {self.passes_at}"
        if used := {name: self.budgets[name] for name in sorted({self.prompts.row(row).rollout for row in rows} - {""})}:
            identity += f" {used}"
            if self.prompts.chat_template_args:
                identity += f" {self.prompts.chat_template_args}"
        return SetSize(name=self.name, rows=rows, samples=self.samples, passes_at=self.passes_at, identity=identity)

    def _usable(self, number: int) -> list[int]:
        """Return the usable rows among the first ``number``. Raises PromptError if there is none."""
        usable: list[int] = []
        errors: list[PromptError] = []
        for row in range(number):
            try:
                self.prompts.at(0, row)
            except PromptError as error:
                self.prompts.bad_rows.add(row, error)
                errors.append(error)
            else:
                usable.append(row)
        if not usable:
            raise all_bad(errors[0], f"evaluation set {self.name!r}", number)
        return usable

    def task(self, place: Place, rounds: Rounds, *, run: str, epoch: int, seed: int, step: int) -> Task:
        """Return the task of one prompt. Its sampler seed depends on ``seed`` and the row alone: it is the same for all versions."""
        drawn = self.prompts.at(0, place.row)
        return Task(
            run=run,
            epoch=epoch,
            kind=Kind.EVAL,
            prompt=drawn.row.prompt,
            prompt_tokens=drawn.tokens,
            label=drawn.row.label,
            metadata={**drawn.row.metadata, MARK: rounds.mark(place)},
            group_size=self.samples,
            sampling=replace(  # a set has one temperature, also where its file is the file of training
                drawn.row.sampling.of(self.sampling), temperature=self.sampling.temperature, seed=sampler_seed(seed, 0, place.row, 0)
            ),
            prompt_epoch=0,
            offset=place.row,
            min_version=place.version,
            issue_step=step,
            rollout=drawn.row.rollout,
            budget=self.budgets.get(drawn.row.rollout),
            chat_template_args=dict(drawn.chat_template_args) or None,
        )
