"""Megatron's groups in tests: a world of one rank in the test process, and the layouts that ranks of a test form one
after the other.
"""

import atexit
import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from tests.learner_steps import rank_environment
from tidemill.bus.client.addresses import KeptPort
from tidemill.learner.backends.megatron import groups
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.layout import parallel


def free_models() -> None:
    """Free the models and optimizers that nothing uses any more.

    They keep the groups of their ranks, and each group has three threads of gloo, one of which wakes a hundred times a
    second.
    """
    for each in gc.get_objects():
        if type(each) is MoEAlltoAllTokenDispatcher:
            each.probs = None  # the graph of its last batch keeps the model, by hooks in C++
    gc.collect()


@contextmanager
def one_rank(wanted: str = "cpu") -> Iterator[parallel.Parallel]:
    """Create Megatron's groups for this process alone, on the CPU or (``cuda``) on the first GPU that it sees.

    Environment and settings are as before afterwards.
    """
    before = dict(os.environ)
    torch.use_deterministic_algorithms(True)
    with KeptPort() as port:
        environment = rank_environment(0, 1, port.number)
        if wanted == "cuda":
            del environment["CUDA_VISIBLE_DEVICES"]
        os.environ.update(environment)
        joined = groups.join(tensor_parallel_size=1, device=parallel.choose_device(wanted), seed=0)
    try:
        yield joined
    finally:
        groups.leave()
        free_models()
        torch.use_deterministic_algorithms(False)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def joined(**sizes: Any) -> Iterator[parallel.Parallel]:
    """Form the groups of a layout with the other ranks of a test, on the CPU; leave them afterwards, with another port
    for the next ones.

    ``sizes``: arguments of ``groups.join``.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield groups.join(**({"tensor_parallel_size": 1} | sizes), device=torch.device("cpu"), seed=0)
    kept = KeptPort()
    atexit.register(kept.close)  # until then no other process gets it, as the next ranks listen there
    port = [kept.number]
    torch.distributed.broadcast_object_list(port)
    groups.leave()
    free_models()
    os.environ["MASTER_PORT"] = str(port[0])


def not_sent_once(policy: MegatronPolicy) -> list[str]:
    """Return the names of the tensors that do not have exactly one sender, or that it has with other bits; collective
    over all ranks.

    With all ranks of a stage that have parts of it as senders, and with one.
    """
    here, whole = policy.parallel, {name: tensor.clone() for name, tensor in policy.export()}
    wrong: list[str] = []
    for at_most in (0, 1):
        own = {name: tensor.clone() for name, tensor in policy.export_part(here.num_senders(at_most))}
        wrong += [name for name, tensor in own.items() if not torch.equal(tensor, whole[name])]
        names: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(names, list(own))
        senders = Counter(name for of_rank in names for name in of_rank)
        wrong += [name for name in whole.keys() | senders.keys() if senders[name] != 1]
    return sorted(wrong)
