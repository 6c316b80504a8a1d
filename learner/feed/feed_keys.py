"""Keys of one start of the learner, with which its feeder and its ranks authenticate each other (CURVE of ZMQ). No
socket.

They are new at every start, and a process gets them through an inherited file descriptor, because other users can read
its arguments and environment.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedKeys:
    """Two key pairs (Z85): one of the feeder, one that all ranks of a node share. A secret is empty in a process that
    must not have it.
    """

    feeder_public: str
    ranks_public: str
    feeder_secret: str = field(default="", repr=False)
    ranks_secret: str = field(default="", repr=False)
    others_public: tuple[str, ...] = ()
    """Public keys of the ranks of other nodes, which the feeder admits, too."""

    @classmethod
    def new(cls) -> Self:
        """Return new key pairs."""
        feeder_public, feeder_secret = (key.decode() for key in zmq.curve_keypair())
        ranks_public, ranks_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(
            feeder_public=feeder_public,
            ranks_public=ranks_public,
            feeder_secret=feeder_secret,
            ranks_secret=ranks_secret,
        )

    def for_feeder(self) -> Self:
        """Return the keys without the secret of the ranks."""
        return replace(self, ranks_secret="")

    def for_ranks(self) -> Self:
        """Return the keys without the secret of the feeder."""
        return replace(self, feeder_secret="")

    def pipe(self) -> int:
        """Return a file descriptor from which a child can read the keys once (``pass_fds``). The caller closes its
        copy.
        """
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as file:  # does not block: the keys are much smaller than the buffer of a pipe
            json.dump(asdict(self), file)
        return reading

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Return the keys from an inherited descriptor, and close it. Raises ValueError when it has none."""
        try:
            with os.fdopen(descriptor) as file:
                values = json.load(file)
            return cls(**values | {"others_public": tuple(values.get("others_public", ()))})
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--feeder-keys {descriptor}: want an inherited descriptor with the keys of this start: {error}"
            ) from None
