"""The learner's side of a push by handles, written after `docs/wire.md` and without its code: one socket, one memfd,
msgpack.
"""

import asyncio
import itertools
import mmap
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import torch
import zmq.asyncio
from torch import Tensor

from tests.engine_serving import Served
from tests.tiny_models import named_weights
from tests.waits import LIMIT_S


class HandlePush:
    """Answers are (status, the rest of the answer), as over HTTP."""

    def __init__(self, socket: zmq.asyncio.Socket, epoch: int) -> None:
        self._socket, self._epoch, self._ids, self._version = socket, epoch, itertools.count(), 0

    async def ask(self, verb: str, **fields: Any) -> tuple[int, Any]:
        id = next(self._ids)
        await self._socket.send(
            msgpack.packb({"verb": verb, "id": id, "epoch": self._epoch, "timeout_s": LIMIT_S, **fields})
        )
        async with asyncio.timeout(LIMIT_S):
            answer = msgpack.unpackb(await self._socket.recv())
        assert answer.pop("id") == id
        status = answer.pop("status")
        return status, {"success": status == 200, **answer}

    async def begin(self, version: int) -> tuple[int, Any]:
        self._version = version
        return await self.ask("begin", version=version)

    async def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, Any]:
        tensors = list(tensors)
        payload = b"".join(
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in tensors
        )
        fd = os.memfd_create("a learner's")
        try:
            os.ftruncate(fd, 2 * mmap.PAGESIZE + len(payload))
            os.pwrite(fd, payload, mmap.PAGESIZE)
            there = os.fstat(fd)
            handle = {"pid": os.getpid(), "fd": fd, "inode": there.st_ino, "size": there.st_size}
            handle |= {"offset": mmap.PAGESIZE, "num_bytes": len(payload)}
            specs = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors]
            return await self.ask("bucket", version=self._version, handle=handle, specs=msgpack.packb(specs))
        finally:
            os.close(fd)

    async def end(self, version: int) -> tuple[int, Any]:
        return await self.ask("end", version=version)

    async def whole(self, model: Any, version: int) -> Any:
        """Push every tensor of the model in two buckets."""
        tensors = named_weights(model)
        assert (await self.begin(version))[0] == 200
        for part in (tensors[:5], tensors[5:]):
            status, answer = await self.bucket(part)
            assert status == 200, answer
        status, answer = await self.end(version)
        assert status == 200, answer
        return answer


@asynccontextmanager
async def joined_by_handles(served: Served, *, epoch: int = 1) -> AsyncIterator[HandlePush]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(served.engine.handles)
    try:
        push = HandlePush(socket, epoch)
        assert (await push.ask("join", pid=os.getpid()))[0] == 200
        yield push
    finally:
        socket.close(linger=0)
        context.term()
