"""The keys of one start of the learner, by which its feeder and its ranks know each other (CURVE of ZMQ). No socket.

They are new at every start, and reach a process through a file descriptor that it inherits: others can read arguments and environment.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedKeys:
    """Two key pairs (Z85): one of the feeder, one that all ranks share. A secret that its holder is not to have is empty."""

    feeder_public: str
    ranks_public: str
    feeder_secret: str = field(default="", repr=False)
    ranks_secret: str = field(default="", repr=False)

    @classmethod
    def new(cls) -> Self:
        feeder_public, feeder_secret = (key.decode() for key in zmq.curve_keypair())
        ranks_public, ranks_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(feeder_public=feeder_public, ranks_public=ranks_public, feeder_secret=feeder_secret, ranks_secret=ranks_secret)

    def for_feeder(self) -> Self:
        return replace(self, ranks_secret="")

    def for_ranks(self) -> Self:
        return replace(self, feeder_secret="")

    def pipe(self) -> int:
        """A file descriptor from which the keys can be read once: for ``pass_fds`` of a child. The caller closes its own."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as file:  # far less than a pipe holds
            json.dump(asdict(self), file)
        return reading

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """The keys from an inherited descriptor, which is closed. Raises ValueError when it holds none."""
        try:
            with os.fdopen(descriptor) as file:
                return cls(**json.load(file))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"--feeder-keys {descriptor}: want an inherited descriptor with the keys of this start: {error}") from None
