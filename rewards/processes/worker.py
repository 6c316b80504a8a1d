"""The process that calls a reward: one call at a time if it is a plain function, any number if it is async.

Consumes requests from its connection, produces a result or a reason for each; ends when the connection does. Everything
that the reward can raise is a reason. The keeper and the actor handle a reward that hangs, exits or writes rubbish.
"""

import asyncio
import inspect
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable
from functools import partial

from tidemill.bus.system import limits
from tidemill.bus.system.child_calls import MAX_RESULT_BYTES, encode_frame, read_frame, receive_frame
from tidemill.bus.system.functions import repr_at
from tidemill.bus.system.output import lossy_standard_files
from tidemill.bus.system.processes import die_with_parent
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.errors import RewardFailed, is_outside
from tidemill.rewards.port import contract_at
from tidemill.rewards.registry import Bound, bind

MAX_REASON = 2000  # Characters of the text of an error that are sent


def main() -> None:
    """Run a worker that imports the reward by itself; its settings are on stdin."""
    start, parent = json.load(sys.stdin), os.getppid()
    lossy_standard_files()
    connection = socket.socket(fileno=int(sys.argv[1]))
    function = bind(start["name"], start["options"], contract_at(start["contract"]))
    serve(connection, function, limits.ProcessLimits(**start["limits"]), parent)


def serve(connection: socket.socket, function: Bound, limit: limits.ProcessLimits, keeper: int) -> None:
    """Answer requests until the connection ends. Does not return before."""
    die_with_parent(keeper)()
    if os.getsid(0) != os.getpid():
        os.setsid()
    limits.become_subreaper()
    limits.limit_process(limit.memory_mb)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _seed()
    connection.setblocking(True)
    connection.sendall(encode_frame({"up": True}))
    if function.is_async:
        asyncio.run(serve_many(connection, function, limit))
    else:
        _serve_one_by_one(connection, function, limit)


def _seed() -> None:
    # A forked process has the keeper's generators: all workers would draw the same numbers.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _serve_one_by_one(connection: socket.socket, function: Bound, limit: limits.ProcessLimits) -> None:
    while (message := receive_frame(connection)) is not None:
        limits.limit_cpu(limit.timeout_s * (os.cpu_count() or 1))
        reply, goes_on = _answer(function, message)
        connection.sendall(reply)
        if not goes_on:
            return


def _answer(function: Bound, message: JsonMapping) -> tuple[bytes, bool]:
    """Return the reply to a request, and whether this process can be used again."""
    try:
        result = function(function.contract.decode(message["request"]))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return _reply(message["id"], result=function.contract.checked(function.name, result)), True
    except BaseException as error:  # of the user's code, SystemExit and KeyboardInterrupt too
        # After a failed allocation anything may be half done: the actor takes another process.
        if isinstance(error, MemoryError):
            return _failed(message["id"], error, last="it takes no more calls"), False
        return _failed(message["id"], error), True


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _reply(number: int, **fields: object) -> bytes:
    frame = encode_frame({"id": number, **fields})
    if len(frame) > MAX_RESULT_BYTES:
        reason = f"a result of {len(frame)} bytes, want at most {MAX_RESULT_BYTES}"
        return encode_frame({"id": number, "failed": reason})
    return frame


def _failed(number: int, error: BaseException, **fields: object) -> bytes:
    reason = error.reason if isinstance(error, RewardFailed) else repr_at(error)
    return _reply(number, failed=str(reason)[:MAX_REASON], outside=is_outside(error), **fields)


async def serve_many(connection: socket.socket, function: Bound, limit: limits.ProcessLimits) -> None:
    """Answer the requests of a connection, many at a time, until it is closed."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    calls: dict[int, asyncio.Task[bytes]] = {}

    async def call(message: JsonMapping) -> bytes:
        """Return the reply to one request."""
        try:
            result = await function(function.contract.decode(message["request"]))
            return _reply(message["id"], result=function.contract.checked(function.name, result))
        except BaseException as error:  # of the user's code
            return _failed(message["id"], error)

    def send_reply(number: int, task: asyncio.Task[bytes]) -> None:
        """Send the reply. A cancelled call has one, too, even if it had not begun: by it the actor knows that the loop
        is not blocked.
        """
        writer.write(_failed(number, asyncio.CancelledError()) if task.cancelled() else task.result())
        del calls[number]

    while (message := await read_frame(reader, 1 << 32)) is not None:
        number = message["id"]
        if "cancel" not in message:
            calls[number] = asyncio.create_task(call(message))
            calls[number].add_done_callback(partial(send_reply, number))
        elif number in calls:
            calls[number].cancel()
    for task in calls.values():
        task.cancel()
    writer.close()
