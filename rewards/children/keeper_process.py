"""The actor's side of a keeper and its workers: starts, calls, kills. Nothing here blocks the event loop.

Knows no policy: ``tidemill.rewards.children.pool`` decides which worker gets a call, and how it goes on after one that fails.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from tidemill.bus.system.proxies import without_proxy
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.rewards.children import frames
from tidemill.rewards.children.keeper import command, settings_file
from tidemill.rewards.children.limits import Limits
from tidemill.rewards.contract import Contract
from tidemill.rewards.errors import BadRewardOption, RewardFailed, UnknownReward

logger = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for the import of a reward, with the packages that it needs."""
KILL_S = 10.0
"""Seconds in which a keeper ends a worker or itself; a keeper that needs longer is killed, and its workers with it."""
LAST_WORDS_S = 1.0
"""Seconds for reading the output that a process wrote before it ended; its connection stays open where a process below it lives on."""
SECRET_PREFIXES = ("TIDEMILL_", "NATS_")
"""Variables that children do not inherit: they may hold the credentials of the bus."""


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a reward's processes: without the credentials of the bus, with one thread for numerical libraries, and
    without a proxy to this machine."""
    kept = {name: value for name, value in own.items() if not name.startswith(SECRET_PREFIXES)}
    # A keeper with threads cannot fork, and OpenBLAS starts some when numpy is imported.
    return without_proxy({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **kept})


class Worker:
    """Connection to one worker process."""

    def __init__(self, id: int, kill: "Callable[[Worker, str], None]") -> None:
        """``kill`` ends the process, with a reason for its calls."""
        self.id, self._kill = id, kill
        self.ended = ""
        """Why it takes no more calls; empty while it does."""
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._ids = itertools.count(1)
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, connection: socket.socket) -> None:
        """Begin to read, and wait until the process is ready. Raises RewardFailed with an empty name when it ends before, TimeoutError."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader), name=f"reward worker {self.id}")
        async with asyncio.timeout(START_S):
            await self._up

    async def call(self, request: bytes, timeout_s: float, *, cancel_s: float = 0.0) -> object:
        """Return the result of one call. Raises RewardFailed with the worker's reason, TimeoutError.

        ``cancel_s``: a call past its limit is cancelled, and the worker, if it is alive, confirms that within this time; else it is ended.
        """
        if self.ended or self._writer is None:
            raise RewardFailed("", self.ended or "not started")
        id = next(self._ids)
        frame = frames.encode_call(id, request)
        future = self._calls[id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(frame)
                return await asyncio.shield(future)
        finally:
            if cancel_s and not future.done():
                self._writer.write(frames.encode({"id": id, "cancel": True}))
                asyncio.get_running_loop().call_later(cancel_s, self._give_up, id)
            else:
                self._calls.pop(id, None)
                future.cancel()

    def process_ended(self, reason: str) -> None:
        """End, once the output from before the process's end is read: the keeper may report the end before the last reply comes."""
        if self._reading is None or self._reading.done():
            self.end(reason)
            return
        timer = asyncio.get_running_loop().call_later(LAST_WORDS_S, self.end, reason)

        def read(_: object) -> None:
            """End, now that nothing is left to read."""
            timer.cancel()
            self.end(reason)

        self._reading.add_done_callback(read)

    def end(self, reason: str) -> None:
        """Take no more calls, and fail those that run."""
        if self.ended:
            return
        self.ended = reason
        futures: list[asyncio.Future[Any]] = [self._up, *self._calls.values()]
        for future in futures:
            if not future.done():
                future.set_exception(RewardFailed("", reason))
                future.exception()  # a call that was cancelled does not retrieve it
        self._calls.clear()
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()

    def _give_up(self, id: int) -> None:
        if self._calls.pop(id, None) is not None:
            self._kill(self, "another call blocked its event loop, and the process was killed")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await frames.read(reader)) is not None:
                self._take(message)
        except frames.BadFrame as error:
            self._kill(self, f"its process wrote {error}")
        except OSError as error:
            self._kill(self, f"connection to its process: {error}")

    def _take(self, message: JsonMapping) -> None:
        if "up" in message:
            if not self._up.done():
                self._up.set_result(None)
            return
        id = message.get("id")
        future = self._calls.pop(id, None) if isinstance(id, int) else None
        if future is None or future.done():
            return
        if "result" in message:
            future.set_result(message["result"])
        else:
            future.set_exception(RewardFailed("", str(message.get("failed", "a reply without a result"))))
            future.exception()
        if "last" in message:
            self._kill(self, "it takes no more calls")


class KeeperProcess:
    """A running keeper. ``start`` makes one."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self.is_async = False
        self.ended = ""
        """Why it starts no more workers; empty while it does."""
        self._workers: dict[int, Worker] = {}
        self._killing: dict[int, asyncio.TimerHandle] = {}
        self._ids = itertools.count(1)
        self._started: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, name: str, options: Mapping[str, object], limits: Limits, contract: Contract) -> "KeeperProcess":
        """Start a keeper and wait until it has imported the function.

        Raises UnknownReward, BadRewardOption, and RewardFailed when it ends or is not ready within ``START_S``.
        """
        start = {"name": name, "options": dict(options), "limits": asdict(limits), "contract": contract.path, "word": contract.word}
        settings = settings_file(start)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command("keeper", theirs.fileno()),
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
            raise RewardFailed(name, f"not imported within {START_S:g} s", contract.word) from None
        except BaseException:
            await keeper.close()
            raise
        keeper.is_async = bool(ready["async"])
        logger.info(contract.word + " imported name=%s pid=%d async=%s forks=%s", name, process.pid, keeper.is_async, ready["forks"])
        return keeper

    async def worker(self) -> Worker:
        """Start a worker. Raises RewardFailed with an empty name."""
        if self.ended:
            raise RewardFailed("", self.ended)
        worker = Worker(next(self._ids), self.kill)
        ours, theirs = socket.socketpair()
        self._workers[worker.id] = worker
        try:
            self._send({"fork": worker.id}, theirs.fileno())
            theirs.close()
            await worker.open(ours)
        except TimeoutError:
            self.kill(worker, f"not ready within {START_S:g} s")
            raise RewardFailed("", worker.ended) from None
        except BaseException:
            self.kill(worker, "cancelled while it was started")
            raise
        finally:
            theirs.close()
        return worker

    def kill(self, worker: Worker, reason: str) -> None:
        """End a worker and every process below it; its calls fail with ``reason``."""
        worker.end(reason)
        if worker.id in self._workers and worker.id not in self._killing:
            self._killing[worker.id] = asyncio.get_running_loop().call_later(KILL_S, self._kill_self)
            self._send({"kill": worker.id})

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
            self._started.set_exception(RewardFailed("", reason))
            self._started.exception()

    def _kill_self(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
