"""Copies to a device one message ahead: the bytes that are sent, the buffer they come from, and the number of
copies.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.weightstore.transport.broadcast import DoubleBuffer


class LateBuffers:
    """Buffers with copies made as late as a device may make them: when the message that waits for them is needed."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, Tensor]] = []
        self.flats = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self.copies: list[int] = []
        self.in_use = -1

    def copy(self, slot: int, source: Tensor) -> None:
        assert slot != self.in_use, "the buffer that is being sent"
        self.queued.append((slot, source))
        self.copies.append(slot)

    def ready(self, slot: int, num_bytes: int) -> Tensor:
        while any(
            one == slot for one, _ in self.queued
        ):  # in the order of the calls; later ones may still be under way
            place, source = self.queued.pop(0)
            self.flats[place] = source.clone()
        self.in_use = slot
        return self.flats[slot][:num_bytes]


def sent(double: DoubleBuffer, buffers: LateBuffers, flat: Tensor, following: Tensor | None) -> bytes:
    buffers.in_use = -1  # the broadcast before has ended
    return bytes(double.message(flat, following).tolist())


def test_with_the_next_message_known_every_message_is_copied_once_and_the_buffers_take_turns() -> None:
    buffers = LateBuffers()
    double, messages = (
        DoubleBuffer(buffers),
        [torch.full((8 + number,), number, dtype=torch.uint8) for number in range(5)],
    )
    for flat, following in zip(messages, [*messages[1:], None], strict=True):
        assert sent(double, buffers, flat, following) == bytes(flat.tolist())
        assert len(buffers.queued) == (following is not None), "the copy of the next message is under way meanwhile"
    assert buffers.copies == [0, 1, 0, 1, 0]


def test_memory_that_is_filled_again_is_copied_again() -> None:
    """A push has the same buckets at the same addresses as the push before, with other bytes."""
    buffers = LateBuffers()
    double, bucket = DoubleBuffer(buffers), torch.zeros(16, dtype=torch.uint8)
    for version in range(1, 4):
        bucket.fill_(version)
        assert sent(double, buffers, bucket, None) == bytes([version] * 16)


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3), st.booleans()), max_size=12))
def test_the_bytes_are_right_whichever_message_was_announced(calls: list[tuple[int, int | None, bool]]) -> None:
    """An announced message that is not sent next, or memory that is filled again once it was not, does no harm."""
    buffers = LateBuffers()
    double, memory = (
        DoubleBuffer(buffers),
        [torch.full((4 + 3 * number,), number, dtype=torch.uint8) for number in range(4)],
    )
    announced: int | None = None
    for number, following, refill in calls:
        if refill and announced is not None and announced != number:
            memory[announced].add_(16)  # its announced turn has passed
        assert sent(double, buffers, memory[number], None if following is None else memory[following]) == bytes(
            memory[number].tolist()
        )
        announced = following
