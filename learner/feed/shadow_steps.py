"""The steps of another run on the bus, as its learner plans them: what a shadow learner trains on.

    PLAN of the run -> plan of step k -> its samples by their sequences -> one step

Consumes records and samples of the run, and writes nothing: no consumer, lease, cursor or row of it changes, and
trimming does not wait. Waits for the next plan. A shadow that falls so far behind that samples are trimmed ends.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from tidemill.bus.errors import NotFound
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Plan, Sample
from tidemill.learner.debug.rollout_file import DumpedRollout
from tidemill.learner.errors import SamplesGone

_AT_ONCE = 32  # Samples that are requested at a time


class ShadowSteps:
    """The steps of the run behind ``after_step``, in order."""

    def __init__(self, run: Bus, *, after_step: int) -> None:
        self._run, self._last = run, after_step
        self._plans = self._planned()

    async def read(self) -> DumpedRollout:
        """Return the next step, once it is planned. Raises SamplesGone when it was trimmed."""
        plan = await anext(self._plans)
        return DumpedRollout(
            run=self._run.run, plan=plan, samples=await self._samples(plan), token_limits=await self._limits(plan)
        )

    async def _planned(self) -> AsyncIterator[Plan]:
        async for _, record in self._run.plans.follow():
            if isinstance(record, Plan) and record.step > self._last:
                if record.step > self._last + 1:
                    raise SamplesGone(self._run.run, self._last + 1, f"PLAN begins with step {record.step}")
                self._last = record.step
                yield record

    async def _samples(self, plan: Plan) -> Sequence[Sample]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def fetch(seq: int) -> Sample:
            async with limit:
                return await self._run.retry(partial(self._run.samples.fetch, seq))

        try:
            return await asyncio.gather(*[fetch(seq) for seq in plan.seqs.tolist()])
        except NotFound:
            raise SamplesGone(self._run.run, plan.step, "samples of it are trimmed from SAMPLES") from None

    async def _limits(self, plan: Plan) -> dict[int, int]:
        """Return the bound of sampled tokens of every task that has a budget of them and is still in TASKS."""
        limits = dict[int, int]()
        if not self._run.config.rollouts:
            return limits
        for task_id in plan.tasks.tolist():
            try:
                task = await self._run.retry(partial(self._run.tasks.fetch, task_id))
            except NotFound:
                raise SamplesGone(self._run.run, plan.step, f"task {task_id} of it is trimmed from TASKS") from None
            if task.budget is not None and task.budget.tokens:
                limits[task_id] = task.budget.tokens
        return limits
