"""A process on another node, for the supervisor as one of its own (``Supervised``), through its Ray actor."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.bus import exit_codes
from tidemill.launch.deploy.ray_cluster.owner import Ended, Owner, Program

log = logging.getLogger(__name__)

SLICE_S = 1.0
"""Seconds of one call that waits for the end of a process: a call to stop it waits no longer."""
AWAY_EVERY_S = 1.0
"""Interval of calls to an owner that Ray is starting again, in seconds."""
ANSWER_S = 30.0
"""Seconds beyond its own limit in which an owner answers a call to stop its process."""


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
