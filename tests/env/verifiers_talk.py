"""A taskset of verifiers with an environment of its own: three turns, in which a player is asked again; and a second
agent on demand.
"""

import itertools

import verifiers.v1 as vf

__all__ = ["Talk", "TalkEnv"]


class TalkConfig(vf.TasksetConfig):
    """No settings of its own."""


class TalkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Is scored by the environment."""


class TalkEnvConfig(vf.EnvConfig):
    """The player, and a judge that is asked where ``judged``."""

    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    judged: str = ""


class TalkEnv(vf.Env[TalkEnvConfig]):
    """Three turns; the reward is the share of replies without the letter e."""

    async def setup(self, agents):
        agents.judge.trainable = self.config.judged == "trained"

    async def run(self, task, agents):
        replies = []
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                replies.append(segment.last_reply or "")
                if segment.terminated:
                    break
                segment = await interaction.turn("Again, shorter.")
            replies.append(segment.last_reply or "")
        trace = interaction.trace
        if self.config.judged:
            await agents.judge.run(vf.Task(vf.TaskData(idx=task.data.idx, prompt=f"Grade {replies[-1]!r}.")))
        trace.record_reward("plain", sum("e" not in reply for reply in replies) / len(replies), 1.0)


class Talk(vf.Taskset[TalkTask, TalkConfig]):
    """Prompts without end."""

    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield TalkTask(vf.TaskData(prompt=f"Say something of {n}."), self.config.task)
