"""Pushes by handles to a real SGLang server: accepted and refused ones, and no files in /dev/shm after the proxy has
ended.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio

from tests.engine_serving import Served, log_probs_of, scores, told_log_probs
from tests.receiver_app import staged
from tests.sglang.server import serving
from tests.sglang.test_sglang_engine import PROMPT, TOLERANCE
from tests.waits import LIMIT_S, until
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.transport.handle_receiver import HandleReceiver
from tidemill.weightstore.transport.handles import HostMemory
from tidemill.weightstore.transport.port import Deadlines


def _shared_files() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir() if file.name.startswith("torch_")}


async def _says(served: Served, model: Any, version: str) -> None:
    answer = await served.generate(PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    wanted = log_probs_of(await scores(model, PROMPT, answer["output_ids"]), answer["output_ids"])
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE
    assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 24}]


async def test_pushes_by_handles(python: str, server: str, directories: list[Path], models: list[Any]) -> None:
    """A push is verified bit by bit and served; an interrupted one is not, and the next one repairs it."""
    before = _shared_files()
    memory, context = HostMemory(), zmq.asyncio.Context()
    stagings = [
        staged({name: tensor.detach() for name, tensor in model.state_dict().items()}, memory) for model in models
    ]
    try:
        async with serving(python, server, directories[0]) as served:
            receiver = HandleReceiver(
                context, served.engine.handles, epoch=1, deadlines=Deadlines(120.0), memory=memory
            )
            await receiver.join(None)

            async def push(version: int, *, buckets: int | None = None) -> float:
                await receiver.begin(version)
                for bucket, flat in stagings[version % 3].buckets[:buckets]:
                    await receiver.bucket(bucket.specs, flat)
                told = await receiver.checksums()
                assert told is not None and stagings[version % 3].differences(told) == []
                return await receiver.end()

            for version in (1, 2):
                assert await push(version) > 0
                await _says(served, models[version], str(version))
            with pytest.raises(ReceiverFailed, match=r"of \d+ tensors are missing"):
                await push(3, buckets=2)
            assert served.engine.version == -1
            await push(4)
            await _says(served, models[1], "4")
            await receiver.leave()
            receiver.close()
            await served.generate(PROMPT, max_new_tokens=2)
    finally:
        context.destroy(linger=0)
        memory.close()
    async with asyncio.timeout(LIMIT_S):  # torch's manager removes its files when their owner has released them
        await until(lambda: not (_shared_files() - before), every_s=0.1)
