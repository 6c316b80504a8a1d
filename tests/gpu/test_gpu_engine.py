"""The built-in engine on the device: transformers' log-probs, every way of pushing to it, a flip in a response, and its
memory.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio

from tests.engine_push import joined
from tests.engine_serving import Served, greedy, log_probs_of, prompts, scores, serving, told_log_probs
from tests.receiver_app import staged
from tests.skips import inapplicable
from tests.tiny_models import FAMILIES, tiny_model, write_tiny_model
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.transport.cuda_handles import CudaMemory
from tidemill.weightstore.transport.handle_receiver import HandleReceiver
from tidemill.weightstore.transport.handles import HostMemory, StagingMemory
from tidemill.weightstore.transport.port import Deadlines

pytestmark = pytest.mark.gpu

CONTEXT = 2048
FREED = 0.9
NEAR = {"float32": 1e-4, "bfloat16": 0.15}
"""Difference of log-probs from those of transformers in float32 on the CPU."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=0, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [tiny_model("qwen3", seed=seed, max_position_embeddings=CONTEXT) for seed in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probs_are_those_of_transformers(
    family: str, dtype: str, device: torch.device, tmp_path: Path
) -> None:
    """Prompts of many lengths decoded in one batch, two of them the same, which share a prefill."""
    small: dict[str, Any] = {
        "initializer_range": 0.05
    }  # scores of a size at which bfloat16 has two digits behind the point
    model = tiny_model(family, **small)
    first, *others = prompts(5)
    async with serving(write_tiny_model(tmp_path, family, **small), device=device.type, dtype=dtype) as served:
        assert served.engine.scheduler.device.type == device.type
        requests = [
            (prompt, {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 3})
            for prompt in (first, first, *others)
        ]
        answers = await served.together(requests)
    for (prompt, _), answer in zip(requests, answers, strict=True):
        assert len(answer["output_ids"]) == 24
        wanted = log_probs_of(await scores(model, prompt, answer["output_ids"]), answer["output_ids"])
        assert abs(told_log_probs(answer) - wanted).max() < NEAR[dtype]


@pytest.fixture(params=["host", "cuda"])
def memory(request: pytest.FixtureRequest, device: torch.device) -> StagingMemory:
    if request.param == "host":
        return HostMemory(pin=device.type == "cuda")
    request.getfixturevalue("cuda")
    return CudaMemory()


@asynccontextmanager
async def pushing(served: Served, memory: StagingMemory) -> AsyncIterator[HandleReceiver]:
    context = zmq.asyncio.Context()
    receiver = HandleReceiver(context, served.engine.handles, epoch=1, deadlines=Deadlines(60.0), memory=memory)
    try:
        await receiver.join(None)
        yield receiver
    finally:
        receiver.close()
        context.destroy(linger=0)


async def test_a_push_by_gloo_has_the_checksums_of_what_was_sent(
    directory: Path, models: list[Any], device: torch.device
) -> None:
    (prompt,) = prompts(1)
    async with serving(directory, device=device.type) as served, joined(served, epoch=1) as push:
        for version, model in enumerate(models, start=1):
            tensors = list(model.named_parameters())
            assert (await push.begin(version))[0] == 200
            for part in (tensors[:5], tensors[5:]):
                status, answer = await push.bucket(part)
                assert status == 200, answer
            status, answer = await served.post("/weights_checksums", {"of": "update", "epoch": 1})
            assert status == 200, answer
            assert staged(dict(tensors)).differences(ChecksumReport.parse(answer)) == []
            assert (await push.end(version))[0] == 200
        made = await served.generate(prompt, temperature=0, max_new_tokens=8)
    assert made["output_ids"] == await greedy(models[-1], prompt, 8)


async def test_a_push_by_handles_has_the_checksums_of_what_was_sent(
    memory: StagingMemory, directory: Path, models: list[Any], device: torch.device
) -> None:
    if isinstance(memory, CudaMemory):
        inapplicable("a process cannot open a handle of its own GPU memory: test_gpu_up does it with an engine process")
    (prompt,) = prompts(1)
    async with serving(directory, device=device.type) as served, pushing(served, memory) as receiver:
        for version, model in enumerate(models[1:], start=1):
            staging = staged(dict(model.state_dict()), memory)  # type: ignore[arg-type]
            if version == 1:  # in one request, and in one for each step
                await receiver.receive(version, staging.buckets, serve=True)
            else:
                await receiver.begin(version)
                for bucket, flat in staging.buckets:
                    await receiver.bucket(bucket.specs, flat)
            report = await receiver.checksums()
            assert report is not None and staging.differences(report) == []
            await receiver.end()
        made = await served.generate(prompt, temperature=0, max_new_tokens=8)
    memory.close()
    assert made["output_ids"] == await greedy(models[-1], prompt, 8)


async def test_a_flip_in_mid_response(directory: Path, models: list[Any], device: torch.device) -> None:
    """Pushes of other weights while responses are decoded: no abort, full lengths, several versions in each."""
    params = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 0}
    async with serving(directory, device=device.type) as served, joined(served, epoch=1) as push:
        tasks = [asyncio.create_task(served.generate(prompt, **params)) for prompt in prompts(4)]
        await served.until(lambda: len(served.engine.scheduler.running) == 4)
        await push.whole(models[1], 1)
        answers = await asyncio.gather(*tasks)
        assert served.engine.stats()["requests_aborted"] == 0
    for answer in answers:
        assert len(answer["output_ids"]) == 1000
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["0", "1"]


async def test_a_response_as_long_as_the_context_beside_short_ones(
    directory: Path, models: list[Any], device: torch.device
) -> None:
    """In few blocks, so that others wait; keys and values have the memory of ``engine.kv_tokens``, and no more."""
    async with serving(directory, device=device.type, max_running=8, kv_tokens=CONTEXT + 160) as served:
        long, *short = prompts(4)
        requests = [(long, {"max_new_tokens": CONTEXT - len(long), "ignore_eos": True, "temperature": 0})]
        requests += [(prompt, {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0}) for prompt in short]
        answers = await served.together(requests)
        shape, stats = served.engine.scheduler.runner.memory, served.engine.stats()
        assert stats["kv_blocks_free"] == (CONTEXT + 160) // 16 == shape.num_blocks
    assert len(answers[0]["output_ids"]) == CONTEXT - len(long)
    for prompt, answer in zip((long, *short), answers, strict=True):
        assert answer["output_ids"][:16] == await greedy(models[0], prompt, 16)


async def test_released_memory_is_free_for_others_and_comes_back(cuda: torch.device, tmp_path: Path) -> None:
    wide: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.02,
    }
    directory = await asyncio.to_thread(write_tiny_model, tmp_path, "qwen3", **wide)
    async with serving(directory, device="cuda", max_running=64) as served:
        (prompt,) = prompts(1)
        first = await served.generate(prompt, temperature=0, max_new_tokens=200, ignore_eos=True)
        gc.collect()
        torch.cuda.empty_cache()
        weights = served.engine.updates.weights
        assert weights is not None
        held = weights.size_bytes + served.engine.scheduler.runner.memory.size_bytes
        del weights
        before = torch.cuda.mem_get_info()[0]
        assert (await served.post("/release_memory_occupation", {"tags": None}))[0] == 200
        freed = torch.cuda.mem_get_info()[0] - before
        assert freed >= FREED * held, f"{freed / 1e6:.0f} of {held / 1e6:.0f} MB"
        await served.engine.load_snapshot(directory, 0)
        again = await served.generate(prompt, temperature=0, max_new_tokens=200, ignore_eos=True)
    assert again["output_ids"] == first["output_ids"]
