"""The driver of a run in a Ray cluster.

    prepare -> bus -> learner's nodes, engines, actors (a Ray actor each, kept by the supervisor) -> the learner ends
            -> actors and engines drain -> audit -> bus ends

Consumes the end of the learner; waits for it, for a process that is given up, or for SIGTERM, which drains in the order
actors and learner, engines, bus. When the driver itself is killed, Ray ends its actors, and the kernel their processes;
the same command continues the run.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus.client.addresses import in_url
from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, credentials_file
from tidemill.bus.system.coroutines import first_of
from tidemill.launch.deploy.ray_cluster.owner import Program, command_of
from tidemill.launch.deploy.ray_cluster.placement import Demand
from tidemill.launch.deploy.ray_cluster.remote import RemoteProcess, owner_maker
from tidemill.launch.run.access import LEARNER, auth_dir
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded

log = logging.getLogger(__name__)

DRAINED = 100
"""Exit code of a learner that a signal has drained: it is started again, as its run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRun:
    """A run, and where its processes go."""

    config: RunConfig
    """With the address of the bus, ``bus.host`` and ``bus.port``, and an absolute ``directory``."""
    demand: Demand
    group: Any
    """Placement group of the learner's nodes."""
    program: str
    """The ``tidemill`` of the nodes; empty = of this Python."""

    async def drive(self, draining: asyncio.Event) -> None:
        """Run it to its end, or until drained. Raises GaveUp, also when samples are missing."""
        up = self.config.up
        supervisor = Supervisor(
            self.config.root / "logs", restarts=up.restarts, window_s=up.restart_window_s, launch=self.launch
        )
        try:
            await self.once("prepare", ["prepare", str(self.config_file)])
            if not self.config.bus.url:
                if self.config.bus.auth:  # before the processes that read their passwords
                    await self.once("bus-users", ["bus", *self.with_config, "--make-users"])
                supervisor.keep("bus", ["bus", *self.with_config])
            if await self.train(supervisor, draining):
                await self.end(supervisor, "actor", "scorer", "engine")
                await self.audit()
        finally:
            await self.end(supervisor, "actor", "scorer", "learner")
            await self.end(supervisor, "engine")
            await self.end(supervisor, "bus")

    async def train(self, supervisor: Supervisor, draining: asyncio.Event) -> bool:
        """Start the learner and its workers; return whether the learner took its last step. Raises GaveUp."""
        learners = [supervisor.keep(name, words, finishes=True) for name, words in self.learners().items()]
        for name, words in self.workers().items():
            supervisor.keep(name, words)
        log.info("started; look at it with: tidemill status --bus %s", self.url)
        await first_of(_all_done(learners), supervisor.failed(), draining.wait())
        if not draining.is_set():
            for learner in learners:
                learner.result()
        return not draining.is_set()

    def learners(self) -> dict[str, list[str]]:
        """Return the arguments of the learner's nodes, by name."""
        words = ["learner", *self.with_config, "--bus", self.url, "--drained-code", str(DRAINED)]
        if self.demand.nodes == 1:
            return {"learner": words}
        return {f"learner-node-{node}": [*words, "--node-rank", str(node)] for node in range(self.demand.nodes)}

    def workers(self) -> dict[str, list[str]]:
        """Return the arguments of engines, scorers and actors, by name; their settings come over the bus."""
        up = self.config.up
        counts = {"engine": up.engines, "scorer": up.scorers, "actor": up.actors}
        names = [(role, f"{role}-{number}") for role, count in counts.items() for number in range(count)]
        return {name: [role, "--bus", self.url, "--run", self.config.run, "--id", name] for role, name in names}

    def launch(
        self, name: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> RemoteProcess:
        """Return a process of the run, which a Ray actor will own (``supervisor.Launch``)."""
        program = Program(
            name=name,
            command=command_of(arguments, self.program),
            log_file=log_file,
            environment={"PYTHONUNBUFFERED": "1", **self.credentials(name), **(environment or {})},
            config_file=self.config_file,
            config_text=yaml_file.dump(recorded(to_map(self.config))),
        )
        options = {"name": f"{self.config.run}-{name}", **self.demand.options(name, self.group)}
        return RemoteProcess(program, owner_maker(options))

    def credentials(self, name: str) -> dict[str, str]:
        """Return the variable that names the file with the user of a process, on a bus with users."""
        if not self.config.bus.auth:
            return {}
        role = name.partition("-")[0]
        user = name if role in ("engine", "actor", "scorer") else LEARNER
        return {CREDENTIALS_VARIABLE: str(credentials_file(auth_dir(self.config), user))} if role != "bus" else {}

    async def once(self, name: str, arguments: Sequence[str]) -> str:
        """Run a command to its end on the learner's first node; return its last lines. Raises GaveUp."""
        child = self.launch(name, arguments, self.config.root / "logs" / f"{name}.log")
        try:
            await child.start()
            code = await child.wait()
        finally:
            await child.end(self.config.up.drain_s)
        if code:
            raise GaveUp(name, code, 1, 0.0, child.last_lines(), child.reason())
        return child.last_lines()

    async def audit(self) -> None:
        """Check that every sample was trained once, and write summary.json. Raises GaveUp when one was not."""
        root = self.config.root
        files = ["--checkpoints", str(root / "checkpoints"), "--summary", str(root / "summary.json")]
        log.info("audit:\n%s", await self.once("audit", ["audit", "--bus", self.url, "--run", self.config.run, *files]))

    async def end(self, supervisor: Supervisor, *roles: str) -> None:
        names = [name for role in roles for name in supervisor.names(role)]
        await supervisor.end(names, within_s=self.config.up.drain_s)

    @property
    def url(self) -> str:
        bus = self.config.bus
        return bus.url or f"{'tls' if bus.tls_cert else 'nats'}://{in_url(bus.host)}:{bus.port}"

    @property
    def config_file(self) -> Path:
        return self.config.root / CONFIG_FILE

    @property
    def with_config(self) -> list[str]:
        return ["--config", str(self.config_file)]


async def _all_done(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Return when all tasks have ended, or one has failed."""
    with contextlib.suppress(GaveUp):
        await asyncio.gather(*(asyncio.shield(task) for task in tasks))
