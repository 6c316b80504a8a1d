"""A reward in child processes: calls go to workers, and a call past its limit ends the worker with every process below
it.

::

    call --> idle worker, or a new one (up to ``workers``) --> result, checked again
                  |
                  +-- past its limit, ended or rubbish: the worker is killed, the call fails, and no call is repeated

A plain reward has one call per worker; an async one has a single worker with all calls, which is killed only if its
loop is blocked.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tidemill.bus.processes import frames
from tidemill.bus.processes.connection import ChildCallFailed, ChildConnection
from tidemill.bus.processes.limits import ProcessLimits
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward
from tidemill.rewards.port import Contract
from tidemill.rewards.processes.keeper_process import KeeperProcess

RESTART_S = 5.0
"""Seconds after a failed start of the keeper in which calls fail at once, with the same reason."""
CANCEL_S = 2.0
"""Seconds in which the event loop of an async reward confirms that a call is cancelled; a loop that does not is
blocked.
"""
BLOCKED = "another call blocked its event loop, and the process was killed"


class FunctionProcesses:
    """The workers of one reward, or of another function with a contract, while entered."""

    def __init__(self, name: str, options: Mapping[str, object], limits: ProcessLimits, contract: Contract) -> None:
        self._name, self._options, self._limits, self._contract = name, options, limits, contract
        self._keeper: KeeperProcess | None = None
        self._starting = asyncio.Lock()
        self._refused, self._refused_s = "", 0.0
        self._places = asyncio.Semaphore(limits.workers)
        self._idle: list[ChildConnection] = []
        self._shared: ChildConnection | None = None

    async def __aenter__(self) -> "FunctionProcesses":
        """Import the function in its process. Raises UnknownReward, BadRewardOption, RewardFailed."""
        contract = self._contract
        try:
            frames.encode(self._options)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"want values that JSON has, for a {contract.word} in a process of its own: {error}"
            raise BadRewardOption(self._name, "*", reason, contract.word, contract.options) from None
        await self._running_keeper()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End every process of the function."""
        if self._keeper is not None:
            await self._keeper.close()

    async def call(self, argument: object) -> Any:
        """Return the checked result of one call. Raises RewardFailed, TimeoutError."""
        try:
            message = self._contract.encode(argument)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._failed(f"want values that JSON has in label, prompt and metadata: {error}") from None
        try:
            keeper = await self._running_keeper()
            result = await (self._call_shared(keeper, message) if keeper.is_async else self._call_one(keeper, message))
        except ChildCallFailed as error:
            raise self._failed(error.reason, outside=error.outside) from None
        return self._contract.checked(self._name, result)

    def _failed(self, reason: str, *, outside: bool = False) -> RewardFailed:
        return RewardFailed(self._name, reason, self._contract.word, outside=outside)

    async def _call_one(self, keeper: KeeperProcess, message: bytes) -> object:
        async with self._places:
            self._idle = [worker for worker in self._idle if not worker.ended]
            worker = self._idle.pop() if self._idle else await keeper.worker()
            try:
                return await worker.call(message, self._limits.timeout_s)
            except ChildCallFailed:  # a reply with a reason, or the end of the worker
                raise
            except BaseException:
                keeper.kill(worker, "the call was cancelled or past its limit")
                raise
            finally:
                self._idle.append(worker)

    async def _call_shared(self, keeper: KeeperProcess, message: bytes) -> object:
        async with self._starting:
            if self._shared is None or self._shared.ended:
                self._shared = await keeper.worker()
            worker = self._shared
        return await worker.call(message, self._limits.timeout_s, cancel_s=CANCEL_S, blocked=BLOCKED)

    async def _running_keeper(self) -> KeeperProcess:
        async with self._starting:
            if self._keeper is not None and not self._keeper.ended:
                return self._keeper
            if self._refused and time.monotonic() < self._refused_s + RESTART_S:
                raise self._failed(self._refused, outside=True)
            if self._keeper is not None:
                await self._keeper.close()
            self._idle.clear()
            try:
                self._keeper = await KeeperProcess.start(self._name, self._options, self._limits, self._contract)
            except (RewardFailed, UnknownReward, BadRewardOption) as error:
                self._refused, self._refused_s = error.reason, time.monotonic()
                raise
            self._refused = ""
            return self._keeper
