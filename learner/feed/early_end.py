"""End of a run before ``learner.steps``: its prompts are used up, or its scores have stopped to rise.

    DataSource.exhausted, Evaluations.stopped --> reason() --> end() --> ranks (last), Outcomes, Evaluations, row run/end

The reason follows from the records of PLAN and from the settings, so a restart finds it again; with other settings it
may not hold, and then the run goes on. Ranks learn of it when they request the step after the last, which is planned by
then: they publish its weights and write its checkpoint, if they have not yet.
"""

import logging

from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.subjects import END_KEY
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.errors import NothingTrained
from tidemill.learner.evaluation.evaluations import Evaluations
from tidemill.learner.feed.feed_messages import Last
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.outcomes import Outcomes

log = logging.getLogger(__name__)


class EarlyEnd:
    """The last step of one start, if it is another than in the settings."""

    def __init__(self, bus: Bus, source: DataSource, evaluations: Evaluations, rules: DataRules, *, epoch: int) -> None:
        self._bus, self._source, self._evaluations, self._rules, self._epoch = bus, source, evaluations, rules, epoch
        self.ended = False
        """True once the last step is known: no further task is issued and no step is planned."""

    async def begin(self) -> None:
        """Remove the row of an earlier start."""
        rows = self._bus.rows("run")
        if (await rows.read(END_KEY))[1]:  # only where there is one: a user that may not purge leaves a marker instead
            await rows.delete(END_KEY)

    def reason(self, last_failure: str = "") -> str:
        """Return the reason to end after the last planned step; empty = there is none.

        ``last_failure``: of a task, in words. Raises NothingTrained when there is no step.
        """
        if stopped := self._evaluations.best.stopped:
            return stopped
        if not self._source.exhausted:
            return ""
        if not self._source.step:
            raise NothingTrained(self._rules.num_epochs, self._source.accounting().settled, last_failure)
        return (
            f"all prompts of {self._rules.num_epochs} pass{'es' * (self._rules.num_epochs > 1)} are used "
            "(learner.num_epochs)"
        )

    async def end(self, reason: str, server: FeedServer, outcomes: Outcomes, *, state: bytes) -> None:
        """End the run after the last planned step. ``state``: of the data there; empty = its checkpoint is ordered.
        Raises BusError.
        """
        self.ended, step = True, self._source.step
        log.warning("the run ends after step %d of %d: %s", step, self._rules.steps, reason)
        await self._bus.rows("run").put(END_KEY, {"step": step, "reason": reason, "epoch": self._epoch})
        self._evaluations.ends_after(step, self._source.head)
        await server.last(Last(step=step, state=state))
        outcomes.ends_after(step)
