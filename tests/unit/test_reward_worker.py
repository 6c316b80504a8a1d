"""The process of an async reward, run as a coroutine: calls that are cancelled, and their replies."""

import asyncio
import socket
from typing import Any

from tests.waits import LIMIT_S
from tidemill.bus.system.child_calls import encode_call, encode_frame, read_frame
from tidemill.bus.system.limits import ProcessLimits
from tidemill.rewards.processes import worker
from tidemill.rewards.registry import REWARD, Bound


async def _never(request: Any) -> float:
    await asyncio.Event().wait()
    return 0.0


async def test_a_call_that_is_cancelled_before_it_begins_has_a_reply_too() -> None:
    """Without one the actor takes the process for one that is blocked, and kills it with the other calls."""
    ours, theirs = socket.socketpair()
    function = Bound("never", _never, {}, REWARD)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(
        encode_call(1, b"{}") + encode_frame({"id": 1, "cancel": True})
    )  # read together: the call has had no turn
    serving = asyncio.create_task(worker.serve_many(theirs, function, ProcessLimits()))
    async with asyncio.timeout(LIMIT_S):
        reply = await read_frame(reader)
    assert reply is not None and (reply["id"], "CancelledError" in reply["failed"]) == (1, True)
    writer.close()
    await writer.wait_closed()
    await serving
