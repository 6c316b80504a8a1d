"""Rounds of evaluation: one for each version that is evaluated. A pure state machine, without clock, bus or model.

    published(version) --> round opened --> wanted() --> issued(task) --> arrived(sample) ... --> results() --> close()
                                                                       \\-> gone(task): dead, or never answered

One round is open at a time. A version that is due while another round is open waits; of several only the newest does,
because an evaluation that cannot keep up must not fall behind for ever. State is in every checkpoint (``dump``), and
tasks that were issued after it are read again, so that a restart issues no prompt twice.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sample, Status, Task
from tidemill.learner.evaluation.config import EvalConfig
from tidemill.learner.evaluation.scores import ScoredResponse, scores

MARK = "evaluation"
"""Key in a task's metadata: the version, the set, the prompt's number in it, and the digest of all sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSize:
    """Facts of a set that a round needs."""

    name: str
    rows: tuple[int, ...]
    """Numbers of the usable prompts in their file."""
    samples: int
    passes_at: float
    identity: str
    """Digest of file, sampling and everything else that decides the responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One prompt of one set at one version."""

    version: int
    set: str
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Scores of one set at one version."""

    version: int
    step: int
    set: str
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Round:
    version: int
    step: int
    newest_copy: int
    """Newest version with the same weights: a start publishes the weights that it begins with once more."""
    tasks: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Set and row of each issued task that is open."""
    placed: set[tuple[str, int]] = field(default_factory=set)
    """Set and row of each issued task, open or not."""
    responses: dict[tuple[str, int], dict[int, ScoredResponse]] = field(default_factory=dict)
    """Responses by (set, row) and index."""


class Rounds:
    """State of the evaluation (see the module)."""

    def __init__(self, sets: Sequence[SetSize], config: EvalConfig, *, last_step: int) -> None:
        """``last_step``: of the run."""
        self._sets = {size.name: size for size in sets}
        self._prompts = dict.fromkeys((size.name, row) for size in sets for row in size.rows)
        """Set and row of every prompt, in the order of their issue."""
        self._config, self._last_step = config, last_step
        identities = json.dumps([(size.name, size.rows, size.identity) for size in sets])
        self.digest = hashlib.sha256(identities.encode()).hexdigest()[:16]
        """Digest of all sets: tasks and state of other sets are passed over."""
        self._open: _Round | None = None
        self._next: tuple[int, int] | None = None
        """Version and step that wait for the open round."""
        self._newest = -1
        """Newest version that has had a round."""
        self._newest_step = -1
        """Step of its weights."""
        self.skipped = 0
        """Versions that were due and not evaluated, because a later one was due before the open round had ended."""

    # ---- versions

    def due(self, version: int, step: int) -> bool:
        """Return whether a version is to be evaluated."""
        if not self._config.every or not self._sets:
            return False
        if step == 0:  # version 0, or 1 where the run begins with other weights than the model directory has
            return self._config.at_start
        return version % self._config.every == 0 or (self._config.at_end and step == self._last_step)

    def published(self, version: int, step: int) -> None:
        """Open the round of ``version``, if it is due and its weights have had none, or let it wait for an open one."""
        if self._open is not None and step == self._open.step:
            self._open.newest_copy = max(version, self._open.newest_copy)
        # By step as well: a start publishes the weights that it begins with once more, as a later version.
        newest_step = self._newest_step if self._next is None else self._next[1]
        if not self.due(version, step) or version <= self._newest or step <= newest_step:
            return
        if self._open is None:
            self._begin(version, step)
            return
        self.skipped += self._next is not None
        self._next = (version, step)

    def ends_after(self, step: int) -> None:
        """Register that the run ends after an earlier step than in the settings; the version of that step is due."""
        self._last_step = step

    def _begin(self, version: int, step: int) -> None:
        self._open = _Round(version=version, step=step, newest_copy=version)
        self._newest, self._newest_step = max(self._newest, version), max(self._newest_step, step)

    @property
    def pending_steps(self) -> set[int]:
        """Steps of the versions of the open round and of the round that waits."""
        steps = set() if self._open is None else {self._open.step}
        return steps if self._next is None else steps | {self._next[1]}

    @property
    def idle(self) -> bool:
        """Return whether no round is open, and none waits."""
        return self._open is None and self._next is None

    @property
    def step(self) -> int:
        """Step of the version of the open round; 0 without one."""
        return 0 if self._open is None else self._open.step

    @property
    def open(self) -> str:
        """Description of the open round, for status; empty if there is none."""
        if self._open is None:
            return ""
        answered = len(self._open.placed) - len(self._open.tasks)
        return f"evaluation of version {self._open.version}: {answered} of {len(self._prompts)} prompts"

    # ---- tasks

    def wanted(self) -> Place | None:
        """Return the next prompt to issue; None while as many are out as may be, or nothing is left."""
        if self._open is None or len(self._open.tasks) >= self._config.max_open_tasks:
            return None
        for name, row in self._prompts:
            if (name, row) not in self._open.placed:
                return Place(version=self._open.version, set=name, row=row)
        return None

    def mark(self, place: Place) -> JsonObject:
        """Return the metadata of a task that describe its place."""
        return {"version": place.version, "set": place.set, "row": place.row, "digest": self.digest}

    def issued(self, task: Task) -> bool:
        """Register a task of kind eval, just issued or read at a restart. Returns whether its round is not over."""
        place = self._place(task)
        if place is None or task.min_version < self._newest:
            return False
        if self._open is None or task.min_version > self._open.version:
            if task.min_version == self._newest:
                return False  # of a round that is over
            # Issued by a start that has ended, after its last checkpoint.
            self._begin(task.min_version, task.issue_step)
        if self._open is None or place in self._open.placed:
            return False
        self._open.placed.add(place)
        self._open.tasks[task.id] = place
        return True

    def _place(self, task: Task) -> tuple[str, int] | None:
        mark = task.metadata.get(MARK)
        if not isinstance(mark, dict) or mark.get("digest") != self.digest:
            return None
        name, row = mark.get("set"), mark.get("row")
        if isinstance(name, str) and isinstance(row, int) and (name, row) in self._prompts:
            return name, row
        return None

    # ---- samples

    def arrived(self, sample: Sample) -> bool:
        """Register a valid sample. Returns whether it counts: it is the first of its index in the open round."""
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED) or self._open is None:
            return False
        place = self._open.tasks.get(sample.task)
        if place is None:
            return False
        responses = self._open.responses.setdefault(place, {})
        if sample.index in responses or not 0 <= sample.index < self._sets[place[0]].samples:
            return False
        responses[sample.index] = ScoredResponse(
            score=sample.score,
            num_tokens=int(np.count_nonzero(sample.loss_mask)),
            truncated=sample.status is Status.TRUNCATED,
            oldest_version=sample.min_version,
            newest_version=sample.max_version,
        )
        if len(responses) == self._sets[place[0]].samples:
            del self._open.tasks[sample.task]
        return True

    def gone(self, task: int) -> bool:
        """Register that no further sample of a task will come. Returns whether it was open."""
        return self._open is not None and self._open.tasks.pop(task, None) is not None

    def leave_out(self, place: Place) -> None:
        """Register that a prompt of the open round gets no task."""
        if self._open is not None:
            self._open.placed.add((place.set, place.row))

    @property
    def open_tasks(self) -> list[int]:
        """Ids of the tasks that are out."""
        return [] if self._open is None else list(self._open.tasks)

    def end(self) -> None:
        """End the open round with the results it has: prompts that were not issued are missing, too."""
        if self._open is not None:
            self._open.tasks.clear()
            self._open.placed = set(self._prompts)

    def results(self) -> list[Result]:
        """Return the scores of the open round once all its prompts are answered or gone; ``close`` follows."""
        if self._open is None or self._open.tasks or self.wanted() is not None:
            return []
        return [self._result(self._open, size) for size in self._sets.values()]

    def close(self) -> None:
        """Close the open round after its results are recorded, and open the next."""
        self._open = None
        if self._next is not None:
            version, step = self._next
            self._next = None
            self._begin(version, step)

    def _result(self, done: _Round, size: SetSize) -> Result:
        metrics = scores(
            {row: list(done.responses.get((size.name, row), {}).values()) for row in size.rows},
            num_prompts=len(size.rows),
            samples=size.samples,
            passes_at=size.passes_at,
            versions=(done.version, done.newest_copy),
        )
        return Result(version=done.version, step=done.step, set=size.name, metrics=metrics)

    # ---- persist

    def dump(self) -> JsonObject:
        """Return the state for a checkpoint: plain values."""
        state: JsonObject = {"digest": self.digest, "next": self._next, "open": None}
        state |= {"newest": self._newest, "newest_step": self._newest_step}
        if self._open is not None:
            state["open"] = {
                "version": self._open.version,
                "step": self._open.step,
                "same": self._open.newest_copy,
                "tasks": [(task_id, *place) for task_id, place in self._open.tasks.items()],
                "placed": sorted(self._open.placed),
                "responses": [
                    (*place, index, *astuple(response))
                    for place, responses in self._open.responses.items()
                    for index, response in responses.items()
                ],
            }
        return state

    def load(self, state: JsonObject) -> None:
        """Take the state of a checkpoint; of other sets only which versions were evaluated."""
        self._newest, self._newest_step = int(state["newest"]), int(state["newest_step"])
        if state["digest"] != self.digest or state["open"] is None:
            return
        stored = state["open"]
        self._next = None if state["next"] is None else (int(state["next"][0]), int(state["next"][1]))
        self._open = _Round(version=stored["version"], step=stored["step"], newest_copy=stored["same"])
        self._open.tasks = {task_id: (name, row) for task_id, name, row in stored["tasks"]}
        self._open.placed = {(name, row) for name, row in stored["placed"]}
        names = [column.name for column in fields(ScoredResponse)]
        for name, row, index, *values in stored["responses"]:
            response = ScoredResponse(**dict(zip(names, values, strict=True)))
            self._open.responses.setdefault((name, row), {})[index] = response
