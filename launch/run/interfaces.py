"""Network interfaces of this machine by address: gloo and NCCL are given a name, not an address. Source: ``man 3 getifaddrs`` (Linux)."""

import ctypes
import ipaddress
import socket
import sys

_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Offset and length of the address in ``sockaddr_in`` and ``sockaddr_in6``."""


class _Entry(ctypes.Structure):
    """``struct ifaddrs``; the fields after the address are not read."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address (text of IPv4 or IPv6); empty = none has it, or this is not Linux.

    Several interfaces may have one link-local address: then it is the one behind ``%``, else the first.
    """
    bare, _, zone = address.strip("[]").partition("%")
    try:
        wanted = ipaddress.ip_address(bare)
    except ValueError:
        return ""
    names = [name for name, found in _addresses() if found == wanted]
    return zone if zone in names else next(iter(names), "")


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Return (interface, address) of every address of this machine."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_Entry)]
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        return []
    found: list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]] = []
    try:
        entry = first
        while entry:
            row = entry.contents
            if row.address:  # an interface may have none
                family = ctypes.c_ushort.from_address(row.address).value
                if family in _ADDRESS_AT:
                    offset, length = _ADDRESS_AT[socket.AddressFamily(family)]
                    found.append((row.name.decode(), ipaddress.ip_address(ctypes.string_at(row.address + offset, length))))
            entry = row.next
    finally:
        libc.freeifaddrs(first)
    return found
