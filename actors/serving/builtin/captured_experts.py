"""The experts of one sequence's tokens, position by position, while it is generated. Knows no tensor.

A position keeps the experts of the pass that came first: after a retraction its keys and values are computed again, perhaps with other
weights, but its next token has been sampled from the first pass. Shape letters: P = positions, G = layers with experts, J = experts of a
token.
"""

import base64

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.routed_experts import RoutedShape


class CapturedExperts:
    """Experts of positions 0 .. ``len`` - 1 of a sequence. Written by the decoding thread, read once the sequence has ended."""

    def __init__(self, shape: RoutedShape) -> None:
        self._shape = shape
        self._ids = bytearray()

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self._ids) // self._shape.bytes_per_token

    def add(self, experts_PGJ: NDArray[np.int64], first: int) -> None:
        """Add the experts of positions from ``first`` on; those that are there already are kept."""
        done = len(self)
        assert first <= done, f"positions {done} to {first} are missing"
        self._ids += experts_PGJ[done - first :].astype(self._shape.dtype).tobytes()

    def copy(self, other: "CapturedExperts", num_positions: int) -> None:
        """Take the first positions of another sequence with the same tokens, unless this one has its own."""
        size = self._shape.bytes_per_token
        self._ids += other._ids[len(self) * size : num_positions * size]

    def encoded(self) -> str:
        """Return all positions in every layer of the model as SGLang sends them: int32, base64; 0 in layers without experts."""
        shape = self._shape
        whole = np.zeros((len(self), shape.num_layers, shape.top_k), np.int32)
        whole[:, list(shape.layers)] = np.frombuffer(self._ids, shape.dtype).reshape(len(self), len(shape.layers), shape.top_k)
        return base64.b64encode(whole.tobytes()).decode()
