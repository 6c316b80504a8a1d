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
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tidemill.bus.system.child_calls import START_S, ChildCallFailed, ChildConnection, encode_frame
from tidemill.bus.system.limits import ProcessLimits, environment
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward
from tidemill.rewards.port import Contract
from tidemill.rewards.processes import keeper as keeper_program
from tidemill.rewards.processes.keeper import command, settings_file

logger = logging.getLogger(__name__)

# Seconds in which a keeper ends a worker or itself; a keeper that needs longer is killed, and its workers with it
KILL_S = 10.0


class KeeperProcess:
    """A running keeper. ``start`` makes one."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self.is_async = False
        self.ended = ""  # Why it starts no more workers; empty while it does
        self._workers: dict[int, ChildConnection] = {}
        self._killing: dict[int, asyncio.TimerHandle] = {}
        self._ids = itertools.count(1)
        self._started: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, name: str, options: Mapping[str, object], limits: ProcessLimits, contract: Contract
    ) -> "KeeperProcess":
        """Start a keeper and wait until it has imported the function.

        Raises UnknownReward, BadRewardOption, and RewardFailed when it ends or is not ready within ``START_S``.
        """
        start = {"name": name, "options": dict(options), "limits": asdict(limits)}
        settings = settings_file({**start, "contract": contract.path, "word": contract.word})
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command(keeper_program.__name__, theirs.fileno()),
                stdin=settings,
                env=environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(settings)
        keeper = cls(process, control)
        asyncio.get_running_loop().add_reader(control.fileno(), keeper._receive)
        try:
            async with asyncio.timeout(START_S):
                ready = await keeper._started
        except TimeoutError:
            await keeper.close()
            raise RewardFailed(name, f"not imported within {START_S:g} s", contract.word, outside=True) from None
        except ChildCallFailed as error:
            await keeper.close()
            raise RewardFailed(name, error.reason, contract.word, outside=True) from None
        except BaseException:
            await keeper.close()
            raise
        keeper.is_async = bool(ready["async"])
        text = contract.word + " imported name=%s pid=%d async=%s forks=%s"
        logger.info(text, name, process.pid, keeper.is_async, ready["forks"])
        return keeper

    async def worker(self) -> ChildConnection:
        """Start a worker. Raises ChildCallFailed."""
        if self.ended:
            raise ChildCallFailed(self.ended, ended=True, outside=True)
        worker = ChildConnection(next(self._ids), self.kill)
        ours, theirs = socket.socketpair()
        self._workers[worker.number] = worker
        try:
            self._send({"fork": worker.number}, theirs.fileno())
            theirs.close()
            await worker.open(ours)
        except TimeoutError:
            self.kill(worker, f"not ready within {START_S:g} s")
            raise ChildCallFailed(worker.ended, ended=True) from None
        except BaseException:
            self.kill(worker, "cancelled while it was started")
            raise
        finally:
            theirs.close()
        return worker

    def kill(self, worker: ChildConnection, reason: str) -> None:
        """End a worker and every process below it; its calls fail with ``reason``."""
        worker.end(reason)
        if worker.number in self._workers and worker.number not in self._killing:
            self._killing[worker.number] = asyncio.get_running_loop().call_later(KILL_S, self._kill_self)
            self._send({"kill": worker.number})

    async def close(self) -> None:
        """End the keeper and everything below it."""
        self._end("closed")
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            self._kill_self()
            await self._process.wait()
        finally:
            if self._process.returncode is None:  # cancelled, in either wait
                self._kill_self()

    def _send(self, message: Mapping[str, object], *descriptors: int) -> None:
        if self.ended:
            return
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except OSError as error:  # it has ended, or does not read: its socket is full
            self._end(f"its keeper takes no commands: {error}")
            self._kill_self()

    def _receive(self) -> None:
        try:
            packet = self._control.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._end("its keeper process ended")
            return
        message = json.loads(packet)
        if "ready" in message and not self._started.done():
            self._started.set_result(message)
        elif "refused" in message and not self._started.done():
            refused = BadRewardOption if message["refused"] == "BadRewardOption" else UnknownReward
            self._started.set_exception(refused(*message["arguments"]))
        elif "ended" in message:
            self._worker_ended(message)

    def _worker_ended(self, message: JsonMapping) -> None:
        worker, timer = self._workers.pop(message["ended"], None), self._killing.pop(message["ended"], None)
        if timer is not None:
            timer.cancel()
        if worker is not None:
            worker.process_ended(message["reason"])
        if message.get("left"):
            logger.warning("processes of a reward that go on forking count=%d", message["left"])

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = reason
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        for timer in self._killing.values():
            timer.cancel()
        self._killing.clear()
        for worker in self._workers.values():
            worker.end(reason)
        self._workers.clear()
        if not self._started.done():
            self._started.set_exception(ChildCallFailed(reason, ended=True, outside=True))
            self._started.exception()

    def _kill_self(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


RESTART_S = 5.0  # Seconds after a failed start of the keeper in which calls fail at once, with the same reason
# Seconds in which the event loop of an async reward confirms that a call is cancelled; a loop that does not is blocked
CANCEL_S = 2.0
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
            encode_frame(self._options)
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
