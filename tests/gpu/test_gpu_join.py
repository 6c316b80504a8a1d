"""A world of one on the device: device, backend, seeds, collectives, and a second world after the first."""

import pytest
import torch

from tests.gpu.conftest import Child

pytestmark = pytest.mark.gpu


def test_join_leave_and_join_again(device: torch.device, child: Child) -> None:
    first, second = child("join", device.type, see_gpu=True)
    assert first == second, "the second world has other seeds, places or sums"
    assert first["device"] == str(device)
    assert first["backend"] == ("nccl" if device.type == "cuda" else "gloo")
    assert first["places"] == [0, 0, 1, 0, 1]
    assert (first["sum"], first["objects"]) == ([1.0] * 3, [{"step": 7}])
    assert len(first["drawn"]) == (2 if device.type == "cuda" else 0)
