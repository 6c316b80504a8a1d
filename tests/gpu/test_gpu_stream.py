"""A push beside a long queue of the trainer's kernels: it is not delayed to the end of the queue."""

import threading
import time

import pytest
import torch

from weightstore.transport.broadcast import BroadcastGroup

pytestmark = pytest.mark.gpu

DEADLINE_S = 60.0
BUCKETS, BUCKET_BYTES = 8, 64_000_000
QUEUE = 400
"""Products of 8,192 x 8,192 matrices: about half a second of an H100."""


def push(group: BroadcastGroup, buckets: list[torch.Tensor]) -> float:
    """Send the buckets in a thread of its own, as the publisher does. Returns its seconds."""
    took: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        for bucket in buckets:
            group.send(bucket, DEADLINE_S)
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert took, "the push has failed"
    return took[0]


def test_a_push_beside_a_queue_of_kernels(cuda: torch.device) -> None:
    """It takes less than twice a push alone, or less than a quarter of the queue: both use the memory of the one GPU."""
    group = BroadcastGroup.host("127.0.0.1", "alone", 1, "nccl", DEADLINE_S)
    group.meet()
    buckets = [torch.ones(BUCKET_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUCKETS)]
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
    assert queue_s > 4 * alone_s, "the queue is too short to show anything"
    assert beside_s < max(2 * alone_s, queue_s / 4), f"alone {alone_s:.3f} s, beside {beside_s:.3f} s, the queue {queue_s:.3f} s"
