"""Agreement of all ranks before a step, in one collective: whether they leave, and the profile that a command has asked for."""

import torch
import torch.distributed as dist

from learner.debug.profile_request import ProfileRequest
from learner.layout.parallel import Parallel


def agreed(*, leaves: bool, request: ProfileRequest | None, here: Parallel) -> tuple[bool, ProfileRequest | None]:
    """Return whether any rank leaves, and the request that rank 0 has read. Collective over all ranks.

    All ranks leave or none: a rank that went on alone would wait for the others in its first collective.
    """
    asked = (0, 0, 0) if request is None else (request.steps, int(request.memory), request.rank)
    numbers = torch.tensor([int(leaves), *asked], dtype=torch.int32, device=here.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)  # the others have no request, and 0 in its place
    left, steps, memory, rank = numbers.tolist()
    return bool(left), ProfileRequest(steps=steps, memory=bool(memory), rank=rank) if steps else None
