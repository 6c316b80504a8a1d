"""A server of OpenEnv with one environment, which counts to ten: ``PYTHON openenv_server.py SOCKET``, the number of a
socket.
"""

import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    """Text of the player."""

    message: str


class Seen(Observation):
    """State that the player sees."""

    text: str


class CountToTen(Environment):
    """Adds the digits that are said, until ten is reached."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.total, self.steps = 0, 0

    def reset(self, seed=None, episode_id=None, start=0, **more):
        self.total, self.steps = start, 0
        return Seen(text=f"at {self.total}", reward=None, done=False)

    def step(self, action, timeout_s=None, **more):
        if action.message == "boom":
            raise RuntimeError("boom")
        self.steps += 1
        self.total += sum(int(letter) for letter in action.message if letter.isdigit())
        return Seen(text=f"at {self.total}", reward=float(self.total), done=self.total >= 10)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    application = create_fastapi_app(CountToTen, Said, Seen, max_concurrent_envs=2)
    listening = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listening])
