"""Throughput of pushes by transport."""

import pytest

from tidemill.weightstore.push.push import Throughput


def test_groups_of_one_transport_add_up_and_the_slowest_counts() -> None:
    throughput = Throughput()
    size = 16_000_000_000
    throughput.add("nccl", 3 * size, 2.0)
    throughput.add("nccl", size, 4.0)
    throughput.add("nccl", size, 1.0)
    throughput.add("gloo", size, 8.0)
    assert throughput.gb_per_s == pytest.approx({"nccl": 20.0, "gloo": 2.0})


def test_a_transport_without_engines_has_none() -> None:
    throughput = Throughput()
    throughput.add("gloo", 0, 30.0)
    throughput.add("nccl", 1000, 0.0)
    assert throughput.gb_per_s == {}
