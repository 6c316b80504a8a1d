"""New weights for a running SGLang server: paused in place, received, continued. Never served in part.

    begin = pause, open -> bucket, bucket, ... -> end = close, continue
                                    (refused unless every tensor came exactly once)

SGLang writes what comes straight into the weights it serves, so nothing is generated meanwhile: requests wait where they are and go on
with the new weights. A push that breaks off leaves torn weights: the server stays paused, ``version`` is -1, and only a whole update
(the next push, or a snapshot) makes it serve again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from actors.errors import BadRequest, CannotTell, EngineError, StaleEpoch, UpdateRefused
from actors.sglang.api import Api
from actors.sglang.checksums import Layout, told_of
from actors.sglang.releases import Release
from weightstore.checksums import Told

log = logging.getLogger(__name__)

COMMAND_S = 60.0
LOAD_S = 600.0
HEAD = "lm_head.weight"
"""May be sent, or left out, where it is tied to the embedding."""
Result = TypeVar("Result")


class WeightUpdates:
    """Owner of the order of updates of one server."""

    def __init__(
        self, api: Api, release: Release, names: frozenset[str], layout: Layout, *, pause: str, on_update: Callable[[int, int], None]
    ) -> None:
        """``names``: every tensor of the model; ``pause``: in_place | retract."""
        self.epoch = 0
        """The highest seen."""
        self.version = -1
        """Of the weights that are served; -1 = none whole."""
        self.completed = 0
        self.stall_s = 0.0
        """Seconds that updates have held up generation, all together."""
        self._api, self._release, self._names, self._layout, self._pause, self._on_update = api, release, names, layout, pause, on_update
        self._flush = pause == "retract"  # or what is computed again would be found in the cache
        self._open: int | None = None
        self._received: set[str] = set()
        self._paused_s: float | None = None
        self._bracket = False
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """Run a verb to its end even if the caller is cancelled, one at a time."""

        async def alone() -> Result:
            async with self._turn:
                return await verb

        task = asyncio.create_task(alone())
        self._tasks.add(task)
        task.add_done_callback(self._carried_out)
        return await asyncio.shield(task)

    def _carried_out(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def admit(self, epoch: int | None, what: str) -> None:
        """Remember the epoch; raises StaleEpoch when a higher one was seen."""
        if epoch is None:
            return
        if epoch < self.epoch:
            raise StaleEpoch(what, epoch, self.epoch)
        self.epoch = epoch

    @property
    def flush_needs_idle(self) -> bool:
        return self._release.flush_needs_idle

    async def join(self, body: Mapping[str, Any]) -> None:
        """Enter the process group that the body of /init_weights_update_group names; one of the same name is left first."""
        with contextlib.suppress(UpdateRefused):  # the server knows of none
            await self.leave(str(body.get("group_name", "weight_update_group")))
        await self._ask("/init_weights_update_group", _without_ours(body), timeout_s=float(body.get("timeout_s", COMMAND_S)))

    async def leave(self, name: str) -> None:
        await self._ask("/destroy_weights_update_group", {"group_name": name})

    async def begin(self, version: int | None) -> None:
        """Pause, and open an update; one that was left unfinished is replaced."""
        if version is None:
            raise UpdateRefused("begin: want weight_version")
        await self._hold()
        if self._release.three_phases and not self._bracket:
            await self._ask("/begin_weight_update", {})
            self._bracket = True
        self._open, self._received = version, set()

    async def bucket(self, body: Mapping[str, Any], version: int | None) -> None:
        """Receive one message of the group into the weights."""
        if self._open is None:
            raise UpdateRefused("a bucket came outside of an update: want begin_weight_update first")
        if version is not None and version != self._open:
            raise UpdateRefused(f"the open update is of version {self._open}, this bucket of version {version}")
        names = [str(name) for name in body["names"]]
        strange = [name for name in names if name not in self._names and name != HEAD]
        again = [name for name in names if name in self._received]
        if strange or again or len(set(names)) != len(names):
            raise UpdateRefused(f"{(strange or again or names)[0]}: " + ("the model has no such tensor" if strange else "came twice"))
        self.version = -1  # from here on the weights are torn until the end
        timeout_s = float(body.get("timeout_s", COMMAND_S))
        asked = {**_without_ours(body), "flush_cache": self._flush, "weight_version": str(self._open)}
        await self._ask("/update_weights_from_distributed", asked, timeout_s=timeout_s)
        self._received.update(names)

    async def end(self, version: int | None) -> float:
        """Serve what came; seconds for which generation was held up. Refused unless every tensor has come."""
        if self._open is None:
            raise UpdateRefused("end: there is no open update")
        if version is not None and version != self._open:
            raise UpdateRefused(f"end: the open update is of version {self._open}, not {version}")
        self._check_whole("end")
        await self._close_bracket()
        return await self._served(self._open)

    async def load_directory(self, directory: Path, version: int | None) -> float:
        """Take the weights from files; seconds as of ``end``."""
        if version is None:
            raise UpdateRefused("load: want weight_version")
        await self._hold()
        await self._close_bracket()
        self._open, self.version = None, -1
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": self._flush}
        await self._ask("/update_weights_from_disk", body, timeout_s=LOAD_S)
        return await self._served(version)

    async def checksums(self) -> dict[str, str]:
        """By tensor, as SGLang computes them on its first rank."""
        answer = await self._api.call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=LOAD_S)
        return dict(answer["ranks"][0]["checksums"])

    async def told(self, *, of_update: bool) -> tuple[int, Told]:
        """Version and checksums of what is served, or of what the open update has brought: all of it, and not served yet."""
        if self._layout.not_comparable:
            raise CannotTell(self._api.url, self._layout.not_comparable)
        version = self._open if of_update else self.version
        if version is None:
            raise UpdateRefused("checksums: there is no open update")
        if of_update:
            self._check_whole("checksums")
        told = told_of(await self.checksums(), self._layout)
        if unknown := self._names - {name for part in told.parts for name in part.names}:
            raise CannotTell(self._api.url, f"SGLang keeps {len(unknown)} tensors under names unknown here, among them {min(unknown)}")
        return version, told

    def _check_whole(self, what: str) -> None:
        if missing := self._names - self._received - {HEAD}:
            raise UpdateRefused(f"{what}: {len(missing)} of {len(self._names)} tensors have not come, among them {min(missing)}")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self) -> None:
        """Pause; nothing is generated from here on."""
        if self._paused_s is None:
            begun = time.perf_counter()
            await self._ask("/pause_generation", {"mode": self._pause})
            self._paused_s = begun

    async def _close_bracket(self) -> None:
        if self._bracket:
            await self._ask("/end_weight_update", {})
            self._bracket = False

    async def _served(self, version: int) -> float:
        """Go on, with whole weights."""
        await self._ask("/continue_generation", {"torch_empty_cache": False})
        assert self._paused_s is not None
        stall_s = time.perf_counter() - self._paused_s
        self._paused_s = self._open = None
        self.version, self.completed, self.stall_s = version, self.completed + 1, self.stall_s + stall_s
        log.info("weights updated version=%d stall_s=%.4f", version, stall_s)
        self._on_update(version, self.epoch)
        return stall_s

    async def _ask(self, path: str, body: Mapping[str, Any], *, timeout_s: float = COMMAND_S) -> None:
        try:
            answer = await self._api.call("POST", path, body, timeout_s=timeout_s)
        except BadRequest as error:
            raise UpdateRefused(error.reason) from error
        except EngineError as error:
            raise UpdateRefused(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpdateRefused(f"{path}: {answer.get('message')}")


def _without_ours(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("epoch", "timeout_s")}
