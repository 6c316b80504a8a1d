"""Staged weights that another process opens, in pinned memory of the host and in that of the GPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.child import ROOT, pattern
from tests.gpu.conftest import Child
from tests.refusals import refusal
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.transport import cuda_handles
from tidemill.weightstore.transport.cuda_handles import CudaMemory
from tidemill.weightstore.transport.handles import HostMemory, StagingMemory

pytestmark = pytest.mark.gpu

SIZE = 1_000_000
OFFSET = 4096
SHARES = 1500
"""More than the 1,000 events that torch shares between processes before it waits for the device at every share."""
LIMIT_S = 60.0


@pytest.fixture(params=["host", "cuda"])
def memory(request: pytest.FixtureRequest, device: torch.device) -> StagingMemory:
    if request.param == "host":
        return HostMemory(pin=device.type == "cuda")
    request.getfixturevalue("cuda")
    return CudaMemory()


def sendable(handle: dict[str, Any]) -> dict[str, Any]:
    """Return the handle with its bytes as text."""
    if "shares" not in handle:
        return handle
    shares = [
        [f"hex:{item.hex()}" if isinstance(item, bytes) else item for item in share] for share in handle["shares"]
    ]
    return {**handle, "shares": shares}


def test_another_process_reads_the_same_bytes(memory: StagingMemory, on_gpu: bool, child: Child) -> None:
    block = memory.empty(SIZE)
    assert block.is_cuda or block.is_pinned() == on_gpu
    part = block[OFFSET : OFFSET + 100_000]
    part.copy_(pattern(100_000))
    if on_gpu:
        torch.cuda.synchronize()
    found = child("open_handle", sendable(memory.handle(part, 1)), "", False, see_gpu=True)
    assert found == {
        "sum": int(pattern(100_000).long().sum()),
        "first": pattern(8).tolist(),
        "device": part.device.type,
    }
    memory.close()


def test_a_reader_that_is_killed_leaves_the_memory_to_the_next_one(
    memory: StagingMemory, child: Child, tmp_path: Path
) -> None:
    part = memory.empty(SIZE)[OFFSET:]
    part.fill_(7)
    ready = tmp_path / "ready"
    arguments = json.dumps([sendable(memory.handle(part, 1)), str(ready), True])
    command = [sys.executable, "-m", "tests.gpu.child", "open_handle", str(tmp_path / "never.json"), arguments]
    with subprocess.Popen(command, cwd=ROOT, env=dict(os.environ)) as reader:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not ready.exists():
                assert reader.poll() is None and time.monotonic() < deadline, "the reader has not opened the memory"
                time.sleep(0.01)
        finally:
            reader.kill()
    part.fill_(9)
    if part.is_cuda:
        torch.cuda.synchronize()
    found = child("open_handle", sendable(memory.handle(part, 1)), "", False, see_gpu=True)
    assert found["sum"] == 9 * len(part)
    memory.close()


def test_a_gpu_that_is_not_visible_is_refused_by_name(device: torch.device) -> None:
    share = [b"", 0, 0, b"", 0, b"", False]
    handle = {"device": "GPU-of-another-machine", "start": 0, "num_bytes": 8, "shares": [share]}
    with pytest.raises(BadManifest, match=r"handle: device.*GPU-of-another-machine"):
        cuda_handles.opened(handle)
    with refusal(BadManifest, where=re.compile("^handle: shares")):
        cuda_handles.arguments(handle, 1, str(device))


def test_sharing_stays_cheap_over_many_messages(cuda: torch.device) -> None:
    """The last hundred of many shares of one block take at most three times the first hundred."""
    memory = CudaMemory()
    part = memory.empty(SIZE)[OFFSET:]
    memory.handle(part, 1)  # the first one loads the code
    times = []
    for _ in range(SHARES):
        began = time.perf_counter()
        memory.handle(part, 1)
        times.append(time.perf_counter() - began)
    first, last = sorted(times[:100])[50], sorted(times[-100:])[50]
    assert last <= 3 * first, f"{first * 1e6:.0f} us at first, {last * 1e6:.0f} us after {SHARES}"
