"""Handles of a GPU's memory, as far as testable without one: torch's arguments in torch's order, in the form that SGLang accepts."""

import base64
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from actors.serving.sglang.tensors import SharedBucket
from weightstore.errors import BadManifest
from weightstore.format.manifest import TensorSpec
from weightstore.transport.cuda_handles import arguments
from weightstore.transport.handles import Mapped, Offered

SPECS = [TensorSpec(name="a", shape=(2, 3), dtype="float32"), TensorSpec(name="b", shape=(4,), dtype="bfloat16")]
HANDLE = {
    "device": "uuid-1",
    "start": 4096,
    "num_bytes": 32,
    "shares": [[b"storage-%d" % rank, 1 << 20, 512, b"counter", rank, b"event", True] for rank in range(2)],
}


def check(told: dict[str, Any], rank: int, device: Any) -> None:
    assert (told["storage_device"], told["storage_handle"], told["ref_counter_offset"]) == (device, b"storage-%d" % rank, rank)
    assert (told["tensor_cls"], told["tensor_size"], told["tensor_stride"], told["tensor_offset"]) == (torch.Tensor, (32,), (1,), 4096)
    assert (told["storage_cls"], told["dtype"], told["requires_grad"]) == (torch.storage.TypedStorage, torch.uint8, False)
    assert (told["storage_size_bytes"], told["storage_offset_bytes"]) == (1 << 20, 512)
    assert (told["ref_counter_handle"], told["event_handle"], told["event_sync_required"]) == (b"counter", b"event", True)


def named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments


def test_each_rank_gets_the_arguments_of_torchs_own_function() -> None:
    for rank in (0, 1):
        check(named(arguments(HANDLE, rank, 7)), rank, 7)
    with pytest.raises(BadManifest, match="want one of 7 items for rank 2"):
        arguments(HANDLE, 2, 7)


def test_sglang_gets_the_same_without_its_being_opened_here() -> None:
    """The handle contains only plain containers and torch's own names: SGLang's unpickler refuses all others."""
    asked: set[tuple[str, str]] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.add((module, name))
            return named_of if name == "rebuild_cuda_tensor" else super().find_class(module, name)

    def named_of(*arguments: Any) -> dict[str, Any]:
        return named(arguments)

    payloads = SharedBucket().payloads(SPECS, Offered(Mapped(), HANDLE), 2)
    for rank, payload in enumerate(payloads):
        told = Recording(io.BytesIO(base64.b64decode(payload))).load()
        check(told["flattened_tensor"], rank, "uuid-1")
        assert [vars(one) for one in told["metadata"]] == [
            {"name": "a", "shape": torch.Size([2, 3]), "dtype": torch.float32, "start_idx": 0, "end_idx": 24, "numel": 24},
            {"name": "b", "shape": torch.Size([4]), "dtype": torch.bfloat16, "start_idx": 24, "end_idx": 32, "numel": 8},
        ]
    assert asked == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch.storage", "TypedStorage"),
        ("types", "SimpleNamespace"),
        *(("torch", name) for name in ("Tensor", "Size", "uint8", "float32", "bfloat16")),
    }
