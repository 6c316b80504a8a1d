"""Open tasks with their buffered samples, and the facts about them that the DataSource decides on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tidemill.bus.wire.messages import Task
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import SampleIndex, context_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The filters' decision on a complete group."""

    reason: str = ""
    """Reason to drop it; empty = it is trained."""
    masked: frozenset[int] = frozenset()
    """Indexes of samples that are not trained."""
    priority: float = 0.0
    """Complete groups of the highest priority are trained first."""


@dataclass(slots=True, kw_only=True)
class SampleGroup:
    """An open task and its samples so far."""

    task: Task
    touched_s: float
    """Time of its issue or of its last sample (monotonic clock)."""
    samples: dict[int, SampleIndex] = field(default_factory=dict)
    """Samples by index."""
    abandoned: str = ""
    """Reason to settle the task without training it, unless it is dead and has enough samples; empty = none."""
    verdict: Verdict | None = None
    """None = not judged, and without filters always."""
    choice: Verdict | None = None
    """The buffer filters' decision for the next step; None = none."""
    masked: frozenset[int] = frozenset()
    """Sequences of the samples that are not trained."""
    context: bytes = field(init=False)
    """Digest of the prompt's tokens, which samples of a single turn have."""
    _by_step: dict[int, int] | None = None
    _versions: set[int] | None = None

    def __post_init__(self) -> None:
        self.context = context_of(self.task.prompt_tokens)

    def add(self, sample: SampleIndex) -> None:
        """Add a sample of this task."""
        # To a group of a dead task that is trained with fewer samples one may still come: it is judged anew.
        self.samples[sample.index], self._versions, self.verdict, self.choice = sample, None, None, None
        self.mask(frozenset())

    def keep(self, seqs: Collection[int]) -> list[SampleIndex]:
        """Remove the samples that are not in ``seqs``, and return them."""
        late_samples = [sample for sample in self.samples.values() if sample.seq not in seqs]
        for sample in late_samples:
            del self.samples[sample.index]
        if late_samples:
            self._versions = self._by_step = None
        return late_samples

    def judge(self, verdict: Verdict) -> None:
        """Register the filters' decision."""
        self.verdict = verdict
        self.mask(frozenset(sample.seq for sample in self.samples.values() if sample.index in verdict.masked))

    def mask(self, seqs: frozenset[int]) -> None:
        """Leave the tokens of these samples out of training."""
        self.masked, self._by_step = seqs, None

    def is_complete(self, rules: DataRules) -> bool:
        """Return whether it has the samples with which it is trained: all, or enough samples of a dead task."""
        if self.abandoned == "dead":
            return 0 < rules.min_group_size <= len(self.samples)
        return self.full and not self.abandoned

    def is_judged(self, rules: DataRules) -> bool:
        """Return whether it is complete, and the filters of single groups have decided on it."""
        return self.is_complete(rules) and (self.verdict is not None or not rules.filters or self.demonstrations)

    def is_ready(self, rules: DataRules) -> bool:
        """Return whether the next step may take it."""
        return self.is_judged(rules) and (self.choice is not None or not rules.buffer_filters or self.demonstrations)

    @property
    def priority(self) -> float:
        """The sum of all filters."""
        return sum(verdict.priority for verdict in (self.verdict, self.choice) if verdict is not None)

    @property
    def full(self) -> bool:
        """True if every sample of the task is there."""
        return len(self.samples) == self.task.group_size

    @property
    def demonstrations(self) -> bool:
        """True if all are demonstrations, which filters do not judge: nothing is learnt from their rewards."""
        return all(sample.demonstration for sample in self.samples.values())

    @property
    def rows(self) -> list[SampleIndex]:
        """Samples in the order of their index."""
        return [self.samples[index] for index in sorted(self.samples)]

    @property
    def seqs(self) -> list[int]:
        """Sequences of the samples, in the order of their index."""
        return [sample.seq for sample in self.rows]

    @property
    def versions(self) -> set[int]:
        """Versions that made its tokens. Cached, because the feeder reads it for all groups at every wake."""
        if self._versions is None:
            self._versions = {version for sample in self.samples.values() for version, _ in sample.by_version}
        return self._versions

    @property
    def scores(self) -> set[float]:
        """Distinct scores; a single one means that a baseline within the group leaves no gradient."""
        return {sample.score for sample in self.samples.values()}

    def tokens_by_step(self, steps: Mapping[int, int]) -> dict[int, int]:
        """Return trainable tokens (> 0), without masked samples, by the step of the weights that made them (cached)."""
        if self._by_step is None:
            counts: dict[int, int] = {}
            for sample in self.samples.values():
                for version, count in sample.by_version if sample.seq not in self.masked else ():
                    if count:
                        counts[steps[version]] = counts.get(steps[version], 0) + count
            self._by_step = counts
        return self._by_step


def mismatch(task: Task, sample: SampleIndex, max_context: int, context: bytes | None = None) -> str:
    """Return the first field of a sample that contradicts its task; empty if none does.

    ``context``: digest of the task's prompt, where it is known.
    """
    if sample.group_size != task.group_size:
        return "group_size"
    if not 0 <= sample.index < task.group_size:
        return "index"
    # Other sampling means another distribution: the importance weights would be wrong without any sign of it.
    if sample.sampling != task.sampling:
        return "sampling"
    # The task, not the sample, decides whether the tokens may begin otherwise than with the task's prompt.
    if sample.rollout != task.rollout:
        return "rollout"
    if task.rollout:
        if field_name := _episode_mismatch(task, sample):
            return field_name
    elif len(sample.sizes) > 1:
        return "sequences"
    elif sample.context != (context or context_of(task.prompt_tokens)):
        return "prompt"
    return "length" if max_context and max(sample.lengths) > max_context else ""


def _episode_mismatch(task: Task, sample: SampleIndex) -> str:
    if sample.prompt != task.prompt:
        return "prompt"
    if not sample.response_length:  # there may be no token at all, and so no row to train
        return "response_length"
    if task.budget is not None and 0 < task.budget.total_tokens < sample.num_tokens:
        return "length"
    return ""
