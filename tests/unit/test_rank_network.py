"""Ranks on a machine without a network use the loopback interface; elsewhere gloo and NCCL choose."""

from pathlib import Path

import pytest

from tidemill.learner.ranks.process import loopback_variables

LO = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("interfaces", "given", "wanted"),
    [
        ({"lo": "0x9"}, {}, LO),
        ({"lo": "0x9", "eth0": "0x1002"}, {}, LO),
        ({"lo": "0x9", "eth0": "0x1003"}, {}, {}),
        ({"lo": "0x8"}, {}, {}),
        ({"lo": "0x9"}, {"GLOO_SOCKET_IFNAME": "x"}, {"NCCL_SOCKET_IFNAME": "lo"}),
        ({"lo": "0x9", "odd": "no number"}, {}, LO),
        ({}, {}, {}),
    ],
    ids=["loopback alone", "others are down", "one is up", "loopback is down", "given", "unreadable", "no interfaces"],
)
def test_the_interface(
    tmp_path: Path, interfaces: dict[str, str], given: dict[str, str], wanted: dict[str, str]
) -> None:
    for name, flags in interfaces.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags}\n")
    assert loopback_variables(given, tmp_path) == wanted


def test_no_interfaces_can_be_read(tmp_path: Path) -> None:
    assert loopback_variables({}, tmp_path / "missing") == {}
