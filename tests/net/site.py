"""A run on several machines of a lab, started as in docs/operating.md, with a desk from which the test looks at it.

desk    the test        node    tidemill learner (with node1: a learner of two nodes)
bus     tidemill bus    gpu     tidemill host engines=1
router  tidemill router      act0, act1   tidemill host actors=1
"""

import asyncio
import contextlib
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from tests.chaos.auditor import judge
from tests.net.lab import Lab, Started
from tests.waits import until
from tests.whole.prepared import ROOT, put_prepared
from tidemill.bus.errors import NotFound
from tidemill.bus.streams.bus import Bus, connect
from tidemill.launch.run.audit import RunAccounting, audit
from tidemill.launch.run.checkpoint_cursor import read_cursor

PORT = 4222
SITE = ("bus", "node", "gpu", "act0", "act1", "router")
"""The machines of a run, in the order in which they are started."""
NODES = ("node", "node1")
"""The learner's machines, by node rank."""
NO_END = 1_000_000
"""Steps of a run that the test ends."""


class Site:
    """One run. ``start`` its machines; ``end_all_but_bus`` and ``audited`` at the end."""

    def __init__(self, lab: Lab, config: Path, *settings: str, run: str, machines: Sequence[str] = SITE) -> None:
        """With ``node1`` among the machines the learner has two nodes, each with the run's directory on a disk of its
        own.
        """
        self.lab, self.config, self.run, self.names = lab, config, run, tuple(machines)
        self.nodes = tuple(name for name in NODES if name in machines)
        self._given = settings
        self._giventings = [
            word for setting in (f"directory={lab.disk / 'run'}", *settings) for word in ("--set", setting)
        ]
        self.started: dict[str, Started] = {}

    @property
    def url(self) -> str:
        """Address of the bus."""
        return f"nats://{self.lab['bus'].in_url}:{PORT}"

    @property
    def directory(self) -> Path:
        """Directory of the run on the disk of the first node, as this machine sees it."""
        return self.on_disk("node")

    def on_disk(self, name: str) -> Path:
        """Return the directory of the run on a machine's disk, as this machine sees it."""
        return self.lab[name].disk / "run"

    def replace_disk(self, name: str) -> None:
        """Give a machine that is off an empty disk. A node of the learner gets model and prompts, which are copies
        everywhere.
        """
        shutil.rmtree(self.lab[name].disk)
        if name in self.nodes:
            self.prepare(name)

    def prepare(self, name: str) -> None:
        """Put model and prompts on a machine's disk."""
        put_prepared(self.config, self.on_disk(name), *self._given)

    def command(self, name: str) -> list[str]:
        """Return the command of a machine."""
        configured, on_bus = ["--config", str(self.config), *self._giventings], ["--bus", self.url]
        host = ["host", *on_bus, "--dir", f"{self.lab.disk}/host"]
        at = [f"bus.host={self.lab['bus'].address}", f"bus.port={PORT}", "bus.insecure=true"]
        commands = {
            "bus": ["bus", *configured, *(word for setting in at for word in ("--set", setting))],
            **{name: ["learner", *configured, *on_bus, *self._rank(name)] for name in self.nodes},
            "gpu": [*host, "engines=1"],
            "act0": [*host, "actors=1"],
            "act1": [*host, "actors=1"],
            "router": ["router", *on_bus, "--host", "auto", "--id", "router"],
        }
        return [sys.executable, "-m", "tidemill", *commands[name]]

    def _rank(self, name: str) -> list[str]:
        """Return the words of the command for one of several nodes."""
        return (
            ["--nodes", str(len(self.nodes)), "--node-rank", str(self.nodes.index(name))] if len(self.nodes) > 1 else []
        )

    def start(self, *names: str) -> None:
        """Start the processes of these machines; default: all."""
        for name in names or self.names:
            log = self.lab.directory / f"{name}.log"
            self.started[name] = self.lab[name].start(self.command(name), log=log, cwd=ROOT)

    def logs(self, last: int = 1500) -> str:
        """Return the ends of all logs, for a failure's message."""
        files = sorted([*self.lab.directory.glob("*.log"), *self.lab.directory.glob("disks/*/host/logs/*.log")])
        return "\n".join(
            f"== {file.relative_to(self.lab.directory)}\n{file.read_text(errors='replace')[-last:]}" for file in files
        )

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """Connect to the bus from the desk, and wait until it has streams."""
        async with connect(self.url, self.run, name="desk", wait_s=60) as bus:
            await until(lambda: _has_streams(bus), every_s=0.1)  # nothing can be subscribed to before
            yield bus

    def end_all_but_bus(self) -> dict[str, int]:
        """Drain all machines but the bus, actors first and the engines last, which they need; return the exit codes."""
        codes: dict[str, int] = {}
        for stage in (("act0", "act1", "router"), NODES, ("gpu",)):
            names = [name for name in stage if name in self.started]
            for name in names:
                self.started[name].send(signal.SIGTERM)
            codes |= {name: self.started[name].end(90, signalled=True) for name in names}
        return codes

    async def audited(self) -> RunAccounting:
        """Audit a run at rest, which must be right: by the project's own audit, and by the tests' auditor, which shares
        no code with it.
        """
        async with self.bus() as bus:
            accounting, _ = await audit(bus, await asyncio.to_thread(read_cursor, self.directory / "checkpoints"))
        assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, []), accounting
        verdict = await judge(self.url, self.run, self.directory / "checkpoints", {})
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
        return accounting


async def _has_streams(bus: Bus) -> bool:
    """Return whether the run's bus has written its live row, which comes after the streams."""
    try:
        return (await bus.rows("live").read("bus.bus"))[0] is not None
    except NotFound:
        return False


@contextlib.contextmanager
def site(
    directory: Path,
    config: Path,
    *settings: str,
    machines: Sequence[str] = SITE,
    spare: Sequence[str] = (),
    hosts: str = "",
    is_ipv6: bool = False,
) -> Iterator[Site]:
    """Make the machines, their disks and a run, and put this thread into the desk's network. Nothing is started yet.

    ``spare``: machines without a process of the run.
    """
    with Lab(directory, "desk", *machines, *spare, hosts=hosts, is_ipv6=is_ipv6) as lab:
        made = Site(lab, config, *settings, run=config.stem, machines=machines)
        for name in made.nodes:
            made.prepare(name)
        with lab["desk"].inside():
            yield made
