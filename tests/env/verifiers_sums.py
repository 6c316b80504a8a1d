"""A taskset of verifiers: say a sum, in one turn. Its rewards do not need a model that can add."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum and its value."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Scores the last reply."""

    @vf.reward
    async def right(self, trace) -> float:
        """Return whether the reply has the value."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=2.0)
    async def brief(self, trace) -> float:
        """Return a share that falls with the characters of the reply."""
        return 1.0 / (1 + len(trace.last_reply))

    @vf.metric
    async def characters(self, trace) -> float:
        """Return the characters of the reply."""
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    """Number of sums."""

    count: int = 8


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Sums of small numbers."""

    def load(self):
        for n in range(self.config.count):
            data = SumData(prompt=f"{n}+{n + 1}=", answer=str(2 * n + 1), system_prompt="Add.")
            yield SumTask(data, self.config.task)
