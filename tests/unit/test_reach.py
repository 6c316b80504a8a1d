"""The address at which a process listens, and the one that it advertises: by its route to the bus, and always reachable from there."""

import pytest

from bus.client.reach import Reach, Route, bare, in_url, reach

HERE, LAN, ELSEWHERE = Route("127.0.0.1", True), Route("10.0.0.5", True), Route("10.0.0.7", False)


@pytest.mark.parametrize(
    ("host", "advertise", "route", "want"),
    [
        ("auto", "", HERE, Reach("127.0.0.1", "127.0.0.1")),
        ("auto", "", LAN, Reach("10.0.0.5", "10.0.0.5")),
        ("auto", "", ELSEWHERE, Reach("10.0.0.7", "10.0.0.7")),
        ("auto", "", Route("fd00::7", False), Reach("fd00::7", "fd00::7")),
        ("0.0.0.0", "", ELSEWHERE, Reach("0.0.0.0", "10.0.0.7")),
        ("[fd00::9]", "", Route("fd00::7", False), Reach("fd00::9", "fd00::9")),
        ("::", "", Route("fd00::7", False), Reach("::", "fd00::7")),
        ("192.168.1.7", "", ELSEWHERE, Reach("192.168.1.7", "192.168.1.7")),
        ("0.0.0.0", "gpu7.lab:30000", ELSEWHERE, Reach("0.0.0.0", "gpu7.lab:30000")),
        ("127.0.0.1", "gpu7.lab", ELSEWHERE, Reach("127.0.0.1", "gpu7.lab")),
        ("127.0.0.1", "", LAN, Reach("127.0.0.1", "127.0.0.1")),
    ],
)
def test_an_address(host: str, advertise: str, route: Route, want: Reach) -> None:
    assert reach(host, advertise, route, name="engine.host") == want


@pytest.mark.parametrize(
    ("host", "advertise"), [("127.0.0.1", ""), ("::1", ""), ("localhost", ""), ("auto", "0.0.0.0"), ("auto", "[::1]:80")]
)
def test_nothing_is_advertised_that_the_machine_of_the_bus_cannot_reach(host: str, advertise: str) -> None:
    with pytest.raises(ValueError, match=r"engine\.host: want an address that other machines reach .* cure: auto, or --advertise"):
        reach(host, advertise, ELSEWHERE, name="engine.host")


@pytest.mark.parametrize(
    ("shown", "host"), [("h", "h"), ("h:1", "h"), ("10.0.0.5:1", "10.0.0.5"), ("::1", "::1"), ("[::1]", "::1"), ("[::1]:1", "::1")]
)
def test_the_host_of_what_is_advertised(shown: str, host: str) -> None:
    assert bare(shown) == host


@pytest.mark.parametrize(("host", "written"), [("h", "h"), ("10.0.0.5", "10.0.0.5"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("h:1", "h:1")])
def test_the_host_in_a_url(host: str, written: str) -> None:
    assert in_url(host) == written
