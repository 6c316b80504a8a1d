"""The interface of an address, on a machine with several of them: the C library is a fake, its structures are real."""

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tidemill.launch.run import learner_nodes
from tidemill.launch.run.learner_nodes import interface_of

PACKET = 17
"""AF_PACKET: entries with the hardware address of an interface."""
MACHINE = [
    ("lo", "packet"),
    ("eth0", "packet"),
    ("tun0", ""),
    ("lo", "127.0.0.1"),
    ("eth0", "10.0.0.5"),
    ("eth0", "10.0.0.6"),
    ("eth0:1", "10.0.0.7"),
    ("ib0", "10.1.0.5"),
    ("docker0", "172.17.0.1"),
    ("lo", "::1"),
    ("eth0", "fd00::5"),
    ("eth0", "fd00::6"),
    ("eth0", "fe80::1"),
    ("ib0", "fe80::1"),
    ("ib0", "fd01::5"),
]
"""Interface and address of each entry, in the order of Linux: hardware first, then IPv4, then IPv6. A tunnel has no
address.
"""


class Library:
    """``getifaddrs`` and ``freeifaddrs`` of a C library, for a machine with these addresses."""

    def __init__(self, machine: Sequence[tuple[str, str]], result: int = 0) -> None:
        self.freed: list[bool] = []
        self._kept: list[Any] = []
        entries = [self._entry(name, address) for name, address in machine]
        for entry, following in pairwise(entries):
            entry.next = ctypes.pointer(following)

        def getifaddrs(first: Any) -> int:
            if result == 0 and entries:
                first._obj.contents = entries[0]
            return result

        def freeifaddrs(first: Any) -> None:
            self.freed.append(bool(first))

        self.getifaddrs, self.freeifaddrs = getifaddrs, freeifaddrs

    def _entry(self, name: str, address: str) -> Any:
        if address == "packet":
            data = struct.pack("HHi8s", PACKET, 0, 1, b"hardware")
        elif not address:
            data = b""
        elif (parsed := ipaddress.ip_address(address)).version == 4:
            data = struct.pack("=HH4s8x", socket.AF_INET, 0, parsed.packed)
        else:
            data = struct.pack("=HHI16sI", socket.AF_INET6, 0, 0, parsed.packed, 2)
        buffer = ctypes.create_string_buffer(data) if data else None
        self._kept.append(buffer)
        return learner_nodes.InterfaceEntry(
            name=name.encode(), address=ctypes.addressof(buffer) if buffer is not None else None
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(MACHINE)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: found)
    return found


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "lo"),
        ("10.0.0.5", "eth0"),
        ("10.0.0.6", "eth0"),
        ("10.0.0.7", "eth0:1"),
        ("10.1.0.5", "ib0"),
        ("172.17.0.1", "docker0"),
        ("10.0.0.8", ""),
        ("0.0.0.0", ""),
        ("::1", "lo"),
        ("[::1]", "lo"),
        ("fd00::5", "eth0"),
        ("fd00::6", "eth0"),
        ("fd00:0:0:0::5", "eth0"),
        ("FD01::5", "ib0"),
        ("[fd01::5]", "ib0"),
        ("fd02::5", ""),
        ("::", ""),
        ("fe80::1", "eth0"),
        ("fe80::1%eth0", "eth0"),
        ("fe80::1%ib0", "ib0"),
        ("[fe80::1%ib0]", "ib0"),
        ("fe80::1%gone", "eth0"),
        ("fe80::2%eth0", ""),
        ("::ffff:10.0.0.5", ""),
        ("a name", ""),
        ("10.0.0", ""),
        ("10.0.0.5:4222", ""),
        ("", ""),
    ],
)
def test_the_interface_of_an_address(library: Library, address: str, name: str) -> None:
    assert interface_of(address) == name
    assert library.freed in ([], [True]), "the list is freed once"


def test_a_machine_whose_interfaces_cannot_be_read_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (Library(MACHINE, result=-1), Library([])):
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, library=library, **__: library)
        assert interface_of("127.0.0.1") == ""
    monkeypatch.setattr(learner_nodes.sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("not on this platform"))
    assert interface_of("127.0.0.1") == ""


def test_the_real_library() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""
