"""Process groups for pushes over NCCL: alone, without a peer, and of two processes on one GPU. On the CPU the same over
gloo.

Every group is in a child: a call of NCCL that hangs is abandoned there, in a thread that would outlive the test.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Child
from tests.skips import inapplicable

pytestmark = pytest.mark.gpu

DEADLINE_S = 20.0
SIZES = [1000, 16_000_000, 1000]


@pytest.fixture
def backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def test_a_group_of_one_sends_and_closes(backend: str, child: Child) -> None:
    assert "the group is closed" in child("group_of_one", backend, see_gpu=True)["closed"]


def test_a_peer_that_never_comes_costs_the_deadline_and_no_process(backend: str, child: Child) -> None:
    found = child("peer_never_comes", backend, 5.0, see_gpu=True)
    assert "pair" in found["reason"] and found["works"]
    assert 4.0 < found["seconds"] < 60.0  # the deadline, an abort that may hang, and a busy machine


def pair(
    child: Child,
    backend: str,
    tmp_path: Path,
    variables: dict[str, str],
    *,
    die_after: int = -1,
    deadline_s: float = DEADLINE_S,
    apart: bool = False,
) -> tuple[Any, Any]:
    """Run a sender and a receiver on this GPU; return the findings of both. A receiver that is to die has none."""
    port_file = str(tmp_path / "port")
    with ThreadPoolExecutor(2) as threads:
        sends = threads.submit(child, "sender", backend, port_file, deadline_s, SIZES, apart, see_gpu=True, **variables)
        receives = threads.submit(
            child, "receiver", backend, port_file, deadline_s, SIZES, die_after, see_gpu=True, **variables
        )
        if die_after < 0:
            return sends.result(), receives.result()
        with pytest.raises(AssertionError, match="receiver ended with -9"):
            receives.result()
        return sends.result(), None


def test_two_processes_on_one_gpu_are_refused_by_name(cuda: torch.device, child: Child, tmp_path: Path) -> None:
    """Neither process ends, and the sender's error names the reason, with which the publisher evicts the engine."""
    sender, receiver = pair(child, "nccl", tmp_path, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})
    assert sender["works"] and receiver["works"]
    assert "Duplicate GPU" in sender["reason"] or "NCCL_MULTI_RANK_GPU_ENABLE" in sender["reason"], sender
    assert receiver["reason"] and not receiver["equal"]


@pytest.fixture
def shared_gpu(device: torch.device) -> dict[str, str]:
    """Variables with which two processes may be ranks on one GPU. Skips where NCCL does not allow it."""
    if device.type == "cuda" and torch.cuda.nccl.version() < (2, 30):  # type: ignore[no-untyped-call]
        inapplicable(f"two ranks on one GPU need NCCL 2.30, this is {torch.cuda.nccl.version()}")  # type: ignore[no-untyped-call]
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if device.type == "cuda" else {}


apart = pytest.mark.parametrize("apart", [False, True], ids=["in this process", "in its own process"])


def test_a_group_in_a_process_of_its_own_sends_alone(backend: str, child: Child, tmp_path: Path) -> None:
    """The process opens the staging memory, pins it and copies it to its GPU."""
    found = child("sender", backend, str(tmp_path / "port"), DEADLINE_S, SIZES, True, 1, see_gpu=True)
    assert found["works"] and not found["reason"]


@apart
def test_a_pair_gets_the_bytes(
    backend: str, apart: bool, shared_gpu: dict[str, str], child: Child, tmp_path: Path
) -> None:
    sender, receiver = pair(child, backend, tmp_path, shared_gpu, apart=apart)
    assert (sender["reason"], receiver["reason"]) == ("", "")
    assert receiver["equal"] == [True] * len(SIZES)


@apart
def test_a_receiver_killed_between_messages_does_not_end_the_sender(
    backend: str, apart: bool, shared_gpu: dict[str, str], child: Child, tmp_path: Path
) -> None:
    sender, _ = pair(child, backend, tmp_path, shared_gpu, die_after=1, deadline_s=5.0, apart=apart)
    assert sender["works"] and "sending" in sender["reason"]
