"""Ports reserved for processes that have yet to start."""

import errno
import socket

import pytest

from tests.refusals import refusal
from tidemill.bus.client.addresses import KeptPort


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_kept_port_is_for_servers_alone(host: str) -> None:
    with KeptPort(host) as kept:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        own = (host.strip("[]"), kept.number)
        with socket.socket(family) as stranger, refusal(OSError, errno=errno.EADDRINUSE):
            stranger.bind(own)  # as an outgoing connection is bound, or a listener that got it as a free port
        with socket.create_server(own, family=family) as server, socket.create_connection(own):
            server.accept()[0].close()
            kept.close()
    with refusal(OSError, errno=errno.EADDRINUSE), socket.create_server(("127.0.0.1", 0)) as server:
        KeptPort(number=server.getsockname()[1])


def test_a_closed_port_is_released() -> None:
    with KeptPort() as kept:
        pass
    with KeptPort(number=kept.number) as again:
        assert again.number == kept.number
