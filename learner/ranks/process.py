"""Parent process of the learner's feeder and ranks, or of the ranks of one node.

    parent -- feeder            one, on the first node
           -- rank 0 .. R-1     R = data x tensor x pipeline x context parallel, in equal parts on the nodes

It starts them, forwards their output, and ends them all when one fails, because a rank without its peers or its feeder
can only wait. It knows no bus and no model, and loads no torch. Unblocked by the end of a child, or by ``draining``:
then all get SIGTERM. Ranks finish the step, and write its checkpoint and the model; the feeder waits for them to leave.
Ranks that leave without ``draining`` were drained by another program: the feeder ends with an error then.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.system.processes import Child
from tidemill.learner.errors import LearnerError
from tidemill.learner.feed.feed_client import progress_noted
from tidemill.learner.feed.feed_keys import FeedKeys

log = logging.getLogger(__name__)

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
INTERFACES = Path("/sys/class/net")
UP, LOOPBACK = 0x1, 0x8  # flags of an interface (``IFF_UP``, ``IFF_LOOPBACK`` in linux/if.h)


def loopback_variables(environment: Mapping[str, str], interfaces: Path = INTERFACES) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to the loopback interface if no other is up.

    Gloo would resolve the machine's name, which may have no address there, and NCCL ignores the loopback interface.
    """
    flags = {interface.name: _flags(interface) for interface in interfaces.glob("*")}
    up = {name for name, bits in flags.items() if bits & UP}
    local = {name for name in up if flags[name] & LOOPBACK}
    if up != local or not local:
        return {}
    return {variable: min(local) for variable in IFNAMES if variable not in environment}


def _flags(interface: Path) -> int:
    try:
        return int((interface / "flags").read_text(), 16)
    except (OSError, ValueError):
        return 0


STOP_S = 2.0  # between SIGTERM and SIGKILL for the children of a failed learner; all that must last is stored already


StartRank = Callable[[int, str, Sequence[str], Mapping[str, str], FeedKeys, int], Awaitable[Child]]
"""Starts a rank of this node: with the arguments of ``start_here``."""


class ChildFailed(LearnerError):
    """The feeder or a rank has ended with an error, or was killed (a negative code)."""

    def __init__(self, name: str, code: int, last_lines: tuple[str, ...], reason: str = "") -> None:
        """``reason``: the message of the error that ended it, if it is known; without it, that in its last lines."""
        super().__init__(name, code, last_lines, reason)
        self.name, self.code, self.last_lines = name, code, last_lines
        self.reason = reason or exit_codes.reason(last_lines)

    @property
    def exit_code(self) -> int:
        """Exit code of the learner as a whole."""
        return self.code if self.code in (*exit_codes.FINAL, exit_codes.NOT_IN_TIME) else exit_codes.CRASHED

    def __str__(self) -> str:
        if self.code in exit_codes.FINAL and self.reason:
            return self.reason
        first = f"{self.name} {exit_codes.how(self.code)}" + (f": {self.reason}" if self.reason else "")
        return "\n".join([first, *(f"  {line}" for line in self.last_lines)])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """The ranks of one node, and where they find the others. On one machine they are all ranks."""

    first_rank: int = 0
    num_ranks: int
    world: int
    """Number of ranks of all nodes."""
    master: tuple[str, int]
    """Host and port of torch's store, which rank 0 opens."""
    feeder_url: str
    listen: str = ""
    """Where this node's feeder listens; empty = the feeder is on another node."""
    keys: FeedKeys
    epoch: int = 0
    """Epoch that was raised for this start; 0 = the feeder raises it."""


async def run_learner(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    draining: asyncio.Event,
    threads: int = 1,
    host: str = "127.0.0.1",
    drain_s: float = 600.0,
    variables: Sequence[Mapping[str, str]] = (),
    on_sigterm: Callable[[], None] = lambda: None,
    start_rank: StartRank | None = None,
) -> None:
    """Run feeder and ranks on one machine; ends and raises as ``run_part``, which has the other arguments."""
    with KeptPort(host) as feeder_port, KeptPort(host) as master_port:  # it takes seconds until the children listen
        url = f"tcp://{host}:{feeder_port.number}"
        part = NodePart(
            num_ranks=num_ranks,
            world=num_ranks,
            master=(host, master_port.number),
            feeder_url=url,
            listen=url,
            keys=FeedKeys.new(),
        )
        await run_part(
            arguments,
            part,
            draining=draining,
            threads=threads,
            drain_s=drain_s,
            variables=variables,
            on_sigterm=on_sigterm,
            start_rank=start_rank,
        )


async def run_part(
    arguments: Sequence[str],
    part: NodePart,
    *,
    draining: asyncio.Event,
    threads: int = 1,
    drain_s: float = 600.0,
    variables: Sequence[Mapping[str, str]] = (),
    on_step: Callable[[], None] = lambda: None,
    on_sigterm: Callable[[], None] = lambda: None,
    start_rank: StartRank | None = None,
) -> None:
    """Run the processes of a node until all have succeeded, or have drained after ``draining``.

    ``arguments``: of ``python -m tidemill feeder`` and ``rank``. ``variables``: further environment of each rank.
    ``on_step`` is called after steps of its ranks, ``on_sigterm`` as soon as one has received SIGTERM.
    ``start_rank``: None = they are children of this process. Raises
    ChildFailed when a child fails or does not drain within ``drain_s``, after the others have ended; a child with a
    final exit code is named first, because the failures of the others follow from it.
    """
    feeder: Child | None = None
    ranks: list[Child] = []
    try:
        if part.listen:
            words = ["feeder", *arguments, "--feeder-url", part.listen]
            words += ["--epoch", str(part.epoch)] if part.epoch else []
            feeder = await start_here(0, "feeder", words, {}, part.keys.for_feeder())
        with progress_noted(on_step, on_sigterm) as progress:
            for local in range(part.num_ranks):
                environment = {**_rank_environment(part, local, threads), **(variables[local] if variables else {})}
                name, words = f"rank {part.first_rank + local}", ["rank", *arguments, "--feeder-url", part.feeder_url]
                ranks.append(
                    await (start_rank or start_here)(local, name, words, environment, part.keys.for_ranks(), progress)
                )
            await watch_children(feeder, ranks, draining, drain_s)
    except ChildFailed as first:
        children = [*([feeder] if feeder else []), *ranks]
        await end_children(children)
        raise next((failure_of(child) for child in children if child.returncode in exit_codes.FINAL), first) from None
    finally:
        await end_children([*([feeder] if feeder else []), *ranks])


async def start_here(
    local: int, name: str, arguments: Sequence[str], environment: Mapping[str, str], keys: FeedKeys, progress: int = -1
) -> Child:
    """Start ``tidemill ARGUMENTS`` as a child of this process, whatever its number on this node."""
    # -P: a file in the user's directory with the name of one of our imports must not be taken for it (decision 056).
    return await start_child(name, [sys.executable, "-P", "-m", "tidemill", *arguments], environment, keys, progress)


async def start_child(
    name: str, command: Sequence[str], environment: Mapping[str, str], keys: FeedKeys, progress: int = -1
) -> Child:
    descriptor = keys.pipe()
    words = [*command, "--feeder-keys", str(descriptor), *(("--progress", str(progress)) if progress >= 0 else ())]
    child = Child(name, words, environment={**environment, "PYTHONUNBUFFERED": "1"})
    try:
        await child.start(pass_fds=(descriptor, *((progress,) if progress >= 0 else ())))
    finally:
        os.close(descriptor)
    log.info("started child=%s pid=%d", name, child.pid)
    return child


async def watch_children(feeder: Child | None, ranks: Sequence[Child], draining: asyncio.Event, drain_s: float) -> None:
    """Wait until all children have ended with success. Raises ChildFailed for the first that fails."""
    feeders = (feeder,) if feeder is not None else ()
    ends = {asyncio.create_task(child.wait()): child for child in (*feeders, *ranks)}
    drain = asyncio.create_task(draining.wait())
    running: set[asyncio.Task[int]] = set(ends)
    deadline: float | None = None
    loop = asyncio.get_running_loop()
    try:
        while running:
            waits: set[asyncio.Task[int] | asyncio.Task[bool]] = {*running, *(() if deadline else (drain,))}
            timeout = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            # Only the drain has a deadline; without it the wait ends only with a child or with ``draining``.
            if not done:
                late = ends[next(iter(running))]
                raise ChildFailed(
                    late.name,
                    exit_codes.NOT_IN_TIME,
                    (f"{exit_codes.LINE}not drained after {drain_s:.0f} s", *late.lines()),
                )
            if drain in done and deadline is None:
                deadline = loop.time() + drain_s
                log.info("draining: the ranks finish their step")
                _signal(
                    (*feeders, *ranks), signal.SIGTERM
                )  # the feeder first: it must not take the ranks' leave for a surprise
            for task in [task for task in running if task in done]:
                running.discard(task)
                _judge(ends[task], task.result(), drained=deadline is not None)
    finally:
        for task in (*ends, drain):
            task.cancel()
        await asyncio.gather(*ends, drain, return_exceptions=True)


def _judge(child: Child, code: int, *, drained: bool) -> None:
    log.info("ended child=%s code=%d", child.name, code)
    if code != 0 and not (
        drained and code in (exit_codes.NOT_IN_TIME, -signal.SIGTERM)
    ):  # the latter: it had not begun
        raise failure_of(child)


def failure_of(child: Child) -> ChildFailed:
    assert child.returncode is not None
    return ChildFailed(child.name, child.returncode, tuple(child.lines()), child.reason())


def _signal(children: Sequence[Child], number: signal.Signals) -> None:
    for child in children:
        child.send(number)


async def end_children(children: Sequence[Child]) -> None:
    """End all children by SIGTERM, and SIGKILL after ``STOP_S``; read their output, whose end names the reason."""
    if not children:
        return
    _signal(children, signal.SIGTERM)
    ends = [asyncio.create_task(child.wait()) for child in children]
    try:
        await asyncio.wait(ends, timeout=STOP_S)
        _signal(children, signal.SIGKILL)
        await asyncio.gather(*(child.exited() for child in children))
        await asyncio.wait(ends, timeout=STOP_S)  # a descendant that left the process group may keep the output open
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def _rank_environment(part: NodePart, local: int, threads: int) -> dict[str, str]:
    host, port = part.master
    return {
        "RANK": str(part.first_rank + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(part.world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic cuBLAS reads it when CUDA is initialised
        # Under torchrun, torch would take the store that torchrun's agent serves, which is not the store of this start.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # gives the order of kernels that Megatron's tensor parallelism relies on
        **loopback_variables(os.environ),
    }
