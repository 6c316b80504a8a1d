"""Rows that the run has planned, as every checkpoint has them; and what a changed file of prompts still has of them.

A start may read other files than the one before, as long as each position up to the last issued one has the row that it
had. Rows behind that position, and rows that were skipped, may change.
"""

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Task
from tidemill.learner.errors import NEW_RUN, ConfigRefused, PromptError
from tidemill.learner.prompts.prompt_file import PromptFile, Share, order_of

SETTING = "data.path"
_MAX_NAMED = 5
"""Maximum number of rows that a message names."""


class PlannedRows:
    """The rows of the tasks of one run."""

    def __init__(self, prompts: PromptFile) -> None:
        self._prompts = prompts
        self._planned = np.zeros(len(prompts.digests), np.bool_)
        self._next = (0, 0)
        """The position behind the last planned one."""

    def note(self, task: Task) -> None:
        """Register an issued task."""
        self._planned[int(self._prompts.order(task.prompt_epoch)[task.offset])] = True
        self._next = max(self._next, (task.prompt_epoch, task.offset + 1))

    def repeat(self, task: Task) -> None:
        """Register a task that an earlier start issued. Raises ConfigRefused if its position has another row."""
        order = self._prompts.order(task.prompt_epoch)
        if task.offset >= len(order):
            want = f"a prompt at position {task.offset} of pass {task.prompt_epoch}, as task {task.id} has"
            raise _refused(want, f"{len(order)} prompts")
        number = int(order[task.offset])
        if task.row_digest not in (None, int(self._prompts.digests[number])):
            raise self._other_row(number)
        self.note(task)

    def _other_row(self, number: int) -> ConfigRefused:
        try:
            got = f"{self._prompts.row(number).prompt!r:.80}"
        except PromptError as error:
            got = f"a bad row: {error}"
        return _refused(f"the row {self._prompts.place(number)} as it was when the run planned it", got)

    def dump(self) -> JsonObject:
        """Return the state for a snapshot: 33 bits for each row of the files."""
        return {
            "digests": self._prompts.digests.astype("<u4").tobytes(),
            "planned": np.packbits(self._planned).tobytes(),
            "next": list(self._next),
            "shuffle": self._prompts.shuffle,
            "shares": _facts(self._prompts.shares),
        }

    def load(self, state: JsonMapping) -> str:
        """Replace the state by one that ``dump`` has returned. Returns the differences of the rows, which are not
        planned yet, in words.

        Raises ConfigRefused if a planned row differs, or a position up to the last planned one has another row.
        """
        before, now = np.frombuffer(state["digests"], "<u4"), self._prompts.digests
        planned = np.unpackbits(np.frombuffer(state["planned"], np.uint8), count=len(before)).astype(np.bool_)
        self._next = (state["next"][0], state["next"][1])
        self._refuse_other_order(state, len(before))
        common = min(len(before), len(now))
        changed = before[:common] != now[:common]
        if len(lost := np.flatnonzero(changed & planned[:common])):
            raise self._other_row(int(lost[0]))
        self._planned[:common] = planned[:common]
        return self._differences(np.flatnonzero(changed), len(before))

    def _refuse_other_order(self, state: JsonMapping, count: int) -> None:
        facts = {"shuffle": self._prompts.shuffle, "shares": _facts(self._prompts.shares)}
        if {name: state[name] for name in facts} == facts:
            return
        shares = [
            Share(first=first, size=size, weight=weight, name=name) for first, size, weight, name in state["shares"]
        ]
        for epoch in range(self._next[0] + 1):
            before = order_of(shares, shuffle=state["shuffle"], seed=self._prompts.seed, epoch=epoch)
            before = before[: self._next[1]] if epoch == self._next[0] else before
            if not np.array_equal(before, self._prompts.order(epoch)[: len(before)]):
                want = (
                    f"{count} rows, and the weights and the shuffling of the sources, as when pass {epoch} was planned"
                )
                got = f"{len(self._prompts.digests)} rows in another order; append rows with data.shuffle: false alone"
                raise _refused(want, got)

    def _differences(self, changed: NDArray[np.int64], count: int) -> str:
        differences = []
        if len(changed):
            places = ", ".join(self._prompts.place(int(number)) for number in changed[:_MAX_NAMED])
            dots = ", ..." if len(changed) > _MAX_NAMED else ""
            differences.append(f"{len(changed)} of {count} rows differ ({places}{dots})")
        if added := len(self._prompts.digests) - count:
            differences.append(f"{abs(added)} rows {'more' if added > 0 else 'fewer'}")
        return "; ".join(differences) or "the rows are the same"


def _facts(shares: list[Share]) -> list[list[object]]:
    return [[share.first, share.size, share.weight, share.name] for share in shares]


def _refused(want: str, got: str) -> ConfigRefused:
    return ConfigRefused(SETTING, f"{want} (put the file back, or {NEW_RUN})", got)
