"""The learner's node of a host: the agent of that machine, kept by the host's supervisor beside its engines and actors."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, credentials_file
from tidemill.launch.run.access import LEARNER
from tidemill.launch.run.supervisor import Supervisor
from tidemill.launch.settings.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLearner:
    """One node of a learner, as the command line of its host gives it."""

    config: RunConfig
    rank: int
    arguments: Sequence[str]
    """Those behind ``python -m tidemill``."""
    users: Path | None = None
    """Directory with the credentials of the learner's user; None = a bus without users, or those of the run's own files."""

    def __post_init__(self) -> None:
        if self.users is not None and not credentials_file(self.users, LEARNER).exists():
            want = f"{LEARNER}.env in {self.users} with --learner-node"
            raise ValueError(f"--users: want {want}, got none; cure: copy it from the bus's machine")

    @asynccontextmanager
    async def kept(self, supervisor: Supervisor, *, drain_s: float) -> AsyncIterator[None]:
        """Keep the agent while entered: it is started again after a bad end, and ends well after the learner's last step."""
        environment = {} if self.users is None else {CREDENTIALS_VARIABLE: str(credentials_file(self.users, LEARNER))}
        supervisor.keep(f"{LEARNER}-node-{self.rank}", self.arguments, finishes=True, environment=environment)
        try:
            yield
        finally:
            await supervisor.end(supervisor.names(LEARNER), within_s=drain_s)  # none are left where the host has drained all
