"""NCCL or gloo to an engine, and CUDA handles or not: decided from the facts that both ends state, before anything is
sent.
"""

import logging
from typing import Any, cast

import pytest

from tests.refusals import refusal
from tidemill.bus.client.addresses import HERE
from tidemill.bus.liveness import LiveView
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.config import LARGE_BUCKET, SHARED_BUCKET, SMALL_BUCKET, WeightsConfig
from tidemill.weightstore.push.push_groups import GroupRules, PushGroups
from tidemill.weightstore.transport.handle_receiver import HandleReceivers
from tidemill.weightstore.transport.handles import HostMemory, shared_memory_domain
from tidemill.weightstore.transport.nccl import DeviceEnd, nccl_differs, no_cuda_handles, no_nccl, own_end
from tidemill.weightstore.transport.port import Deadlines, WeightReceiver
from tidemill.weightstore.transport.staging import staging_memory

OWN = DeviceEnd("AAAA-0", "2.29.7")
"""A device as torch states it: without the prefix of nvidia-smi."""
OTHER = Capabilities(devices=("GPU-bbbb-1",), visible_devices=("GPU-bbbb-1",), nccl="2.29.3")
SAME = Capabilities(devices=("GPU-aaaa-0",), visible_devices=("GPU-aaaa-0",), nccl="2.29.7")
SLICE = Capabilities(devices=("MIG-bbbb-1",), nccl="2.29.7")
NEWER = Capabilities(devices=("GPU-bbbb-1",), nccl="2.30.7")
SILENT = Capabilities()


class View:
    """Live rows of engines, which a test sets."""

    def __init__(self, **engines: Capabilities) -> None:
        self.rows = [
            LiveRow(role="engine", id=id, host="h", pid=1, phase="serving", address=f"http://{id}", capabilities=stated)
            for id, stated in engines.items()
        ]

    async def alive(self, role: str) -> list[LiveRow]:
        return self.rows


class Receiver:
    """A receiver that is made, and closed."""

    carries = False

    def __init__(self, url: str) -> None:
        self.url, self.closed = url, False

    def close(self) -> None:
        self.closed = True


def groups_of(
    backend: str, own: DeviceEnd = OWN, engines: int = 1, **stated: Capabilities
) -> tuple[PushGroups, list[Receiver]]:
    made: list[Receiver] = []

    def opened(row: LiveRow) -> WeightReceiver:
        made.append(Receiver(row.address))
        return cast(WeightReceiver, made[-1])

    return PushGroups(
        cast(LiveView, View(**stated)), opened, GroupRules(engines, HERE, backend, Deadlines(1.0), own)
    ), made


async def backends(groups: PushGroups) -> dict[str, str]:
    return {member.id: member.backend for group in await groups.reconcile() for member in group.members}


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (OTHER, ""),
        (SAME, "learner and engine share GPU AAAA-0, which NCCL refuses"),
        (SLICE, "NCCL does not work between MIG slices"),
        (NEWER, "NCCL 2.29.7 of the learner and 2.30.7 of the engine differ"),
        (Capabilities(devices=("GPU-bbbb-1",)), "the NCCL version of the engine is not known"),
        (SILENT, "the engine states no GPU"),
    ],
)
async def test_auto_takes_nccl_where_both_ends_can_and_says_why_not(
    stated: Capabilities, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "weightstore")
    groups, _ = groups_of("auto", e=stated)
    for _ in range(2):
        assert await backends(groups) == {"e": "gloo" if reason else "nccl"}
    assert no_nccl(OWN, stated) == reason
    told = [f"weights go over gloo engine=e reason={reason}"] if reason else []
    assert [record.message for record in caplog.records] == told
    assert groups.evicted == {}


async def test_nccl_refuses_engines_that_cannot_have_it_before_a_push(caplog: pytest.LogCaptureFixture) -> None:
    groups, made = groups_of("nccl", good=OTHER, shared=SAME, newer=NEWER)
    for _ in range(2):
        assert await backends(groups) == {"good": "nccl"}
        assert groups.evicted == {
            "shared": "weights.backend: nccl is not possible: learner and engine share GPU AAAA-0, which NCCL refuses",
            "newer": (
                "weights.backend: nccl is not possible: NCCL 2.29.7 of the learner and 2.30.7 of the engine differ"
            ),
        }
    assert [receiver.url for receiver in made if not receiver.closed] == ["http://good"]
    assert len(caplog.records) == 2, "it is logged at every push"


async def test_on_cpus_there_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weightstore")
    groups, _ = groups_of("auto", DeviceEnd(), e=SILENT)
    assert await backends(groups) == {"e": "gloo"}
    assert await backends(groups_of("gloo", e=OTHER)[0]) == {"e": "gloo"}
    assert not caplog.records
    assert own_end() == DeviceEnd(), "tests run where no GPU is visible"


async def test_engines_of_one_group_have_one_backend_and_different_gpus() -> None:
    third = Capabilities(devices=("GPU-cccc-2",), nccl="2.29.7")
    groups, _ = groups_of("auto", engines=9, a=OTHER, b=SILENT, c=third, d=OTHER, e=SILENT)
    formed = [[member.id for member in group.members] for group in await groups.reconcile()]
    assert formed == [["a", "c"], ["b", "e"], ["d"]]


@pytest.mark.parametrize(
    ("learner", "engine", "possible"),
    [
        ("2.29.7", "2.29.7", True),
        ("2.29.7", "2.29.1", True),
        ("2.29.7", "2.30.7", False),
        ("3.29", "2.29", False),
        ("", "2.29", False),
    ],
)
def test_versions_of_nccl_agree_in_major_and_minor(learner: str, engine: str, possible: bool) -> None:
    assert (nccl_differs(learner, engine) == "") is possible


async def test_memory_of_a_gpu_goes_only_to_engines_that_state_that_they_see_it() -> None:
    """An SGLang server that does not see it would end. Host memory can be read by all."""
    memory, place = HostMemory(), shared_memory_domain()

    def row(stated: Capabilities) -> LiveRow:
        return LiveRow(
            role="engine",
            id="e",
            host="h",
            pid=1,
            phase="serving",
            capabilities=stated,
            handles="ipc:///tmp/none",
            place=place,
        )

    def carried(stated: Capabilities, gpu: str) -> bool:
        receivers = HandleReceivers(
            memory, lambda row: cast(WeightReceiver, Receiver(row.address)), epoch=1, deadlines=Deadlines(1), gpu=gpu
        )
        try:
            return receivers.why_not(row(stated)) == ""
        finally:
            receivers.close()

    assert [carried(stated, OWN.uuid) for stated in (SAME, OTHER, SILENT)] == [True, False, False]
    assert [carried(stated, "") for stated in (SAME, OTHER, SILENT)] == [True, True, True]
    assert no_cuda_handles(OWN.uuid, OTHER) == (
        "it does not see the learner's GPU AAAA-0, which weights.staging: cuda needs; it sees GPU-bbbb-1"
    )


@pytest.mark.parametrize(
    ("settings", "on_gpu", "size"),
    [
        ({}, True, LARGE_BUCKET),
        ({}, False, SMALL_BUCKET),
        ({"backend": "nccl"}, True, LARGE_BUCKET),
        ({"backend": "gloo"}, True, SMALL_BUCKET),
        ({"transport": "handles"}, True, SMALL_BUCKET),
        ({"transport": "handles", "staging": "cuda"}, True, SHARED_BUCKET),
        ({"transport": "handles", "staging": "cuda"}, False, SMALL_BUCKET),
        ({"bucket_bytes": 5}, True, 5),
        ({"bucket_bytes": 5}, False, 5),
    ],
)
def test_buckets_are_large_where_the_transport_is_fast(settings: dict[str, Any], on_gpu: bool, size: int) -> None:
    assert WeightsConfig(**settings).bucket_size(on_gpu=on_gpu) == size


def test_a_negative_size_of_buckets_is_refused() -> None:
    with refusal(ValueError, place="bucket_bytes", got="-1"):
        WeightsConfig(bucket_bytes=-1)


@pytest.mark.parametrize(
    ("settings", "own", "shared"),
    [
        ({}, OWN, True),
        ({}, DeviceEnd(), False),
        ({"backend": "gloo"}, OWN, False),
        ({"backend": "gloo", "transport": "handles"}, OWN, True),
        ({"transport": "handles"}, DeviceEnd(), True),
    ],
)
def test_other_processes_can_read_what_is_staged_for_nccl_and_for_handles(
    settings: dict[str, Any], own: DeviceEnd, shared: bool
) -> None:
    assert isinstance(staging_memory(WeightsConfig(**settings), own), HostMemory) == shared
