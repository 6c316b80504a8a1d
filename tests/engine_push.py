"""The learner's side of a push by broadcast, and the weights that an engine has afterwards; without the learner's
code.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from tests.engine_serving import Served
from tests.tiny_models import named_weights
from tests.waits import LIMIT_S
from tidemill.weightstore.transport.broadcast import BroadcastGroup


class Push:
    """The learner's side: one group of two processes, buckets sent while the engine's request to receive them is
    open.
    """

    def __init__(self, served: Served, group: BroadcastGroup, **fields: Any) -> None:
        self.served, self.group, self.fields = served, group, fields

    async def begin(self, version: int | None = None) -> tuple[int, Any]:
        return await self.served.post(
            "/begin_weight_update", self.fields | {"weight_version": None if version is None else str(version)}
        )

    async def bucket(
        self, tensors: Iterable[tuple[str, Tensor]], *, send: bool = True, flat: bool = True, **fields: Any
    ) -> tuple[int, Any]:
        tensors = list(tensors)
        body = told(tensors) | {"load_format": "flattened_bucket" if flat else None, "group_name": self.group.name}
        asked = asyncio.create_task(self.served.post("/update_weights_from_distributed", self.fields | body | fields))
        parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in tensors]
        if send:
            for message in [torch.cat(parts)] if flat else parts:
                await asyncio.to_thread(self.group.send, message, LIMIT_S)
        return await asked

    async def end(self, version: int | None = None) -> tuple[int, Any]:
        return await self.served.post(
            "/end_weight_update", self.fields | {"weight_version": None if version is None else str(version)}
        )

    async def at_once(self, model: Any, version: int, *, serve: bool, one_by_one: bool = False) -> tuple[int, Any]:
        """Push in one request, in three buckets, or in a bucket for each tensor."""
        tensors = list(named(model))
        parts = [[tensor] for tensor in tensors] if one_by_one else [tensors[:5], tensors[5:9], tensors[9:]]
        asked = asyncio.create_task(self.ask_at_once(parts, version, serve=serve))
        for part in parts:
            await asyncio.to_thread(self.group.send, flat(part), LIMIT_S)
        return await asked

    async def ask_at_once(
        self, parts: Sequence[Iterable[tuple[str, Tensor]]], version: int, *, serve: bool = True
    ) -> tuple[int, Any]:
        """Send the request of a single-request push, and no bucket."""
        body = {
            "group_name": self.group.name,
            "weight_version": str(version),
            "serve": serve,
            "buckets": [told(part) for part in parts],
        }
        return await self.served.post("/receive_push", self.fields | body)

    async def whole(self, model: Any, version: int) -> Any:
        """Push every tensor of the model in two buckets."""
        tensors = list(named(model))
        assert (await self.begin(version))[0] == 200
        for part in (tensors[:5], tensors[5:]):
            status, answer = await self.bucket(part)
            assert status == 200, answer
        status, answer = await self.end(version)
        assert (status, answer["success"]) == (200, True), answer
        return answer


def told(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[Any]]:
    """Return the fields that announce a bucket."""
    tensors = list(tensors)
    return {
        "names": [name for name, _ in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


def named(model: Any) -> Iterable[tuple[str, Tensor]]:
    """Return the named tensors without the alias of a tied embedding."""
    return named_weights(model)


@asynccontextmanager
async def joined(served: Served, name: str = "push", **fields: Any) -> AsyncIterator[Push]:
    group = await asyncio.to_thread(BroadcastGroup.host, "127.0.0.1", name, 2, "gloo", LIMIT_S)
    body = {
        "master_address": "127.0.0.1",
        "master_port": group.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
    }
    asked = asyncio.create_task(served.post("/init_weights_update_group", body | fields))
    await asyncio.to_thread(group.meet)
    status, answer = await asked
    assert (status, answer["success"]) == (200, True), answer
    try:
        yield Push(served, group, **fields)
    finally:
        group.close()


def flat(tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in tensors])


def serves(served: Served, model: Any) -> bool:
    weights = served.engine.updates.weights.named
    return all(torch.equal(weights[name], tensor.detach()) for name, tensor in named(model))
