"""Evaluation beside training: issues the tasks of a round, reads their samples, records the scores.

    versions --> Rounds --> TASKS (kind eval) --> actors --> SAMPLES (kind eval) --> Rounds --> PLAN: Evaluated, by set

Runs in the feeder, because only the learner writes TASKS and PLAN. It shares actors and engines with training; at most
``eval.max_open_tasks`` prompts are out. It decides nothing that is trained.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import WireError
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter
from tidemill.bus.wire.messages import Dead, Evaluated, Kind, Sample, Sampling, Task
from tidemill.bus.wire.subjects import BEST_KEY
from tidemill.bus.wire.task_settings import Budget
from tidemill.learner.buffer.groups import mismatch
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import Checkpoint
from tidemill.learner.errors import PromptError
from tidemill.learner.evaluation.config import EvalConfig
from tidemill.learner.evaluation.rounds import MARK, Place, Result, Rounds, SetSize
from tidemill.learner.evaluation.scores import BestScore, Scored
from tidemill.learner.prompts.prompt_file import PromptFile, sampler_seed
from tidemill.learner.prompts.rows import all_bad

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""Longest sleep of the loop, which is woken normally: it also notices a round that stands still."""
EARLY = 256
"""Maximum number of samples that are kept for a task that is not confirmed as issued yet."""


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
        rollouts = sorted({self.prompts.row(row).rollout for row in rows} - {""})
        if rollouts:
            identity += f" { {name: self.budgets[name] for name in rollouts} }"
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
        """Return the task of a prompt. Its sampler seed is the same for all versions."""
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
                drawn.row.sampling.of(self.sampling),
                temperature=self.sampling.temperature,
                seed=sampler_seed(seed, 0, place.row, 0),
            ),
            prompt_epoch=0,
            offset=place.row,
            min_version=place.version,
            issue_step=step,
            rollout=drawn.row.rollout,
            budget=self.budgets.get(drawn.row.rollout),
            chat_template_args=dict(drawn.chat_template_args) or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """The sets that are evaluated, and when."""

    config: EvalConfig = field(default_factory=EvalConfig)
    sets: Sequence[EvalPrompts] = ()
    last_step: int = 0
    max_context: int = 0
    """Longer samples are invalid; 0 = any length."""

    def rounds(self) -> Rounds:
        """Return the state at the start of a run. Tokenizes every prompt. Raises PromptError."""
        sets = [prompts.size() for prompts in self.sets] if self.config.every else []
        return Rounds(sets, self.config, last_step=self.last_step)


class Evaluations:
    """The loop. Consumes published versions, samples of kind eval, dead tasks; waits for samples and the bus."""

    def __init__(
        self, bus: Bus, plan: EvalPlan, rounds: Rounds, *, epoch: int, store: Callable[[Task], Awaitable[Task]]
    ) -> None:
        """``store``: issues a task, registers it with the DataSource, and returns it with its id."""
        self._bus, self._plan, self.rounds, self._epoch, self._store = bus, plan, rounds, epoch, store
        self._sets: Mapping[str, EvalPrompts] = {prompts.name: prompts for prompts in plan.sets}
        self.best = BestScore(plan.config.best, stop_after=plan.config.stop_after)
        """The scores of the run so far; the records of PLAN are read into it (``restore``) before the run goes on."""
        self.on_scores: Callable[[], Awaitable[None]] | None = None
        """Called when a version has a score for ``best``."""
        self._tasks: dict[int, Task] = {}
        """The tasks that are out."""
        self._early: list[Sample] = []
        self._changed = Waiter()
        self.moved_s = time.monotonic()
        """Time of the last result, or of the begin of the round."""
        self.sampled = True
        """False until a run has its first sample: engines are being started, which takes minutes for a large model."""
        self._idle = asyncio.Event()
        """Set while no round is open."""
        self._note_idle()

    def published(self, version: int, step: int) -> None:
        """Register a published version."""
        if self.rounds.idle:
            self.moved_s = time.monotonic()
        skipped = self.rounds.skipped
        self.rounds.published(version, step)
        self._note_idle()
        if self.rounds.skipped != skipped:
            text = "a version is not evaluated: evaluations take longer than eval.every = %d versions"
            log.warning(text, self._plan.config.every)
        self._changed.wake()

    async def restore(self, tasks: Sequence[Task], head: tuple[int, int] | None) -> None:
        """Register scores and tasks of earlier starts, and the head. The rounds have the state of the checkpoint."""
        self.sampled = False
        await self._read_scores()
        for task in tasks:
            self.issued(task)
        if head is not None:
            self.published(*head)

    async def _read_scores(self) -> None:
        if self._plan.config.best:
            async for _, record in self._bus.plans.scan():
                if isinstance(record, Evaluated):
                    self.best.note(record.dataset, record.version, record.step, record.metrics)

    @property
    def num_bad_rows(self) -> int:
        """Number of rows of all sets that cannot be used."""
        return sum(len(prompts.prompts.bad_rows) for prompts in self._plan.sets)

    @property
    def troubles(self) -> list[str]:
        """Descriptions of these rows, for status."""
        troubles = {prompts.name: prompts.prompts.trouble for prompts in self._plan.sets}
        return [f"evaluation set {name}: {trouble}" for name, trouble in troubles.items() if trouble]

    def holds(self, step: int, head: tuple[int, int] | None, *, due: bool) -> bool:
        """Return whether the step behind ``step`` waits: a push of its weights would mix versions in the scores of this
        one.

        ``head``: version and step of the newest published weights. ``due``: the weights of ``step`` may be evaluated.
        """
        if not (step == 0 or self._plan.config.exact) or not due:
            return False
        return head is None or head[1] < step or not self.rounds.idle

    def ends_after(self, step: int, head: tuple[int, int] | None) -> None:
        """Register that the run ends after ``step``. ``head``: version and step of the newest published weights."""
        self.rounds.ends_after(step)
        if head is not None:
            self.published(*head)

    def issued(self, task: Task) -> None:
        """Register a task of kind eval: just issued, or read at a restart."""
        if not self.rounds.issued(task) and task.id not in self.rounds.open_tasks:
            return
        self._tasks[task.id] = task
        early, self._early = self._early, []
        for sample in early:
            self.arrived(sample)

    def arrived(self, sample: Sample) -> None:
        """Register a sample of kind eval."""
        task = self._tasks.get(sample.task)
        if task is None:
            if len(self._early) < EARLY and not self.rounds.idle:
                self._early.append(sample)
            return
        if field_name := mismatch(task, index_of(0, sample), self._plan.max_context):
            text = "evaluation sample passed over task=%d index=%d: its %s is not the task's"
            log.warning(text, sample.task, sample.index, field_name)
            return
        if self.rounds.arrived(sample):
            self.moved_s = time.monotonic()
            self._forget()
            self._changed.wake()

    def gone(self, letter: Dead) -> None:
        """Register a dead task."""
        if self.rounds.gone(letter.task):
            log.warning("evaluation prompt given up task=%d reason=%s", letter.task, letter.reason)
            self._forget()
            self._changed.wake()

    def _forget(self) -> None:
        self._tasks = {task_id: self._tasks[task_id] for task_id in self.rounds.open_tasks if task_id in self._tasks}

    async def run(self) -> None:
        """Issue tasks and record scores, until cancelled."""
        while True:
            if results := self.rounds.results():
                for result in results:
                    await self._record(result)
                self._close()
            elif (place := self.rounds.wanted()) is not None:
                await self._issue(place)
            else:
                self._end_stalled()
                await self._changed.wait(min(LOOK_AGAIN_S, self._plan.config.stall_s))

    async def _issue(self, place: Place) -> None:
        """Issue the task of a prompt. Raises PromptError where bad rows are refused, if no message can carry it."""
        try:
            # In a thread, because a prompt may have megabytes.
            self.issued(await self._store(await asyncio.to_thread(self._task, place)))
        except WireError as error:
            prompts = self._sets[place.set].prompts
            bad = PromptError(prompts.place(place.row), f"a task with {error.field} of {error.want}", error.got)
            prompts.bad_rows.add(place.row, bad)
            self.rounds.leave_out(place)

    def _close(self) -> None:
        # Behind the records: a kill in between makes the same results again, from the state of the checkpoint.
        self.rounds.close()
        self.moved_s = time.monotonic()
        self._early.clear()
        self._note_idle()

    def _note_idle(self) -> None:
        self._idle.set() if self.rounds.idle else self._idle.clear()

    async def over(self) -> None:
        """Wait until every round that is due is recorded."""
        await self._idle.wait()

    def _task(self, place: Place) -> Task:
        seed, step = self._plan.config.seed, self.rounds.step
        prompts = self._sets[place.set]
        return prompts.task(place, self.rounds, run=self._bus.run, epoch=self._epoch, seed=seed, step=step)

    def _end_stalled(self) -> None:
        silent_s = time.monotonic() - self.moved_s
        if self.rounds.step == 0 and not self.sampled:  # steps wait, too, and learner.batch_timeout_s ends that
            return
        if not self.rounds.idle and silent_s > self._plan.config.stall_s:
            log.error("%s: no result for %.0f s (eval.stall_s); it ends with what it has", self.rounds.open, silent_s)
            self.rounds.end()
            self._forget()
            self._changed.wake()

    async def _record(self, result: Result) -> None:
        record = Evaluated(
            epoch=self._epoch, version=result.version, step=result.step, dataset=result.set, metrics=result.metrics
        )
        await self._bus.plans.append(record)
        scored = self._plan.config.best and self.best.note(record.dataset, record.version, record.step, record.metrics)
        if scored and self.on_scores is not None:
            await self.on_scores()
        metrics = " ".join(f"{name}={value:.4g}" for name, value in result.metrics.items())
        log.info("evaluated version=%d set=%s %s", result.version, result.set, metrics)


class BestCheckpoint:
    """Knows which checkpoints have the best score, or may get it. Without ``eval.best`` there are none."""

    def __init__(
        self, bus: Bus, root: Path, evaluations: Evaluations, *, epoch: int, head: tuple[int, int] | None
    ) -> None:
        """``head``: version and step of the newest weights when this start began."""
        self._bus, self._root, self._evaluations, self._epoch, self._first_head = bus, root, evaluations, epoch, head
        self._row: Value = {}

    @property
    def wanted(self) -> bool:
        """True if the settings have a score by which versions are compared."""
        return bool(self._evaluations.best.set)

    async def begin(self) -> None:
        """Write the row as of the scores of earlier starts; without ``eval.best``, remove it. Raises BusError."""
        if self.wanted:
            await self.note()
        elif (await self._bus.rows("run").read(BEST_KEY))[1]:
            await self._bus.rows("run").delete(BEST_KEY)

    def due(self, step: int, *, versions: Mapping[int, int], head: tuple[int, int] | None, push_every: int) -> bool:
        """Return whether the weights of a planned step will be evaluated, as far as that is known before they have a
        version.

        ``versions``: step of every version so far. ``head``: the newest of them, and its step.
        """
        republished = head == self._first_head
        candidates = versions_of(step, versions=versions, head=head, push_every=push_every, republished=republished)
        return any(self._evaluations.rounds.due(version, step) for version in candidates)

    async def spared(self) -> list[str]:
        """Return the checkpoints of the best version, and of versions that are being evaluated or will be next."""
        if not self.wanted:
            return []
        listed = await asyncio.to_thread(disk.listed, self._root)
        names = {
            checkpoint.path.name for checkpoint in listed if checkpoint.step in self._evaluations.rounds.pending_steps
        }
        best = self._best(listed)
        return sorted(names if best is None else names | {best[1].path.name})

    async def note(self) -> None:
        """Write the row, if the best version has changed. Raises BusError."""
        best = self._best(await asyncio.to_thread(disk.listed, self._root)) if self.wanted else None
        if best is None:
            return
        scored, checkpoint = best
        score = self._evaluations.best
        row: Value = {
            "step": scored.step,
            "version": scored.version,
            "set": score.set,
            "metric": score.metric,
            "value": scored.value,
            "directory": str(checkpoint.path),
            "epoch": self._epoch,
        }
        if row != self._row:
            await self._bus.retry(lambda: self._bus.rows("run").put(BEST_KEY, row))
            text = "best checkpoint=%s version=%d %s/%s=%.4g"
            log.info(text, checkpoint.path, scored.version, score.set, score.metric, scored.value)
            self._row = row

    def _best(self, listed: Collection[Checkpoint]) -> tuple[Scored, Checkpoint] | None:
        """Return the best version that has a checkpoint, with the newest one of its step."""
        for scored in self._evaluations.best.ranked:
            for checkpoint in listed:
                if checkpoint.step == scored.step:
                    return scored, checkpoint
        return None


def versions_of(
    step: int, *, versions: Mapping[int, int], head: tuple[int, int] | None, push_every: int, republished: bool
) -> Collection[int]:
    """Return the versions of a repeated step, or the versions that the weights of a new one may become.

    ``republished``: a start publishes once more the weights of its first step, or of the last step that it repeats, and
    it is not known whether it has; later versions may then be one higher.
    """
    if published := [version for version, version_step in versions.items() if version_step == step]:
        return published
    if head is None or step % push_every:
        return ()
    version = head[0] + step // push_every - head[1] // push_every
    return (version, version + 1) if republished else (version,)
