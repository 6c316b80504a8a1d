"""A push beside a long queue of the trainer's kernels: it is not delayed to the end of the queue."""

import threading
import time

import pytest
import torch

from tidemill.weightstore.format.checksums import report_checksums
from tidemill.weightstore.transport import senders
from tidemill.weightstore.transport.handles import HostMemory
from tidemill.weightstore.transport.nccl import own_end

pytestmark = pytest.mark.gpu

DEADLINE_S = 60.0
BUCKETS, BUCKET_BYTES = 8, 64_000_000
QUEUE = 400
"""Products of 8,192 x 8,192 matrices: about half a second of an H100."""


def push(group: senders.GroupEnd, buckets: list[torch.Tensor]) -> float:
    """Send the buckets in a thread of its own, as the publisher does. Returns its seconds."""
    took: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            group.send(bucket, DEADLINE_S, following)
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert took, "the push has failed"
    return took[0]


@pytest.mark.parametrize("apart", [(), ("nccl",)], ids=["in this process", "in its own process"])
def test_a_push_beside_a_queue_of_kernels(cuda: torch.device, apart: tuple[str, ...]) -> None:
    """It takes less than twice a push alone, or less than a quarter of the queue: both use the memory of the one GPU.

    In this process its streams are beside the queue; in its own one the GPU divides its time between the two.
    """
    memory = HostMemory(pin=True)
    group = senders.host("127.0.0.1", "alone", 1, "nccl", DEADLINE_S, memory=memory, gpu=own_end().uuid, apart=apart)
    group.meet()
    buckets = list(memory.empty(BUCKETS * BUCKET_BYTES).split(BUCKET_BYTES))
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=cuda)
    product = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=product)
    push(group, buckets)
    alone_s = min(push(group, buckets) for _ in range(3))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(QUEUE):
        torch.mm(matrix, matrix, out=product)
    beside_s = push(group, buckets)
    torch.cuda.synchronize()
    queue_s = time.perf_counter() - began
    group.close()
    memory.close()
    assert queue_s > 4 * alone_s, "the queue is too short to show anything"
    assert beside_s < max(2 * alone_s, queue_s / 4), (
        f"alone {alone_s:.3f} s, beside {beside_s:.3f} s, the queue {queue_s:.3f} s"
    )


def test_checksums_beside_a_queue_of_kernels(cuda: torch.device) -> None:
    """The publisher compares weights while the trainer's kernels are queued on the stream that all threads have by
    default.
    """
    tensors = {str(number): torch.randn(8_000_000, device=cuda) for number in range(8)}
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=cuda)
    product = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=product)

    def seconds() -> float:
        began = time.perf_counter()
        report_checksums(tensors)
        return time.perf_counter() - began

    torch.cuda.synchronize()
    alone_s = min(seconds() for _ in range(3))
    began = time.perf_counter()
    for _ in range(QUEUE):
        torch.mm(matrix, matrix, out=product)
    beside_s = seconds()
    torch.cuda.synchronize()
    queue_s = time.perf_counter() - began
    assert queue_s > 4 * alone_s, "the queue is too short to show anything"
    assert beside_s < max(2 * alone_s, queue_s / 4), (
        f"alone {alone_s:.3f} s, beside {beside_s:.3f} s, the queue {queue_s:.3f} s"
    )
