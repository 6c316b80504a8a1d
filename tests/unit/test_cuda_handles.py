"""Handles of a GPU's memory, as far as testable without one: torch's arguments in torch's order, in the form that
SGLang accepts.
"""

import base64
import ctypes
import inspect
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.refusals import refusal
from tidemill.actors.errors import BadRequest
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.tensors import SharedBucket
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.manifest import TensorSpec
from tidemill.weightstore.transport.cuda_handles import SharedBlocks, arguments, block_of
from tidemill.weightstore.transport.handles import PAGE, HostMemory, Mapped, Offered, Pinning

SPECS = [TensorSpec(name="a", shape=(2, 3), dtype="float32"), TensorSpec(name="b", shape=(4,), dtype="bfloat16")]
HANDLE = {
    "device": "uuid-1",
    "start": 4096,
    "num_bytes": 32,
    "shares": [[b"storage-%d" % rank, 1 << 20, 512, b"counter", rank, b"event", True] for rank in range(2)],
}


def check(told: dict[str, Any], rank: int, device: Any) -> None:
    assert (told["storage_device"], told["storage_handle"], told["ref_counter_offset"]) == (
        device,
        b"storage-%d" % rank,
        rank,
    )
    assert (told["tensor_cls"], told["tensor_size"], told["tensor_stride"], told["tensor_offset"]) == (
        torch.Tensor,
        (32,),
        (1,),
        4096,
    )
    assert (told["storage_cls"], told["dtype"], told["requires_grad"]) == (
        torch.storage.TypedStorage,
        torch.uint8,
        False,
    )
    assert (told["storage_size_bytes"], told["storage_offset_bytes"]) == (1 << 20, 512)
    assert (told["ref_counter_handle"], told["event_handle"], told["event_sync_required"]) == (
        b"counter",
        b"event",
        True,
    )


def named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments


def test_each_rank_gets_the_arguments_of_torchs_own_function() -> None:
    for rank in (0, 1):
        check(named(arguments(HANDLE, rank, 7)), rank, 7)
    with refusal(BadManifest, where="handle: shares", got="2 of them"):
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
            {
                "name": "a",
                "shape": torch.Size([2, 3]),
                "dtype": torch.float32,
                "start_idx": 0,
                "end_idx": 24,
                "numel": 24,
            },
            {
                "name": "b",
                "shape": torch.Size([4]),
                "dtype": torch.bfloat16,
                "start_idx": 24,
                "end_idx": 32,
                "numel": 8,
            },
        ]
    assert asked == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch.storage", "TypedStorage"),
        ("types", "SimpleNamespace"),
        *(("torch", name) for name in ("Tensor", "Size", "uint8", "float32", "bfloat16")),
    }


def test_a_block_is_shared_once_however_many_buckets_and_messages_name_it() -> None:
    made: list[int] = []

    def share(flat: torch.Tensor) -> list[object]:
        made.append(flat.untyped_storage().data_ptr())
        return [b"storage-%d" % len(made), flat.untyped_storage().nbytes(), 0, b"counter", len(made), b"event", True]

    shared, copies = SharedBlocks(share), [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    shares = [
        shared.share(copy[start : start + 100]) for _ in range(3) for copy in copies for start in range(0, 4000, 500)
    ]
    assert made == [copy.untyped_storage().data_ptr() for copy in copies]
    assert [share[0] for share in shares] == ([b"storage-1"] * 8 + [b"storage-2"] * 8) * 3
    shared.clear()
    assert shared.share(copies[1])[0] == b"storage-3", "memory that is freed may come back at the same address"


def part(start: int, num_bytes: int, storage: bytes = b"one") -> dict[str, Any]:
    return {
        "device": "uuid-1",
        "start": start,
        "num_bytes": num_bytes,
        "shares": [[storage, 1000, 0, b"counter", 0, b"event", True]],
    }


def test_a_reader_opens_a_block_once_and_keeps_it_until_it_leaves() -> None:
    blocks = {b"one": torch.arange(1000).to(torch.uint8), b"two": torch.full((1000,), 7, dtype=torch.uint8)}
    opened: list[object] = []

    def open_block(handle: Any) -> torch.Tensor:
        opened.append(handle["shares"][0][0])
        return blocks[handle["shares"][0][0]]

    mapped = Mapped(open_block=open_block)
    for start in (0, 100, 990):
        assert torch.equal(Offered(mapped, part(start, 10)).tensor(), blocks[b"one"][start : start + 10])
    assert torch.equal(Offered(mapped, part(5, 10, b"two")).tensor(), blocks[b"two"][5:15])
    assert opened == [b"one", b"two"]
    mapped.close()
    Offered(mapped, part(0, 1)).tensor()
    assert opened == [b"one", b"two", b"one"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"num_bytes": 1001}, "handle: want a part of 1000 bytes, got 1001 from 0"),
        ({"start": 991, "num_bytes": 10}, "handle: want a part of 1000 bytes, got 10 from 991"),
        ({"start": -1}, "handle: start"),
        ({"start": "0"}, "handle: start"),
        ({"shares": []}, "handle: shares"),
        ({"shares": 3}, "handle: shares"),
        ({"shares": [7]}, "handle: shares"),
        ({"shares": [[b"one", "many", 0, b"", 0, b"", True]]}, "handle: shares: want bytes of the block"),
        ({"shares": [[b"one", -1, 0, b"", 0, b"", True]]}, "handle: shares: want bytes of the block"),
        (
            {"shares": [[[b"one"], 1000, 0, b"", 0, b"", True]]},
            "handle: shares: want a name and an offset of the block",
        ),
        ({"shares": [[b"one", 1000, [], b"", 0, b"", True]]}, "handle: shares: want a name and an offset of the block"),
    ],
)
def test_a_handle_that_is_out_of_its_block_or_none_at_all_opens_nothing(changes: dict[str, Any], where: str) -> None:
    def never(handle: Any) -> torch.Tensor:
        raise AssertionError("opened")

    with pytest.raises(BadManifest, match=where):
        Mapped(open_block=never).gpu_part({**part(0, 10), **changes})


def test_parts_of_a_block_have_its_identity_and_those_of_other_blocks_another() -> None:
    assert block_of(part(0, 10)) == block_of(part(500, 100))
    assert (
        len({block_of(one)[0] for one in (part(0, 10), part(0, 10, b"two"), {**part(0, 10), "device": "uuid-2"})}) == 3
    )


@pytest.mark.parametrize("visible", [(), ("GPU-bbbb",), ("GPU-bbbb", "GPU-cccc")])
def test_an_engine_refuses_memory_of_a_gpu_that_it_does_not_see(visible: tuple[str, ...]) -> None:
    """SGLang would end: it opens the memory outside any handler of errors."""
    authority = Authority(visible_devices=visible)
    for device in ("aaaa", "", None):
        with refusal(BadRequest, place="handle: device"):
            authority.require_visible({**HANDLE, "device": device})
    assert authority.refused.startswith("handle: device")
    authority.require_visible({"pid": 1})  # host memory
    for seen in visible:
        authority.require_visible({**HANDLE, "device": seen.removeprefix("GPU-")})
    Authority().require_visible(HANDLE)


def test_memory_that_is_mapped_to_be_pinned_is_the_learners_own_and_not_a_copy() -> None:
    """Pinning touches every page for writing, which would detach a private mapping from the memory that is filled
    later.
    """
    memory = HostMemory()
    flat = memory.empty(100)
    shared, private = (
        Mapped(pinning=pinning).part(memory.handle(flat, 1)) for pinning in (Pinning(ignored, ignored), None)
    )
    shared[0], private[1] = 7, 9
    assert flat[:2].tolist() == [7, 0]
    flat[2] = 5
    assert shared[2] == 5
    memory.close()


def test_parts_are_pinned_once_and_unpinned_before_their_mapping_ends() -> None:
    """Memory that is unmapped while it is pinned cannot be pinned again at the same address: another mapping may get
    it.
    """
    pinned: list[int] = []
    unpinned: list[int] = []

    def unpin(address: int) -> None:
        assert ctypes.c_ubyte.from_address(address).value == 3  # still mapped
        unpinned.append(address)

    memory = HostMemory()
    flat = memory.empty(PAGE + 10).fill_(3)
    mapped = Mapped(pinning=Pinning(lambda part: pinned.append(part.data_ptr()), unpin))
    parts = [mapped.part(memory.handle(flat[start : start + 10], 1)) for start in (0, PAGE, 0, PAGE)]
    assert pinned == [parts[0].data_ptr(), parts[1].data_ptr()]
    mapped.close()
    del parts[1:]
    assert not unpinned, "a part is still in use"
    parts.clear()
    assert sorted(unpinned) == sorted(pinned)
    memory.close()


def test_a_part_that_cannot_be_unpinned_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def unpin(address: int) -> None:
        asked.append(address)
        raise RuntimeError("CUDA error: invalid argument")

    memory = HostMemory()
    flat = memory.empty(2 * PAGE)
    mapped = Mapped(pinning=Pinning(ignored, unpin))
    for start in (0, PAGE):
        mapped.part(memory.handle(flat[start : start + PAGE], 1))
    mapped.close()
    assert len(asked) == 2
    assert caplog.text.count("unmapped while it is pinned: CUDA error: invalid argument") == 2
    memory.close()


def test_memory_that_cannot_be_pinned_is_read_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def refuse(part: torch.Tensor) -> None:
        asked.append(part.data_ptr())
        raise RuntimeError("CUDA error: out of memory")

    memory = HostMemory()
    flat = memory.empty(2 * PAGE).fill_(3)
    mapped = Mapped(pinning=Pinning(refuse, ignored))
    for start in (0, PAGE):
        assert mapped.part(memory.handle(flat[start : start + PAGE], 1)).eq(3).all()
    assert len(asked) == 1
    assert f"{PAGE} bytes for pushes are not pinned" in caplog.text and "CUDA error: out of memory" in caplog.text
    memory.close()


def ignored(_: object) -> None:
    pass


def no_file_system() -> int:
    raise FileNotFoundError(2, "No such file or directory")


@pytest.mark.parametrize(
    ("free", "got"), [(lambda: 99, "99; cure: .*--shm-size"), (no_file_system, "No such file or directory")]
)
def test_a_bucket_that_shared_memory_has_no_room_for_is_refused(free: Any, got: str) -> None:
    """The engine answers with the reason; without the check it would get SIGBUS when it writes the bucket."""
    memory = HostMemory()
    handle = memory.handle(memory.empty(100), 1)
    specs = [TensorSpec(name="a", shape=(25,), dtype="float32")]
    with refusal(BadManifest, where="/dev/shm", got=re.compile(rf"^{got}")):
        SharedBucket(free).payloads(specs, Offered(Mapped(), handle), 1)
    memory.close()


def test_a_bucket_that_fits_into_the_room_of_the_one_before_needs_no_more() -> None:
    asked: list[int] = []
    memory = HostMemory()
    block = memory.empty(100)

    def free() -> int:
        asked.append(1)
        return 100

    bucket = SharedBucket(free)
    for size in (100, 40, 100):
        specs = [TensorSpec(name="a", shape=(size // 4,), dtype="float32")]
        assert len(bucket.payloads(specs, Offered(Mapped(), memory.handle(block[:size], 1)), 2)) == 2
    assert len(asked) == 1
    bucket.close()
    memory.close()
