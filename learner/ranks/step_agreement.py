"""Agreement of all ranks before a step, in one collective: the profile that a command has asked for."""

import torch
import torch.distributed as dist

from tidemill.learner.debug.profile_request import ProfileRequest
from tidemill.learner.layout.parallel import Parallel


def agreed(request: ProfileRequest | None, here: Parallel) -> ProfileRequest | None:
    """Return the request that rank 0 has read. Collective over all ranks."""
    asked = (0, 0, 0) if request is None else (request.steps, int(request.memory), request.rank)
    numbers = torch.tensor(asked, dtype=torch.int32, device=here.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)  # the others have no request, and 0 in its place
    steps, memory, rank = numbers.tolist()
    return ProfileRequest(steps=steps, memory=bool(memory), rank=rank) if steps else None
