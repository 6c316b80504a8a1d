"""Placement of ranks and engines: machine shapes with their results and refusals, and rules that hold for every
shape.
"""

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tidemill.bus import exit_codes
from tidemill.launch.devices.placement import USABLE, engine_place, place, senders
from tidemill.launch.devices.shapes import Device, Node, Others, Placed, PlacementRefused, RankPlace, Want, described

GB = 1_000_000_000


def node(devices: int | tuple[int, ...], rank: int = 0, memory_gb: int = 80, **fields: Any) -> Node:
    """Return a machine with devices of these indices (or this many), which are named ``<node>-<index>``."""
    indices = range(devices) if isinstance(devices, int) else devices
    found = tuple(Device(index=index, uuid=f"{rank}-{index}", memory_bytes=memory_gb * GB) for index in indices)
    return Node(rank=rank, host=f"node{rank}", devices=found, **fields)


def mig(*slices: tuple[int, int]) -> Node:
    return Node(devices=tuple(Device(index=gpu, slice=number, uuid=f"0-{gpu}:{number}") for gpu, number in slices))


def shown(placed: Placed) -> tuple[str, str]:
    """Return own devices of ranks and of engines: ``0 1 | 0`` has two ranks on one node and one on another."""
    ranks: dict[int, list[str]] = {}
    for rank in placed.ranks:
        ranks.setdefault(rank.node, []).append(rank.uuid.partition("-")[2] or "cpu")
    engines = ["+".join(uuid.partition("-")[2] for uuid in engine.uuids) or "cpu" for engine in placed.engines]
    return " | ".join(" ".join(on) for on in ranks.values()), " ".join(engines)


HIDDEN: dict[str, Any] = {"hidden_by": "CUDA_VISIBLE_DEVICES"}
SGLANG = {"kind": "sglang"}
KNOWN = {"nccl_learner": "2.29.7", "nccl_engine": "2.29.3"}
PLACED: dict[str, tuple[list[Node], dict[str, Any], str, str, str]] = {
    # The rows of the design's table.
    "row 1: no GPU": ([node(0)], {"ranks": 1, "engines": 2}, "cpu", "cpu cpu", "gloo"),
    "row 2: one GPU": ([node(1)], {"ranks": 1, "engines": 1}, "0", "0", "handles"),
    "row 4: 4 + 4": ([node(8)], {"ranks": 4, "tp": 4, "engines": 4, **KNOWN}, "0 1 2 3", "4 5 6 7", "nccl"),
    "row 5: 4 + 2 x TP2": (
        [node(8)],
        {"ranks": 4, "engines": 2, "devices_per_engine": 2, **KNOWN},
        "0 1 2 3",
        "4+5 6+7",
        "nccl",
    ),
    "row 6: colocated": (
        [node(8)],
        {"ranks": 8, "engines": 8, "colocated": True},
        "0 1 2 3 4 5 6 7",
        "0 1 2 3 4 5 6 7",
        "handles",
    ),
    "row 7: colocated TP4": (
        [node(8)],
        {"ranks": 8, "engines": 2, "devices_per_engine": 4, "colocated": True},
        "0 1 2 3 4 5 6 7",
        "0+1+2+3 4+5+6+7",
        "handles",
    ),
    "row 8: two nodes": ([node(8), node(8, 1)], {"ranks": 16, "tp": 8}, "0 1 2 3 4 5 6 7 | 0 1 2 3 4 5 6 7", "", ""),
    "row 9: a host": (
        [node(8), node(8, 1)],
        {"ranks": 8, "tp": 8, "engines": 8, **KNOWN},
        "0 1 2 3 4 5 6 7",
        "0 1 2 3 4 5 6 7",
        "nccl",
    ),
    # One machine.
    "no GPU, SGLang": ([node(0)], {"ranks": 2, "engines": 1, **SGLANG}, "cpu cpu", "cpu", "gloo"),
    "no GPU, handles": ([node(0)], {"ranks": 1, "engines": 1, "transport": "handles"}, "cpu", "cpu", "handles"),
    "one GPU, no engine": ([node(1)], {"ranks": 1}, "0", "", ""),
    "one GPU, three built-in engines": (
        [node(1)],
        {"ranks": 1, "engines": 3, "transport": "broadcast"},
        "0",
        "0 0 0",
        "gloo",
    ),
    "one GPU, engines alone": ([node(1)], {"engines": 2}, "", "0 0", ""),
    "one GPU, SGLang with its share": (
        [node(1)],
        {"ranks": 1, "engines": 1, **SGLANG, "memory_fraction": 0.4, "memory_rank": 30 * GB},
        "0",
        "0",
        "handles",
    ),
    "engines in one group over NCCL": (
        [node(4)],
        {
            "ranks": 1,
            "engines": 3,
            **KNOWN,
            "memory_rank": 74 * GB,
            "memory_group": 2 * GB,
            "engines_together": 1 << 30,
        },
        "0",
        "1 2 3",
        "nccl",
    ),
    "no groups over gloo": (
        [node(4)],
        {"ranks": 1, "engines": 3, **KNOWN, "backend": "gloo", "memory_rank": 76 * GB, "memory_group": GB},
        "0",
        "1 2 3",
        "gloo",
    ),
    "no process for groups over NCCL where the backend may be gloo and engines are elsewhere": (
        [node(1)],
        {"ranks": 1, "memory_rank": 76 * GB, "memory_group": GB},
        "0",
        "",
        "",
    ),
    "one GPU, colocated SGLang": (
        [node(1)],
        {"ranks": 1, "engines": 1, **SGLANG, "colocated": True},
        "0",
        "0",
        "handles",
    ),
    "one GPU, colocated, both nearly full": (
        [node(1)],
        {"ranks": 1, "engines": 1, "colocated": True, "memory_rank": 70 * GB, "memory_engine": 70 * GB},
        "0",
        "0",
        "handles",
    ),
    "two GPUs": ([node(2)], {"ranks": 1, "engines": 1, **KNOWN}, "0", "1", "nccl"),
    "two GPUs, versions not known": ([node(2)], {"ranks": 1, "engines": 1}, "0", "1", "gloo"),
    "two GPUs, versions differ": (
        [node(2)],
        {"ranks": 1, "engines": 1, **KNOWN, "nccl_engine": "2.30.7"},
        "0",
        "1",
        "gloo",
    ),
    "two GPUs, gloo": ([node(2)], {"ranks": 1, "engines": 1, **KNOWN, "backend": "gloo"}, "0", "1", "gloo"),
    "two GPUs, the learner on the CPU": (
        [node(2)],
        {"ranks": 2, "learner_on_cpu": True, "engines": 2},
        "cpu cpu",
        "0 1",
        "gloo",
    ),
    "two GPUs, engines on the CPU": (
        [node(2)],
        {"ranks": 2, "engines": 1, "devices_per_engine": 0},
        "0 1",
        "cpu",
        "gloo",
    ),
    "three GPUs, a block does not begin at 1": (
        [node(4)],
        {"ranks": 1, "engines": 1, "devices_per_engine": 2, **KNOWN},
        "0",
        "2+3",
        "nccl",
    ),
    "four GPUs, one is idle": ([node(4)], {"ranks": 1, "engines": 2, **KNOWN}, "0", "1 2", "nccl"),
    "five GPUs": ([node(5)], {"ranks": 2, "engines": 3, **KNOWN}, "0 1", "2 3 4", "nccl"),
    "six GPUs": ([node(6)], {"ranks": 2, "engines": 1, "devices_per_engine": 3, **KNOWN}, "0 1", "3+4+5", "nccl"),
    "eight GPUs, engines alone": ([node(8)], {"engines": 4, "devices_per_engine": 2}, "", "0+1 2+3 4+5 6+7", ""),
    "eight GPUs, ranks alone": ([node(8)], {"ranks": 8, "tp": 2}, "0 1 2 3 4 5 6 7", "", ""),
    "eight GPUs, PP2 CP2 TP2": ([node(8)], {"ranks": 8, "tp": 2, "pp": 2, "cp": 2}, "0 1 2 3 4 5 6 7", "", ""),
    "eight GPUs, fewer colocated engines": (
        [node(8)],
        {"ranks": 4, "engines": 2, "colocated": True},
        "0 1 2 3",
        "0 1",
        "handles",
    ),
    "ten GPUs": (
        [node(10)],
        {"ranks": 4, "engines": 3, "devices_per_engine": 2, **KNOWN},
        "0 1 2 3",
        "4+5 6+7 8+9",
        "nccl",
    ),
    "sixteen GPUs": (
        [node(16)],
        {"ranks": 8, "engines": 1, "devices_per_engine": 8, **KNOWN},
        "0 1 2 3 4 5 6 7",
        "8+9+10+11+12+13+14+15",
        "nccl",
    ),
    "shared memory is large enough": (
        [node(4, shm_bytes=2 * GB)],
        {"ranks": 2, "engines": 2, **SGLANG, "transport": "handles", "bucket_bytes": GB},
        "0 1",
        "2 3",
        "handles",
    ),
    # Hidden devices: numbers and blocks are those of the visible ones.
    "hidden": (
        [node((2, 3, 6, 7), **HIDDEN)],
        {"ranks": 2, "engines": 1, "devices_per_engine": 2, **KNOWN},
        "2 3",
        "6+7",
        "nccl",
    ),
    "hidden, odd": ([node((1, 4, 5), **HIDDEN)], {"ranks": 1, "engines": 2, **KNOWN}, "1", "4 5", "nccl"),
    # By hand.
    "learner.devices": (
        [node(4)],
        {"ranks": 2, "learner_devices": ("3", "0-1"), "engines": 2, **KNOWN},
        "3 1",
        "0 2",
        "nccl",
    ),
    "engine.devices": (
        [node(4)],
        {"ranks": 1, "engines": 1, "devices_per_engine": 2, "engine_devices": ("3", "1"), **KNOWN},
        "0",
        "3+1",
        "nccl",
    ),
    "both": (
        [node(4)],
        {"ranks": 1, "engines": 1, "learner_devices": ("2",), "engine_devices": ("0",), **KNOWN},
        "2",
        "0",
        "nccl",
    ),
    "shared by hand": (
        [node(4)],
        {"ranks": 1, "engines": 1, "learner_devices": ("2",), "engine_devices": ("2",)},
        "2",
        "2",
        "handles",
    ),
    "colocated by hand": (
        [node(4)],
        {"ranks": 2, "learner_devices": ("2", "3"), "engines": 2, "colocated": True},
        "2 3",
        "2 3",
        "handles",
    ),
    # MIG slices.
    "two slices": ([mig((0, 0), (0, 1))], {"ranks": 1, "engines": 1, **KNOWN}, "0:0", "0:1", "gloo"),
    "slices for engines": ([mig((0, 0), (0, 1), (1, 0))], {"engines": 3}, "", "0:0 0:1 1:0", ""),
    # Several machines.
    "two small nodes": ([node(4), node(4, 1)], {"ranks": 4, "engines": 4, **KNOWN}, "0 1 | 0 1", "2 3 2 3", "nccl"),
    "two nodes, colocated": (
        [node(2), node(2, 1)],
        {"ranks": 4, "engines": 2, "devices_per_engine": 2, "colocated": True},
        "0 1 | 0 1",
        "0+1 0+1",
        "handles",
    ),
    "three nodes, two have ranks": (
        [node(4), node(4, 1), node(4, 2)],
        {"ranks": 8, "tp": 4},
        "0 1 2 3 | 0 1 2 3",
        "",
        "",
    ),
    "nodes of different sizes": (
        [node(8), node(2, 1)],
        {"ranks": 8, "tp": 4, "engines": 2, **KNOWN},
        "0 1 2 3 4 5 6 7",
        "0 1",
        "nccl",
    ),
    "eight nodes of eight": (
        [node(8, rank) for rank in range(8)],
        {"ranks": 32, "tp": 4, "engines": 8, "devices_per_engine": 4, **KNOWN},
        " | ".join(["0 1 2 3"] * 8),
        " ".join(["4+5+6+7"] * 8),
        "nccl",
    ),
    "two nodes, learner by index": (
        [node(4), node(4, 1)],
        {"ranks": 4, "learner_devices": ("2", "3"), "engines": 2, **KNOWN},
        "2 3 | 2 3",
        "0 1",
        "nccl",
    ),
    "one of two nodes, each with a stage": ([node(4)], {"ranks": 4, "nodes": 2, "tp": 4, "pp": 2}, "0 1 2 3", "", ""),
    "one of two nodes, each with a stage of one rank": ([node(0)], {"ranks": 1, "nodes": 2, "pp": 2}, "cpu", "", ""),
    "two nodes without a GPU": ([node(0), node(0, 1)], {"ranks": 4, "tp": 2}, "cpu cpu | cpu cpu", "", ""),
}
REFUSED: dict[str, tuple[list[Node], dict[str, Any], str]] = {
    "row 2: memory": (
        [node(1)],
        {"ranks": 1, "engines": 1, "memory_rank": 70 * GB, "memory_engine": 7 * GB},
        (
            r"memory of device 0: want 77.0 GB \(70.0 GB for the learner, 7.0 GB for 1 engine\(s\);.*got 76.0 GB, "
            r"95% of it; use bfloat16"
        ),
    ),
    "row 3: SGLang beside the learner": (
        [node(1)],
        {"ranks": 1, "engines": 1, **SGLANG},
        r"on device 0.*; set learner.colocated: true, or engine.sglang.arguments.mem_fraction_static",
    ),
    "row 10: hidden": (
        [node((2, 3, 6), **HIDDEN)],
        {"ranks": 2, "engines": 1, "devices_per_engine": 2},
        (
            r"want 4 devices \(2 for ranks, 1 x 2 for engines\), got 3 visible \(2, 3, 6; others hidden by "
            r"CUDA_VISIBLE_DEVICES\); lower"
        ),
    ),
    "TP beyond a machine": (
        [node(4), node(4, 1)],
        {"ranks": 8, "tp": 8},
        r"tensor_parallel: want <= 4, the devices of one machine, got 8",
    ),
    "not a multiple": (
        [node(8)],
        {"ranks": 6, "tp": 2, "pp": 2},
        r"ranks: want a multiple of tensor x pipeline .* 2 x 2 x 1, got 6",
    ),
    "not a multiple on two nodes": (
        [node(8)],
        {"ranks": 3, "nodes": 2, "pp": 4},
        r"ranks: want a multiple of .* 1 x 4 x 1, got 6",
    ),
    "two ranks, one GPU": (
        [node(1)],
        {"ranks": 2},
        r"want a device for each of 2 ranks: NCCL refuses two ranks on one GPU, got 1 visible \(0\)",
    ),
    "unequal parts": (
        [node(8), node(4, 1)],
        {"ranks": 12, "tp": 4},
        r"12 ranks in equal parts .*, got machines of 8 and 4 devices",
    ),
    "ranks on slices": (
        [mig((0, 0), (0, 1))],
        {"ranks": 2},
        r"NCCL does not work between MIG slices, got 2 ranks, with MIG slice 0:0",
    ),
    "an engine on slices": (
        [mig((0, 0), (0, 1))],
        {"engines": 1, "devices_per_engine": 2},
        r"got an engine of 2 devices on MIG slices",
    ),
    "NCCL on slices": (
        [mig((0, 0), (0, 1))],
        {"ranks": 1, "engines": 1, "backend": "nccl"},
        r"weights.backend: want gloo or auto here.*MIG",
    ),
    "NCCL on one GPU": (
        [node(1)],
        {"ranks": 1, "engines": 1, "backend": "nccl"},
        r"nccl: one GPU: NCCL is not possible; set weights.backend",
    ),
    "NCCL versions": (
        [node(2)],
        {"ranks": 1, "engines": 1, "backend": "nccl", **KNOWN, "nccl_engine": "2.30.7"},
        r"nccl: NCCL 2.29.7 of the learner and 2.30.7 of the engine differ",
    ),
    "NCCL with the learner on the CPU": (
        [node(2)],
        {"ranks": 1, "learner_on_cpu": True, "engines": 1, "backend": "nccl"},
        r"nccl: NCCL needs a GPU at both ends",
    ),
    "CUDA handles to an engine on the CPU": (
        [node(2)],
        {"ranks": 1, "engines": 1, "devices_per_engine": 0, "transport": "handles", "staging": "cuda"},
        (
            r"weights.staging: want engines that see the learner's 0-0, got engine 0, which does not; set "
            r"weights.staging: host"
        ),
    ),
    "CUDA handles to another machine": (
        [node(1), node(1, 1)],
        {"ranks": 1, "engines": 1, "transport": "handles", "staging": "cuda"},
        r"want engines that see the learner's 0-0, got engine 0",
    ),
    "CUDA handles, colocated": (
        [node(1)],
        {"ranks": 1, "engines": 1, "colocated": True, "transport": "handles", "staging": "cuda"},
        r"weights.staging: want host, got cuda with learner.colocated",
    ),
    "CUDA handles of a slice": (
        [mig((0, 0), (0, 1))],
        {"ranks": 1, "engines": 1, "transport": "handles", "staging": "cuda"},
        r"want host on a MIG slice",
    ),
    "CUDA handles of the CPU": (
        [node(2)],
        {"ranks": 1, "learner_on_cpu": True, "engines": 1, "transport": "handles", "staging": "cuda"},
        r"want host where the learner runs on the CPU",
    ),
    "CUDA handles to a torn block": (
        [node(4)],
        {
            "ranks": 1,
            "engines": 1,
            "devices_per_engine": 2,
            "engine_devices": ("3", "1"),
            **SGLANG,
            "transport": "handles",
            "staging": "cuda",
        },
        r"engine.devices: want devices one behind the other with weights.staging: cuda, got 3, 1",
    ),
    "a rank beyond its device": ([node(2)], {"ranks": 2, "memory_rank": 80 * GB}, r"memory of device 0: want 80.0 GB"),
    "staging beyond the device": (
        [node(2)],
        {"ranks": 2, "memory_rank": 50 * GB, "memory_sender": 30 * GB},
        r"memory of device 0: want 80.0",
    ),
    "groups over NCCL beyond the device of the rank that sends": (
        [node(4)],
        {"ranks": 1, "engines": 3, **KNOWN, "memory_rank": 74 * GB, "memory_group": GB},
        (
            r"memory of device 0: want 77.0 GB \(77.0 GB for the learner, 3.0 GB of it for 3 group\(s\) over "
            r"NCCL; activations"
        ),
    ),
    "groups over NCCL of one rank of a stage": (
        [node(5)],
        {
            "ranks": 4,
            "tp": 2,
            "pp": 2,
            "senders": 1,
            "engines": 1,
            **KNOWN,
            "memory_rank": 75 * GB,
            "memory_group": 2 * GB,
        },
        r"memory of device 0: want 77.0 GB",
    ),
    "a group over NCCL with engines of other hosts": (
        [node(1)],
        {"ranks": 1, "backend": "nccl", "memory_rank": 75 * GB, "memory_group": 2 * GB},
        r"memory of device 0: want 77.0 GB .*2.0 GB of it for 1 group\(s\)",
    ),
    "an engine beyond its device": (
        [node(2)],
        {"engines": 2, "memory_engine": 77 * GB},
        r"memory of device 0: want 77.0 GB",
    ),
    "SGLang's share and the learner": (
        [node(1)],
        {"ranks": 1, "engines": 1, **SGLANG, "memory_fraction": 0.5, "memory_rank": 40 * GB},
        r"memory of device 0: want 80.0 GB \(40.0 GB for the learner, 40.0 GB for 1 engine",
    ),
    "shared memory": (
        [node(4, shm_bytes=64_000_000)],
        {"ranks": 2, "engines": 2, **SGLANG, "transport": "handles", "bucket_bytes": GB},
        (
            r"/dev/shm: want 2.0 GB free .* of 2 SGLang server\(s\), got 0.1 GB; start the container with a "
            r"larger --shm-size"
        ),
    ),
    "shared memory without a GPU": (
        [node(0, shm_bytes=64_000_000)],
        {"ranks": 1, "engines": 1, **SGLANG, "transport": "handles", "bucket_bytes": GB},
        r"/dev/shm: want 1.0 GB free",
    ),
    "no block across machines": (
        [node(2), node(2, 1)],
        {"ranks": 1, "engines": 1, "devices_per_engine": 3},
        r"want 3 free device\(s\), one behind",
    ),
    "no aligned block": (
        [node(4)],
        {"ranks": 1, "engines": 1, "devices_per_engine": 3},
        (
            r"want 3 free device\(s\), one behind the other, from a multiple of 3 on, got 1, 2, 3 free of 4 "
            r"visible .*engine.devices"
        ),
    ),
    "colocated elsewhere": (
        [node(8)],
        {"ranks": 2, "engines": 3, "colocated": True},
        r"up.engines: want at most one engine .* got 3 engines of 1",
    ),
    "two colocated engines, one GPU": (
        [node(1)],
        {"ranks": 1, "engines": 2, "colocated": True},
        r"got 2 engines of 1 devices, 1 ranks",
    ),
    "colocated elsewhere by hand": (
        [node(4)],
        {"ranks": 2, "engines": 1, "colocated": True, "engine_devices": ("3",)},
        r"engine.devices: want devices of the ranks with learner.colocated, got 3",
    ),
    "a device twice": (
        [Node(devices=(Device(index=0, uuid="a"), Device(index=1, uuid="a")))],
        {"ranks": 1},
        r"every device once, got a twice",
    ),
    "a machine twice": ([node(2), replace(node(2), rank=1)], {"ranks": 4}, r"every device once, got 0-0 twice"),
    "named twice": (
        [node(4)],
        {"ranks": 2, "learner_devices": ("1", "0-1")},
        r"learner.devices: want every device once, got '0-1'",
    ),
    "unknown": (
        [node(4)],
        {"engines": 1, "engine_devices": ("4",)},
        r"engine.devices: want indices or UUIDs .* got '4': 4 visible \(0, 1, 2, 3\)",
    ),
    "named, and none there": (
        [node(0)],
        {"ranks": 1, "learner_devices": ("0",)},
        r"learner.devices: want visible devices, got none",
    ),
    "engines named, and none there": (
        [node(0)],
        {"engines": 1, "engine_devices": ("0",)},
        r"engine.devices: want visible devices, got none",
    ),
    "too few named for ranks": (
        [node(4)],
        {"ranks": 2, "learner_devices": ("1",)},
        r"learner.devices: want one device for each rank, got 1 for 2",
    ),
    "too many named for ranks": (
        [node(4)],
        {"ranks": 1, "learner_devices": ("1", "2")},
        r"learner.devices: want one device for each rank, got 2",
    ),
    "too few named for engines": (
        [node(4)],
        {"engines": 2, "engine_devices": ("1",)},
        r"engine.devices: want 1 devices for each engine, got 1 for 2",
    ),
    "no multiple named": (
        [node(4)],
        {"engines": 1, "devices_per_engine": 2, "engine_devices": ("1",)},
        r"engine.devices: want a multiple of 2",
    ),
    "SGLang shares by hand": (
        [node(4)],
        {"ranks": 1, "engines": 1, **SGLANG, "engine_devices": ("0",)},
        r"engine.sglang: want a device of its own, .*both on device 0",
    ),
    "a second SGLang on one GPU": (
        [node(1)],
        {"engines": 2, **SGLANG},
        r"engine: want 1 free device\(s\), got none free of 1 visible",
    ),
}


@pytest.mark.parametrize("shape", PLACED)
def test_a_machine_shape_has_its_placement(shape: str) -> None:
    nodes, want, ranks, engines, transport = PLACED[shape]
    placed = place(nodes, Want(**want))
    assert (*shown(placed), placed.transport) == (ranks, engines, transport)
    assert [rank.rank for rank in placed.ranks] == list(range(want.get("ranks", 0)))
    assert [engine.number for engine in placed.engines] == list(range(want.get("engines", 0)))
    assert described(nodes, placed)


@pytest.mark.parametrize("shape", REFUSED)
def test_a_machine_shape_is_refused_with_the_reason(shape: str) -> None:
    nodes, want, message = REFUSED[shape]
    with pytest.raises(PlacementRefused, match=message) as caught:
        place(nodes, Want(**want))
    assert caught.value.cure and caught.value.exit_code == exit_codes.CONFIG
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.where, again.want, again.got, again.cure) == caught.value.args


def test_remarks_tell_what_a_user_may_not_expect() -> None:
    assert (
        "the learner and engine 0 share a GPU: one GPU: NCCL is not possible"
        in place([node(1)], Want(ranks=1, engines=1)).why
    )
    assert any("--nodes 1" in text for text in place([node(8), node(8, 1)], Want(ranks=8, tp=8, engines=8)).why)
    assert "engines are placed by their hosts" in place([node(8)], Want(ranks=8)).why
    assert "no process on device 3" in place([node(4)], Want(ranks=1, engines=2)).why
    differ = place([node(2)], Want(ranks=1, engines=1, nccl_learner="2.29.7", nccl_engine="2.30.7"))
    assert differ.why == ("weights go over gloo: NCCL 2.29.7 of the learner and 2.30.7 of the engine differ",)
    unsure = place([node(2)], Want(ranks=1, engines=1, backend="nccl"))
    assert (unsure.transport, "may be refused at the first push" in unsure.why[0]) == ("nccl", True)


def test_the_placement_in_words() -> None:
    nodes = [node(4)]
    want = Want(ranks=2, engines=2, nccl_learner="2.29", nccl_engine="2.29")
    assert described(nodes, place(nodes, want)) == [
        "ranks 0 to 1 on devices 0, 1",
        "engine 0 on device 2",
        "engine 1 on device 3",
        "weights over nccl",
    ]
    assert described([node(0)], place([node(0)], Want(ranks=1))) == [
        "rank 0 on the CPU",
        "engines are placed by their hosts",
    ]


def test_an_engine_that_opens_memory_of_the_learner_sees_its_device() -> None:
    """SGLang counts from ``base_index``; the built-in engine takes the first device that it sees."""
    cuda = Want(ranks=2, engines=2, transport="handles", staging="cuda")
    everything = tuple(f"0-{index}" for index in range(4))
    sglang = place([node(4)], replace(cuda, kind="sglang")).engines
    assert [(one.visible, one.base_index) for one in sglang] == [(everything, 2), (everything, 3)]
    builtin = place([node(4)], cuda).engines
    assert [one.visible for one in builtin] == [("0-2", "0-0", "0-1", "0-3"), ("0-3", "0-0", "0-1", "0-2")]
    assert {one.base_index for one in builtin} == {0}
    assert [one.visible for one in place([node(4)], replace(cuda, staging="host")).engines] == [("0-2",), ("0-3",)]


def test_one_more_engine_beside_the_learner_needs_room_in_shared_memory() -> None:
    handles: dict[str, Any] = {**SGLANG, "transport": "handles", "bucket_bytes": GB}
    small = node(4, shm_bytes=64_000_000)
    with refusal(PlacementRefused, where="/dev/shm", want=re.compile(r"^1\.0 GB")):
        engine_place([small], Want(ranks=1, engines=1, **handles))
    with refusal(PlacementRefused, where="/dev/shm", want=re.compile(r"^2\.0 GB")):
        engine_place(
            [small], Want(engines=1, **handles), others=Others(engines=(("0-1",), ("7-7",)), learner_is_here=True)
        )
    elsewhere, by_broadcast = (
        Want(ranks=0, engines=1, **handles),
        Want(ranks=1, engines=1, **{**handles, "transport": "broadcast"}),
    )
    assert engine_place([small], elsewhere).uuids and engine_place([small], by_broadcast).uuids
    assert engine_place([node(4, shm_bytes=2 * GB)], Want(ranks=1, engines=1, **handles)).uuids


def test_one_more_engine_gets_a_block_that_no_other_has() -> None:
    want = Want(ranks=2, devices_per_engine=2)
    assert engine_place([node(8)], want).uuids == ("0-2", "0-3")
    assert engine_place([node(8)], want, others=Others(engines=(("0-3",), ("0-6",)))).uuids == ("0-4", "0-5")
    with refusal(PlacementRefused, where="engine", got=re.compile(r"^2, 4, 6\b")):
        engine_place([node(8)], want, others=Others(engines=(("0-3",), ("0-5",)), ranks=("0-7",)))
    assert engine_place([node(0)], want).uuids == ()


def test_one_more_engine_needs_memory_beside_those_that_are_there() -> None:
    """On the only device of a machine; on devices that are not known to have any nothing is compared."""
    one = Want(memory_rank=30 * GB, memory_engine=20 * GB)
    assert engine_place([node(1)], one, others=Others(ranks=("0-0",), engines=(("0-0",), ("9-9",)))).uuids == ("0-0",)
    with refusal(PlacementRefused, where="memory of device 0", want=re.compile(r"^90\.0 GB.*\b30\.0 GB.*\b60\.0 GB")):
        engine_place([node(1)], one, others=Others(ranks=("0-0",), engines=(("0-0",), ("0-0",))))
    with refusal(PlacementRefused, where="memory of device 0", want=re.compile(r"^20\.0 GB.*\b20\.0 GB")):
        engine_place([node(1, memory_gb=16)], one)
    assert engine_place([node(1, memory_gb=0)], one).uuids == ("0-0",)


def test_one_more_engine_over_nccl_needs_memory_of_the_rank_that_sends() -> None:
    want = Want(ranks=1, memory_rank=74 * GB, memory_group=GB, **KNOWN)
    running = Others(engines=(("0-1",),))
    assert engine_place([node(4)], want, others=running).uuids == ("0-2",)
    with refusal(PlacementRefused, where="memory of device 0", want=re.compile(r"^77\.0 GB.*\b3\.0 GB")):
        engine_place([node(4)], want, others=replace(running, engines=(("0-1",), ("1-0",))))
    assert engine_place(
        [node(4)], replace(want, nccl_engine="2.30.1"), others=replace(running, engines=(("0-1",), ("1-0",)))
    ).uuids


@st.composite
def sites(draw: st.DrawFn) -> tuple[list[Node], Want]:
    tp, dp, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 3, 4]))
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    indices = [
        tuple(draw(st.lists(st.integers(0, 15), min_size=count, max_size=count, unique=True))) for count in counts
    ]
    colocated = draw(st.booleans()) and dp > 0
    want = Want(ranks=tp * dp, tp=tp, engines=draw(st.integers(0, 6)), devices_per_engine=size, colocated=colocated)
    return [node(found, rank) for rank, found in enumerate(indices)], want


@given(sites(), st.randoms(use_true_random=False))
def test_rules_that_hold_for_every_shape(site: tuple[list[Node], Want], random: Any) -> None:
    nodes, want = site
    shuffled = [
        replace(one, devices=tuple(random.sample(one.devices, len(one.devices))))
        for one in random.sample(nodes, len(nodes))
    ]
    try:
        placed = place(nodes, want)
    except PlacementRefused as refused:
        with pytest.raises(PlacementRefused) as again:
            place(shuffled, want)
        assert str(again.value) == str(refused)
        return
    assert place(shuffled, want) == placed, "it depends on the order in which devices are given"
    total = sum(len(one.devices) for one in nodes)
    if not total:
        assert not any(rank.uuids for rank in placed.ranks) and not any(engine.uuids for engine in placed.engines)
        return
    ordinals = {
        one.rank: [f"{one.rank}-{index}" for index in sorted(device.index for device in one.devices)] for one in nodes
    }
    of_ranks = [rank.uuid for rank in placed.ranks]
    of_engines = [uuid for engine in placed.engines for uuid in engine.uuids]
    assert len(set(of_ranks)) == len(of_ranks)
    if total > 1:
        assert len(set(of_engines)) == len(of_engines), "a device is given twice"
        assert want.colocated or not set(of_ranks) & set(of_engines), "an engine has the device of a rank"
    for start in range(0, want.ranks, want.tp):
        assert len({rank.node for rank in placed.ranks[start : start + want.tp]}) == 1, (
            "a tensor-parallel group crosses nodes"
        )
    for rank in placed.ranks:
        assert rank.uuid in ordinals[rank.node]
    for engine in placed.engines:
        assert len(engine.uuids) == want.devices_per_engine
        pool = (
            [rank.uuid for rank in placed.ranks if rank.node == engine.node]
            if want.colocated
            else ordinals[engine.node]
        )
        first = pool.index(engine.uuids[0])
        assert first % want.devices_per_engine == 0, "a block is not aligned"
        assert tuple(pool[first : first + want.devices_per_engine]) == engine.uuids, "a block is torn"


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100))
def test_memory_adds_up_or_is_refused(size_gb: int, learner_gb: int, engine_gb: int) -> None:
    want = Want(ranks=1, engines=1, memory_rank=learner_gb * GB, memory_engine=engine_gb * GB)
    fits = (learner_gb + engine_gb) * GB <= USABLE * size_gb * GB
    try:
        place([node(1, memory_gb=size_gb)], want)
    except PlacementRefused as refused:
        assert not fits and refused.where == "memory of device 0"
    else:
        assert fits


@pytest.mark.parametrize(
    ("ranks", "pp", "count", "sending"),
    [
        (1, 1, 1, [0]),
        (1, 2, 1, [0]),
        (4, 1, 1, [0]),
        (4, 1, 2, [0, 1]),
        (4, 2, 1, [0, 2]),
        (8, 2, 2, [0, 1, 4, 5]),
        (8, 4, 2, list(range(8))),
    ],
)
def test_the_first_ranks_of_every_stage_send(ranks: int, pp: int, count: int, sending: list[int]) -> None:
    places = [RankPlace(rank=rank, node=0, local_rank=rank) for rank in range(ranks)]
    assert [rank.rank for rank in senders(Want(ranks=ranks, pp=pp, senders=count), places)] == sending
