"""A port reserved for a process that starts later: until then the system gives it to no other process."""

import socket
from typing import Self


class KeptPort:
    """A free TCP port of this machine, which the system gives to no client until ``close``.

    A server, which listens with SO_REUSEADDR, can bind ``number``.
    """

    def __init__(self, host: str = "127.0.0.1", number: int = 0) -> None:
        """``number``: the requested port; 0 = any. Raises OSError when a process listens there."""
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Give up the port: from now on the system may give it to any process."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
