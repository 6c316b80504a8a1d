"""A run in a Ray cluster: its driver, the places of its processes, and each of them as one of the supervisor's own.

    prepare -> bus -> learner's nodes, engines, actors (a Ray actor each, kept by the supervisor) -> the learner ends
            -> actors and engines drain -> audit -> bus ends

Consumes the end of the learner; waits for it, for a process that is given up, or for SIGTERM, which drains in the
order actors and learner, engines, bus. When the driver itself is killed, Ray ends its actors, and the kernel their
processes; the same command continues the run. Learner's nodes have bundles with devices; engines and actors are single
Ray actors, which Ray places as it finds room.
"""

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus import exit_codes
from tidemill.bus.client.addresses import in_url
from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, credentials_file
from tidemill.bus.system.coroutines import first_of
from tidemill.launch.deploy.ray_owner import Ended, Owner, Program, command_of
from tidemill.launch.devices.demand import devices_of
from tidemill.launch.run.access import LEARNER, auth_dir
from tidemill.launch.run.supervisor import GaveUp, Supervisor
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import recorded

log = logging.getLogger(__name__)

SLICE_S = 1.0
"""Seconds of one call that waits for the end of a process: a call to stop it waits no longer."""
AWAY_EVERY_S = 1.0
"""Interval of calls to an owner that Ray is starting again, in seconds."""
ANSWER_S = 30.0
"""Seconds beyond its own limit in which an owner answers a call to stop its process."""
WAIT_S = 600.0
"""Seconds in which the cluster must have room for the learner: an autoscaler needs minutes for a machine."""
DRAINED = 100
"""Exit code of a learner that a signal has drained: it is started again, as its run goes on."""


class RemoteProcess:
    """One process of the run, wherever Ray has put it."""

    def __init__(self, program: Program, make_owner: Callable[[Program], Any]) -> None:
        """``make_owner`` returns the handle of a new Ray actor, whose process it starts."""
        self.name = program.name
        self.log_file: Path | None = program.log_file
        self._program, self._make_owner = program, make_owner
        self._owner: Any = None
        self._pid = 0
        self._ended: Ended | None = None

    @property
    def running(self) -> bool:
        return self._owner is not None and self._ended is None

    @property
    def pid(self) -> int:
        """Process id on its node; 0 before it is known."""
        return self._pid

    async def start(self) -> None:
        """Start the process, on the owner that it had, if that is left."""
        self._ended = None
        if self._owner is None:
            self._owner = self._make_owner(self._program)
            return
        from ray.exceptions import RayActorError

        try:
            await self._owner.start.remote()
        except RayActorError:  # Ray starts the owner again, and that starts the process
            log.info("%s: its Ray actor is being started again", self.name)

    async def wait(self) -> int:
        """Return the exit code of the process. An owner that Ray starts again has started its process again."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        while True:
            try:
                if not self._pid:
                    self._pid = await self._owner.pid.remote()
                ended = await self._owner.wait.remote(SLICE_S)
            except ActorUnavailableError:
                self._lost("is started again by Ray")
                await asyncio.sleep(AWAY_EVERY_S)
            except RayActorError as error:
                self._lost("is not started again by Ray")
                self._owner = None
                self._ended = Ended(code=exit_codes.CRASHED, last_lines=f"{exit_codes.LINE}{error}")
                return exit_codes.CRASHED
            else:
                if ended is not None:
                    self._ended, self._pid = ended, 0
                    return int(ended.code)

    def _lost(self, what: str) -> None:
        if self._pid:
            log.warning("%s: its Ray actor has ended and %s", self.name, what)
        self._pid = 0

    async def end(self, within_s: float) -> int | None:
        """Drain the process, and end its Ray actor. Returns the exit code, None if it is not known."""
        import ray
        from ray.exceptions import RayActorError

        owner, self._owner = self._owner, None
        if owner is None:
            return None if self._ended is None else self._ended.code
        try:
            if self._pid:  # else Ray has found no room for it, and would answer nothing
                with contextlib.suppress(RayActorError, TimeoutError):
                    async with asyncio.timeout(within_s + ANSWER_S):
                        self._ended = await owner.stop.remote(within_s) or self._ended
        finally:
            ray.kill(owner, no_restart=True)
        return None if self._ended is None else self._ended.code

    def last_lines(self) -> str:
        return "" if self._ended is None else self._ended.last_lines

    def reason(self) -> str:
        return "" if self._ended is None else self._ended.reason


def owner_maker(options: dict[str, Any]) -> Callable[[Program], Any]:
    """Return what makes the Ray actor of a program, with these options of Ray: resources, and where it runs."""
    import ray

    # Calls are not repeated: a second stop would be a second signal
    actor = ray.remote(max_restarts=-1, max_task_retries=0)(Owner)
    return lambda program: actor.options(**options).remote(program)


class NoRoom(ValueError):
    """The cluster has no room for the learner's nodes."""

    exit_code = 1  # there may be room later


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What each process asks of Ray, in CPUs and devices."""

    nodes: int
    """Nodes of the learner, the first with the bus."""
    devices_of_node: int
    devices_of_engine: int

    @classmethod
    def of(cls, config: RunConfig, devices: float) -> "Demand":
        """``devices``: GPUs of the cluster; without any, everything runs on CPUs. Raises ValueError."""
        learner = config.learner
        if learner.colocated:
            why = "Ray gives the devices of a process to no other"
            raise ValueError(f"learner.colocated: want false in a Ray cluster ({why}), got true; cure: tidemill up")
        has_devices = devices > 0
        return cls(
            nodes=learner.nodes,
            devices_of_node=learner.num_ranks // learner.nodes if has_devices else 0,
            devices_of_engine=devices_of(config.engine) if has_devices else 0,
        )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Bundles of the learner's nodes; the first has a CPU for the bus."""
        devices = {"GPU": float(self.devices_of_node)} if self.devices_of_node else {}
        return [{"CPU": 2.0 if node == 0 else 1.0, **devices} for node in range(self.nodes)]

    def options(self, name: str, group: Any) -> dict[str, Any]:
        """Return the options of the Ray actor of a process. ``group``: the placement group of the bundles."""
        role, _, number = name.partition("-")
        if role in ("engine", "actor", "scorer"):
            return {"num_cpus": 1, "num_gpus": self.devices_of_engine if role == "engine" else 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node = int(number.rpartition("-")[2] or 0) if role == "learner" else 0
        cpus = {"bus": 1, "learner": 1}.get(role, 0)
        return {
            "num_cpus": cpus,
            "num_gpus": self.devices_of_node if role == "learner" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
        }


def reserve(demand: Demand, wait_s: float = WAIT_S) -> Any:
    """Return a placement group with the bundles of the learner. Raises NoRoom after ``wait_s``. Blocks."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(demand.bundles, strategy="STRICT_SPREAD" if demand.nodes > 1 else "PACK")
    if not group.wait(wait_s):
        remove_placement_group(group)
        want = ", ".join(str(bundle) for bundle in demand.bundles)
        raise NoRoom(f"placement: want nodes with {want} for the learner, got none with room within {wait_s:g} s")
    return group


def address_in(group: Any) -> tuple[str, int]:
    """Return the address of the first bundle's node, and a port that is free there. Blocks."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    look: Callable[[], Any] = ray.remote(num_cpus=0, scheduling_strategy=place)(_address_here).remote
    address, port = ray.get(look())
    return str(address), int(port)


def _address_here() -> tuple[str, int]:
    import ray

    from tidemill.bus.client.addresses import KeptPort

    address = ray.util.get_node_ip_address()
    with KeptPort(address) as port:
        return address, port.number


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
        where = f"--run-dir {shlex.quote(str(self.config.root))}" if self.config.bus.auth else f"--bus {self.url}"
        log.info("started; look at it with: tidemill status %s", where)
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
