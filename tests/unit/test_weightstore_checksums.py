"""Checksums: against a ten-line loop, every bit counts, and differences are named."""

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.receiver_app import staged, tiny_tensors
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.weightstore.format import checksums
from tidemill.weightstore.format.checksums import (
    LANES,
    ChecksumReport,
    TensorChecksum,
    differences,
    report_checksums,
    sha256,
    sum64,
    sum_of,
)


def slow(data: bytes) -> str:
    def factor(position: int) -> int:
        mixed = (position + 2) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    total = len(data) * factor(-1)
    data += bytes(-len(data) % 4)
    for lane in range(len(data) // 4):
        value = int.from_bytes(data[4 * lane : 4 * lane + 4], "little", signed=True)
        total += value * factor(lane % LANES) * factor(lane // LANES)
    return f"{total % 2**64:016x}"


@given(st.lists(st.binary(max_size=70), min_size=1, max_size=4))
def test_sum64_follows_its_definition(parts: list[bytes]) -> None:
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0) for part in parts]
    assert sum64(tensors) == slow(b"".join(parts))
    assert sha256(tensors) == hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_sum64_goes_on_over_blocks() -> None:
    tensor = torch.randint(-(2**31), 2**31, (LANES + 3,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    assert sum64([tensor]) == slow(tensor.numpy().tobytes())
    swapped = tensor.clone()
    swapped[0], swapped[LANES] = tensor[LANES].item(), tensor[0].item()
    assert sum64([swapped]) != sum64([tensor])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_or_two_signs_show(dtype: torch.dtype) -> None:
    tensor = torch.randn(31, generator=torch.Generator().manual_seed(2)).to(dtype)
    seen = {sum64([tensor])}
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            seen.add(sum64([tensor]))
            raw[place] ^= 1 << bit
    for one in range(tensor.numel()):
        for other in range(one):
            tensor[[one, other]] *= -1
            seen.add(sum64([tensor]))
            tensor[[one, other]] *= -1
    assert len(seen) == 1 + 8 * raw.numel() + 31 * 30 // 2


def test_views_anywhere_in_a_buffer_have_the_sum_of_their_bytes() -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    for start in range(0, 8, 2):
        assert sum64([flat[start : start + 14].view(torch.bfloat16).view(7, 1)]) == slow(
            bytes(range(start, start + 14))
        )
    matrix = torch.randn(4, 6)
    assert sum64([matrix.t()]) == sum64([matrix.t().contiguous()]) != sum64([matrix])


def test_differing_tensors_are_named_and_missing_answers_count() -> None:
    sent = tiny_tensors(1)

    def want(part: TensorChecksum) -> str:
        return sum_of("sum64", part, sent)

    assert differences(ChecksumReport.parse(report_checksums(sent).to_json()), sent, want) == []
    wrong = tiny_tensors(1)
    wrong["model.norm.weight"].view(torch.uint8)[5] ^= 4
    (line,) = differences(report_checksums(wrong), sent, want)
    assert line.startswith("model.norm.weight (float32): want sum64 ")
    del wrong["model.norm.weight"]
    assert differences(report_checksums(wrong), sent, want) == ["model.norm.weight: missing from the engine's report"]
    assert differences(report_checksums(sent | {"alias": torch.zeros(3)}), sent, want) == []


def test_an_engine_may_keep_them_in_its_own_type_together_and_padded() -> None:
    sent = {"q": torch.randn(3, 4), "k": torch.randn(2, 4)}
    kept = torch.cat([sent["q"], sent["k"], torch.zeros(3, 4)]).to(torch.bfloat16)
    for scheme, compute in checksums.SCHEMES.items():
        part = TensorChecksum(names=("q", "k"), dtype="bfloat16", sum=compute([kept]), zeros=12)
        told = ChecksumReport(scheme=scheme, parts=(part,))
        assert (
            differences(
                ChecksumReport.parse(told.to_json()), sent, lambda part, scheme=scheme: sum_of(scheme, part, sent)
            )
            == []
        )  # type: ignore[misc]


def test_strange_answers_are_refused() -> None:
    for answer in ({}, {"scheme": "sum64", "parts": [{"names": ["x"]}]}, {"scheme": "crc", "parts": []}):
        with refusal(ValueError, place="checksums"):
            ChecksumReport.parse(answer)


def test_a_comparison_that_outlives_its_push_does_not_affect_the_next_weights() -> None:
    """The thread has read a copy that is refilled before its sum is complete: that sum is not kept for the new
    weights.
    """
    one, two = {"w": torch.full((100,), 1.0)}, {"w": torch.full((100,), 2.0)}
    read, filled = threading.Event(), threading.Event()

    class Slow(tuple[str, ...]):
        looks = 0

        def __iter__(self) -> Iterator[str]:
            yield from super().__iter__()
            self.looks += 1
            if (
                self.looks == 3
                # third reading of the names: after the tensors meant and the lookup of a known sum, the
                # tensors are read
            ):
                read.set()
                assert filled.wait(LIMIT_S)

    def told(
        tensors: dict[str, torch.Tensor], names: tuple[str, ...]
    ) -> ChecksumReport:  # in another dtype: the tensors are copied
        return ChecksumReport(
            scheme="sum64", parts=(TensorChecksum(names=names, dtype="float64", sum=sum64([tensors["w"].double()])),)
        )

    staging = staged(one)
    thread = threading.Thread(target=staging.differences, args=(told(one, Slow(("w",))),), daemon=True)
    thread.start()
    assert read.wait(LIMIT_S)
    staging.fill(two.items())
    filled.set()
    thread.join(60)
    assert staging.differences(told(two, ("w",))) == []
    assert len(staging.differences(told(one, ("w",)))) == 1


class Reads(TorchDispatchMode):
    """Counts single numbers that are read from tensors, for each of which a GPU is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_sum_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    monkeypatch.setattr(checksums, "LANES", 100)
    checksums.lane_factors.cache_clear()
    with Reads() as reads:
        checksums.sum64([tensor])
    assert reads.count == 0, "all blocks are read together"
    checksums.lane_factors.cache_clear()


def test_padding_is_where_the_tensors_are() -> None:
    """Those that are staged on a GPU cannot be joined with zeros on the CPU."""
    sent = {"a": torch.zeros(3, device="meta")}
    made: list[torch.device] = []
    scheme = {"sum64": lambda tensors: str(made.extend(tensor.device for tensor in tensors))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "SCHEMES", scheme)
        checksums.sum_of("sum64", checksums.TensorChecksum(names=("a",), dtype="float32", sum="", zeros=2), sent)
    assert [device.type for device in made] == ["meta", "meta"]
