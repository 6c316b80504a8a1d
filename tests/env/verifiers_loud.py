"""A taskset of verifiers with an environment that prints, starts at the second try, and announces each trace twice."""

import os
import sys

import verifiers.v1 as vf

__all__ = ["Loud", "LoudEnv"]

print("loud: it is imported")


class LoudConfig(vf.TasksetConfig):
    """``broken``: whether it ends with an error."""

    broken: bool = False


class LoudData(vf.TaskData):
    """A prompt and its answer."""

    answer: str


class LoudTask(vf.Task[LoudData, vf.State, vf.TaskConfig]):
    """Every reply is worth as much."""

    @vf.reward
    async def any(self, trace) -> float:
        """Return 1."""
        return 1.0


class LoudEnvConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class LoudEnv(vf.Env[LoudEnvConfig]):
    """One turn of one player."""

    starts = 0

    async def start(self):
        self.starts += 1
        if self.starts == 1:
            raise RuntimeError("its servers are not up yet")

    async def run(self, task, agents):
        await agents.player.run(task)

    async def run_slot(self, slot, ctx, semaphore=None, on_complete=None, on_trace=None):
        def twice(trace):
            """Announce a trace twice."""
            on_trace(trace)
            on_trace(trace)

        return await super().run_slot(slot, ctx, semaphore, on_complete, twice)


class Loud(vf.Taskset[LoudTask, LoudConfig]):
    """One prompt, with an answer that cannot be encoded."""

    def load(self):
        print("loud: it is loaded")
        os.system("echo loud: so is a process of it")
        if self.config.broken:
            sys.stderr.buffer.write(b"no t\xe4sks\n")
            sys.stderr.flush()
            os._exit(3)
        yield LoudTask(LoudData(prompt="Say it.", answer="\ud83d"), self.config.task)
