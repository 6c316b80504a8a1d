"""The address at which a process listens, and the one that it advertises: by its route to the bus, and always reachable
from there.
"""

import errno
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from tests.refusals import refusal
from tidemill.bus.client.addresses import BusRoute, Reach, bare, in_url, reach, route_to

HERE, LAN, ELSEWHERE = BusRoute("127.0.0.1", True), BusRoute("10.0.0.5", True), BusRoute("10.0.0.7", False)


@pytest.mark.parametrize(
    ("host", "advertise", "route", "want"),
    [
        ("auto", "", HERE, Reach("127.0.0.1", "127.0.0.1")),
        ("auto", "", LAN, Reach("10.0.0.5", "10.0.0.5")),
        ("auto", "", ELSEWHERE, Reach("10.0.0.7", "10.0.0.7")),
        ("auto", "", BusRoute("fd00::7", False), Reach("fd00::7", "fd00::7")),
        ("0.0.0.0", "", ELSEWHERE, Reach("0.0.0.0", "10.0.0.7")),
        ("[fd00::9]", "", BusRoute("fd00::7", False), Reach("fd00::9", "fd00::9")),
        ("::", "", BusRoute("fd00::7", False), Reach("::", "fd00::7")),
        ("192.168.1.7", "", ELSEWHERE, Reach("192.168.1.7", "192.168.1.7")),
        ("0.0.0.0", "gpu7.lab:30000", ELSEWHERE, Reach("0.0.0.0", "gpu7.lab:30000")),
        ("127.0.0.1", "gpu7.lab", ELSEWHERE, Reach("127.0.0.1", "gpu7.lab")),
        ("127.0.0.1", "", LAN, Reach("127.0.0.1", "127.0.0.1")),
    ],
)
def test_an_address(host: str, advertise: str, route: BusRoute, want: Reach) -> None:
    assert reach(host, advertise, route, name="engine.host") == want


@pytest.mark.parametrize(
    ("host", "advertise"),
    [("127.0.0.1", ""), ("::1", ""), ("localhost", ""), ("auto", "0.0.0.0"), ("auto", "[::1]:80")],
)
def test_nothing_is_advertised_that_the_machine_of_the_bus_cannot_reach(host: str, advertise: str) -> None:
    with refusal(ValueError, place="engine.host"):
        reach(host, advertise, ELSEWHERE, name="engine.host")


@pytest.mark.parametrize(
    ("shown", "host"),
    [("h", "h"), ("h:1", "h"), ("10.0.0.5:1", "10.0.0.5"), ("::1", "::1"), ("[::1]", "::1"), ("[::1]:1", "::1")],
)
def test_the_host_of_what_is_advertised(shown: str, host: str) -> None:
    assert bare(shown) == host


@pytest.mark.parametrize(
    ("host", "written"), [("h", "h"), ("10.0.0.5", "10.0.0.5"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("h:1", "h:1")]
)
def test_the_host_in_a_url(host: str, written: str) -> None:
    assert in_url(host) == written


# ---- the route to the bus, with a kernel that knows two networks


class Kernel:
    """``socket`` as ``route_to`` uses it: names have addresses, and each address is reached from one of this machine's
    own, or is not.
    """

    AF_INET, AF_INET6, SOCK_DGRAM = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM
    NAMES: ClassVar[Mapping[str, Sequence[str]]] = {
        "localhost": ["127.0.0.1"],
        "bus.lab": ["10.0.0.1"],
        "bus6.lab": ["fd00::1"],
        "both.lab": ["fd00::1", "10.0.0.1"],
        "here.lab": ["10.0.0.5"],
        "debian": ["127.0.1.1"],
        "far.lab": ["192.0.2.1"],
    }
    FROM: ClassVar[Sequence[tuple[str, str]]] = [
        ("127.0.0.0/8", "127.0.0.1"),
        ("::1/128", "::1"),
        ("10.0.0.5/32", "10.0.0.5"),
        ("10.0.0.0/8", "10.0.0.5"),
        ("fd00::5/128", "fd00::5"),
        ("fd00::/16", "fd00::5"),
    ]

    def __init__(self) -> None:
        self.connected: list[tuple[str, int]] = []
        self.open = 0

    def getaddrinfo(self, host: str, port: int, *, type: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert type == self.SOCK_DGRAM, "nothing is sent, and no connection is made"
        try:
            found = [str(ipaddress.ip_address(host))]
        except ValueError:
            found = list(self.NAMES.get(host, ()))
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(self.AF_INET6 if ":" in address else self.AF_INET, type, 0, "", (address, port)) for address in found]

    def socket(self, family: int, kind: int) -> "Probe":
        return Probe(self, family)


class Probe:
    """A datagram socket of the kernel."""

    def __init__(self, kernel: Kernel, family: int) -> None:
        self._kernel, self._family, self._local = kernel, family, ""

    def __enter__(self) -> "Probe":
        self._kernel.open += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._kernel.open -= 1

    def connect(self, address: tuple[str, int]) -> None:
        wanted = ipaddress.ip_address(address[0])
        assert self._family == (Kernel.AF_INET6 if wanted.version == 6 else Kernel.AF_INET)
        self._kernel.connected.append(address)
        self._local = next((own for network, own in Kernel.FROM if wanted in ipaddress.ip_network(network)), "")
        if not self._local:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self._local, 50_000


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr("tidemill.bus.client.addresses.socket", found)
    return found


@pytest.mark.parametrize(
    ("url", "route", "asked"),
    [
        ("nats://127.0.0.1:4222", BusRoute("127.0.0.1", True), [("127.0.0.1", 4222)]),
        ("nats://localhost", BusRoute("127.0.0.1", True), [("127.0.0.1", 4222)]),
        ("localhost:5000", BusRoute("127.0.0.1", True), [("127.0.0.1", 5000)]),
        ("nats://[::1]:4222", BusRoute("::1", True), [("::1", 4222)]),
        ("nats://debian", BusRoute("127.0.0.1", True), [("127.0.1.1", 4222)]),
        ("nats://10.0.0.1:4222", BusRoute("10.0.0.5", False), [("10.0.0.1", 4222)]),
        ("nats://bus.lab:4300", BusRoute("10.0.0.5", False), [("10.0.0.1", 4300)]),
        ("tls://bus.lab?ca=/x.pem", BusRoute("10.0.0.5", False), [("10.0.0.1", 4222)]),
        ("nats://user:pa%3Ass@bus.lab:4222", BusRoute("10.0.0.5", False), [("10.0.0.1", 4222)]),
        ("nats://10.0.0.5:4222", BusRoute("10.0.0.5", True), [("10.0.0.5", 4222)]),
        ("nats://here.lab", BusRoute("10.0.0.5", True), [("10.0.0.5", 4222)]),
        ("nats://[fd00::1]:4222", BusRoute("fd00::5", False), [("fd00::1", 4222)]),
        ("nats://[fd00::5]", BusRoute("fd00::5", True), [("fd00::5", 4222)]),
        ("nats://bus6.lab", BusRoute("fd00::5", False), [("fd00::1", 4222)]),
        ("nats://both.lab", BusRoute("fd00::5", False), [("fd00::1", 4222)]),
        ("nats://bus.lab,bus6.lab", BusRoute("10.0.0.5", False), [("10.0.0.1", 4222)]),
        ("nats://nowhere.lab,bus.lab", BusRoute("10.0.0.5", False), [("10.0.0.1", 4222)]),
        ("nats://far.lab,bus6.lab:4300", BusRoute("fd00::5", False), [("192.0.2.1", 4222), ("fd00::1", 4300)]),
        ("nats://nowhere.lab,far.lab,here.lab", BusRoute("10.0.0.5", True), [("192.0.2.1", 4222), ("10.0.0.5", 4222)]),
    ],
)
def test_the_route_to_the_bus(kernel: Kernel, url: str, route: BusRoute, asked: list[tuple[str, int]]) -> None:
    """That of the first server with a route; the family of the first address of its name."""
    assert route_to(url) == route
    assert (kernel.connected, kernel.open) == (asked, 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nats://nowhere.lab", r"host: auto: no route to the bus: nowhere\.lab: .*not known; cure: --host ADDRESS"),
        ("nats://far.lab", r"no route to the bus: far\.lab: .*Network is unreachable; cure"),
        (
            "nats://nowhere.lab,far.lab",
            r"no route to the bus: nowhere\.lab: .*not known; far\.lab: .*unreachable; cure",
        ),
        ("nats://user:secret@far.lab", r"no route to the bus: far\.lab: "),
        ("nats://", "address of the bus: want scheme://host:port"),
        ("nats://bus.lab:99999", "port from 1 to 65535"),
        ("http://bus.lab", "want nats://host:port or tls://host:port"),
    ],
)
def test_a_bus_without_a_route_is_refused_with_every_reason(kernel: Kernel, url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        route_to(url)
    assert "secret" not in str(caught.value) and kernel.open == 0


def test_a_route_of_the_real_kernel() -> None:
    assert route_to("nats://127.0.0.1:4222") == BusRoute("127.0.0.1", True)
    assert route_to("nats://127.0.0.2:4222").is_here
