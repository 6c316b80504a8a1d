"""What the routers of a model do with the experts of its rows, by the kind of pass; the same on every backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Mode = Literal["", "record", "replay"]
"""Nothing; keep the experts that the routers choose; send tokens to the experts that their row has."""


class ReplayModes:
    """The passes of ``trainer.backend.Routing`` as modes, which the routers of a backend follow."""

    def __init__(self, *, given: bool) -> None:
        """``given``: the rows have their experts already."""
        self._given = given
        self._mode: Mode = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the experts of every row that passes inside the context; given ones are taken instead."""
        with self._in("replay" if self._given else "record"):
            yield

    @contextmanager
    def given(self) -> Iterator[None]:
        """Send tokens to their given experts inside the context; without given ones the routers choose."""
        with self._in("replay" if self._given else ""):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Send tokens to their experts inside the context; rows without any, and tokens without known ones, choose."""
        with self._in("replay"):
            yield

    @contextmanager
    def _in(self, mode: Mode) -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = ""
            self._clear()

    def _clear(self) -> None:
        """Forget what a pass has left in the routers."""
