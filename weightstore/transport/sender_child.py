"""The process behind ``tidemill.weightstore.transport.senders``: one process group, which sends the memory that
it gets handles of.

python -m tidemill.weightstore.transport.sender_child DESCRIPTOR PARENT
"""

import logging
import sys
from multiprocessing.connection import Connection

import msgpack
from torch import Tensor

from tidemill.bus.system.processes import die_with_parent
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.weightstore.errors import PeerLost
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import Mapped, Offered

_log = logging.getLogger(__name__)


class _Session:
    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self._mapped = Mapped()
        self._verbs = {"host": self._host, "meet": self._meet, "send": self._send}

    def answer(self, request: JsonMapping) -> dict[str, object]:
        """Run a request and return its answer, in which ``lost`` is the reason of an error."""
        try:
            return self._verbs[request["verb"]](request)
        except PeerLost as error:
            return {"lost": error.reason}
        except Exception as error:  # torch, CUDA or the memory: the learner closes the group, and evicts
            _log.exception("%s failed", request.get("verb"))
            return {"lost": f"{type(error).__name__}: {error}"}

    def _host(self, request: JsonMapping) -> dict[str, object]:
        if request["gpu"]:
            import torch

            from tidemill.weightstore.transport.cuda_handles import ordinal
            from tidemill.weightstore.transport.handles import PINNING

            torch.cuda.set_device(ordinal(request["gpu"]))
            self._mapped = Mapped(pinning=PINNING)
        arguments = [request[name] for name in ("address", "name", "world_size", "backend", "timeout_s")]
        self._group = BroadcastGroup.host(*arguments)
        return {"port": self._group.port}

    def _meet(self, request: JsonMapping) -> dict[str, object]:
        assert self._group is not None
        self._group.meet()
        return {}

    def _send(self, request: JsonMapping) -> dict[str, object]:
        assert self._group is not None
        following = None if request["following"] is None else self._tensor(request["following"])
        self._group.send(self._tensor(request["handle"]), request["timeout_s"], following)
        return {}

    def _tensor(self, handle: JsonMapping) -> Tensor:
        return Offered(self._mapped, handle).tensor()


def main() -> None:
    """Answer the requests on the pipe until the learner closes it."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)()
    session = _Session()
    with Connection(descriptor) as pipe:
        while True:
            try:
                request = msgpack.unpackb(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(msgpack.packb(session.answer(request)))


if __name__ == "__main__":
    main()
