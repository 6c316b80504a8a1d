"""A taskset of verifiers with a tool, which it serves over MCP."""

import verifiers.v1 as vf

__all__ = ["Asks"]


class Clock(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """Tells the time of a city."""

    @vf.tool
    async def time_in(self, city: str) -> str:
        """Return the time in a city."""
        return f"noon in {city}"


class AskTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Scores by the results of tools that the model was shown."""

    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.ToolsetConfig())]

    @vf.reward
    async def asked(self, trace) -> float:
        """Return the number of results."""
        return float(len(trace.tool_messages))


class Asks(vf.Taskset[AskTask, vf.TasksetConfig]):
    """One prompt."""

    def load(self):
        yield AskTask(vf.TaskData(prompt="What is the time in Rome?"), self.config.task)


if __name__ == "__main__":
    Clock.run()
