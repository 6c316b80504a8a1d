"""The machine's part of a node agent: layout of ranks over nodes with devices, and the proof of a shared directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.bus.client.addresses import HERE
from tidemill.bus.wire.rows import NodeRow
from tidemill.launch.devices.demand import want_of
from tidemill.launch.devices.shapes import Node
from tidemill.launch.run import learner_nodes
from tidemill.launch.run.learner_nodes import NodeWork
from tidemill.launch.run.learner_process import NodePlace
from tidemill.launch.settings.config_loader import from_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.errors import NodeRefused


def config(directory: Path, **learner: object) -> RunConfig:
    return from_map({"run": "r", "directory": str(directory), "learner": learner}, "test")


def work(directory: Path, **learner: object) -> NodeWork:
    return node_work(directory, 0, learner)


def node_work(directory: Path, rank: int, learner: dict[str, object]) -> NodeWork:
    return NodeWork(
        config(directory, **learner), [], Node(), (), reach=HERE, place=NodePlace(2, rank), on_sigterm=pytest.fail
    )


def offers(*devices: int) -> list[NodeRow]:
    one = NodeRow(node=0, nodes=len(devices), nonce="0" * 12)
    names = [tuple(f"GPU-{node}-{index}" for index in range(count)) for node, count in enumerate(devices)]
    return [
        replace(one, node=node, host=f"h{node}", devices=uuids, device_memory_bytes=80 << 30)
        for node, uuids in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("learner", "devices", "counts"),
    [
        ({"data_parallel": 2, "nodes": 2}, (0, 0), (1, 1)),
        ({"data_parallel": 4, "nodes": 2, "tensor_parallel": 2}, (0, 0), (4, 4)),
        ({"data_parallel": 2, "nodes": 2, "tensor_parallel": 8}, (8, 8), (8, 8)),
        ({"data_parallel": 3, "nodes": 3}, (1, 1, 1), (1, 1, 1)),
        ({"data_parallel": 4, "nodes": 2}, (8, 4), (2, 2)),
    ],
)
def test_ranks_are_in_equal_parts(
    tmp_path: Path, learner: dict[str, object], devices: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert work(tmp_path, **learner).layout(offers(*devices)) == counts


@pytest.mark.parametrize(
    ("learner", "devices", "why"),
    [
        ({"data_parallel": 4, "nodes": 2}, (1, 1), {"where": "devices", "got": "2 visible (0 | 0)"}),
        (
            {"data_parallel": 2, "nodes": 2, "tensor_parallel": 4},
            (4, 2),
            {"where": "devices", "got": "6 visible (0, 1, 2, 3 | 0, 1)"},
        ),
    ],
)
def test_devices_that_do_not_suffice_are_refused(
    tmp_path: Path, learner: dict[str, object], devices: tuple[int, ...], why: dict[str, Any]
) -> None:
    with refusal(NodeRefused, **why):
        work(tmp_path, **learner).layout(offers(*devices))


@pytest.mark.parametrize(
    "learner", [{"nodes": 2}, {"data_parallel": 3, "nodes": 2}, {"data_parallel": 2, "nodes": 2, "colocated": True}]
)
def test_settings_that_do_not_divide_are_refused(tmp_path: Path, learner: dict[str, object]) -> None:
    with refusal(ValueError, place="test: learner.nodes", got="2"):
        config(tmp_path, **learner)


async def test_a_directory_is_shared_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_nodes, "PROOF_S", 0.3)
    shared: dict[str, object] = {"checkpoint": {"store": "shared"}}
    leader, same, other = (node_work(tmp_path / name, rank, shared) for name, rank in (("a", 0), ("a", 1), ("b", 1)))
    await leader.prove("1")
    await same.check("1")
    with refusal(NodeRefused, where="checkpoints"):
        await other.check("1")
    await leader.prove("2")
    await same.check("2")
    with pytest.raises(NodeRefused):
        await same.check("1")


async def test_a_directory_of_each_node_is_the_default_and_one_that_is_shared_is_refused(tmp_path: Path) -> None:
    leader, same, other = (node_work(tmp_path / name, rank, {}) for name, rank in (("a", 0), ("a", 1), ("b", 1)))
    await leader.prove("1")
    await leader.check("1")
    await other.check("1")
    with refusal(NodeRefused, where="checkpoints"):
        await same.check("1")
    await same.check("2")  # the file of an earlier attempt shows nothing


def test_one_node_wants_devices_for_its_own_ranks_only(tmp_path: Path) -> None:
    """``tidemill check`` and ``up`` place the ranks of this machine."""
    of_one = want_of(config(tmp_path, data_parallel=4, tensor_parallel=2, nodes=2), Node(), learner=True, engines=0)
    assert of_one.ranks == 4
