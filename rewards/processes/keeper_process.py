"""The actor's side of a keeper and its workers: starts, calls, kills. Nothing here blocks the event loop.

Knows no policy: ``tidemill.rewards.processes.pool`` decides which worker gets a call, and how it goes on after one that
fails.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict

from tidemill.bus.processes.connection import START_S, ChildCallFailed, ChildConnection
from tidemill.bus.processes.limits import ProcessLimits, environment
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward
from tidemill.rewards.port import Contract
from tidemill.rewards.processes import keeper as keeper_program
from tidemill.rewards.processes.keeper import command, settings_file

logger = logging.getLogger(__name__)

KILL_S = 10.0
"""Seconds in which a keeper ends a worker or itself; a keeper that needs longer is killed, and its workers with it."""


class KeeperProcess:
    """A running keeper. ``start`` makes one."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self.is_async = False
        self.ended = ""
        """Why it starts no more workers; empty while it does."""
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
