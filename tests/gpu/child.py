"""Bodies of the GPU tests' child processes, by name: ``python -m tests.gpu.child NAME OUT ARGUMENTS``.

A child without CUDA computes reference values; one that sees the GPU is the peer of a transfer, or does something that
may hang or end it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def algorithms(model_dir: str, cases: list[str], device: str) -> dict[str, Any]:
    """Return the metrics of two steps of each case."""
    from tests.integration.megatron_layouts import Layout, train
    from tests.megatron_world import one_rank

    with one_rank(device) as here:
        return {case: train(Path(model_dir), here, case, Layout())["metrics"] for case in cases}


def roles(model_dir: str, directory: str, names: list[str]) -> dict[str, Any]:
    """Return the metrics of the steps of each role, on the CPU."""
    from tests.gpu.test_gpu_roles import trained
    from tests.megatron_world import one_rank

    with one_rank() as here:
        return {name: trained(name, Path(model_dir), Path(directory), here) for name in names}


def checkpoint(model_dir: str, directory: str) -> dict[str, Any]:
    """Train a step on the CPU and save it; return the digest of the saved weights, and the metrics of the step after
    it.
    """
    from tests.integration.megatron_ranks import OPTIMIZER, VOCAB
    from tests.learner_steps import make_batches, make_samples
    from tests.megatron_world import one_rank
    from tidemill.learner.algorithms.config import AlgorithmConfig
    from tidemill.learner.backends.megatron import state
    from tidemill.learner.backends.megatron.model import build_policy
    from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
    from tidemill.learner.checkpoints.staged_files import write_staged
    from tidemill.learner.trainer.backups import OtherModels, WeightBackup
    from tidemill.learner.trainer.trainer import Trainer

    with one_rank() as here:
        policy = build_policy(Path(model_dir), dtype="float32", parallel=here)
        optimizer, proximal = MegatronOptimizer(policy, OPTIMIZER, steps=10), WeightBackup(policy)
        trainer = Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2, others=OtherModels(proximal=proximal))
        trainer.train(make_batches(make_samples(vocab=VOCAB, step=3), step=3)[0])
        write_staged(
            state.stage(
                Path(directory), step=3, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal)
            )
        )
        saved = policy.digest()
        return {"digest": saved, "next": trainer.train(make_batches(make_samples(vocab=VOCAB, step=4), step=4)[0])}


def join(wanted: str) -> list[dict[str, Any]]:
    """Join a world of one, use its groups, leave, and do it again; return the findings of both rounds."""
    from tests.learner_steps import rank_environment
    from tests.megatron_world import KeptPort
    from tidemill.learner.backends.megatron.groups import join, leave
    from tidemill.learner.layout.parallel import choose_device

    found = []
    for seed in (1, 1):
        with KeptPort() as port:
            environment = rank_environment(0, 1, port.number)
            del environment["CUDA_VISIBLE_DEVICES"]  # as this process was given it
            os.environ.update(environment)
            here = join(tensor_parallel_size=1, device=choose_device(wanted), seed=seed)
        values = torch.ones(3, device=here.device)
        dist.all_reduce(values)
        dist.barrier()
        objects = [{"step": 7}]
        dist.broadcast_object_list(objects, src=0, device=here.device)
        drawn = torch.rand(2, device=here.device).tolist() if here.device.type == "cuda" else []
        places = [here.rank, here.dp_rank, here.dp_size, here.tp_rank, here.tp_size]
        found.append(
            {
                "device": str(here.device),
                "backend": dist.get_backend(),
                "places": places,
                "sum": values.tolist(),
                "objects": objects,
                "drawn": drawn,
            }
        )
        leave()
    return found


def group_of_one(backend: str) -> dict[str, Any]:
    """Send over a group without receivers, close it, and return the reason why it cannot be used afterwards."""
    from tidemill.weightstore.errors import PeerLost
    from tidemill.weightstore.transport.broadcast import BroadcastGroup

    group = BroadcastGroup.host("127.0.0.1", "alone", 1, backend, 60.0)
    group.meet()
    for size in (1000, 16_000_000):
        group.send(torch.ones(size, dtype=torch.uint8))
    group.close()
    try:
        group.send(torch.ones(8, dtype=torch.uint8))
    except PeerLost as error:
        return {"closed": str(error)}
    return {"closed": ""}


def peer_never_comes(backend: str, deadline_s: float) -> dict[str, Any]:
    """Wait for a peer that does not exist; return the error, its seconds, and whether this process still works."""
    from tidemill.weightstore.errors import PeerLost
    from tidemill.weightstore.transport.broadcast import BroadcastGroup

    group = BroadcastGroup.host("127.0.0.1", "pair", 2, backend, deadline_s)
    began, reason = time.monotonic(), ""
    try:
        group.meet()
        group.send(torch.ones(1000, dtype=torch.uint8))
    except PeerLost as error:
        reason = str(error)
    took_s = time.monotonic() - began
    group.close()
    return {"reason": reason, "seconds": took_s, "works": _works()}


def sender(
    backend: str, port_file: str, deadline_s: float, sizes: list[int], apart: bool, world_size: int = 2
) -> dict[str, Any]:
    """Be rank 0: write the port into ``port_file``, and send patterns of ``sizes``. Returns the first error, and its
    seconds.

    ``apart``: the group is in a process of its own, as in a learner.
    """
    from tidemill.weightstore.errors import PeerLost
    from tidemill.weightstore.transport import senders
    from tidemill.weightstore.transport.handles import HostMemory
    from tidemill.weightstore.transport.nccl import own_end

    memory = HostMemory(pin=torch.cuda.is_available())
    block = memory.empty(sum(sizes))
    flats = list(block.split(sizes))
    for flat in flats:
        flat.copy_(pattern(flat.numel()))
    where = (backend,) if apart else ()
    group = senders.host(
        "127.0.0.1", "pair", world_size, backend, deadline_s, memory=memory, gpu=own_end().uuid, apart=where
    )
    began, reason = time.monotonic(), ""
    _appear(Path(port_file), str(group.port))
    try:
        group.meet()
        for flat, following in zip(flats, [*flats[1:], None], strict=True):
            began = time.monotonic()
            group.send(flat, deadline_s, following)
    except PeerLost as error:
        reason = str(error)
    took_s = time.monotonic() - began
    group.close()
    return {"reason": reason, "seconds": took_s, "works": _works()}


def receiver(backend: str, port_file: str, deadline_s: float, sizes: list[int], die_after: int = -1) -> dict[str, Any]:
    """Be rank 1 of two: join at the port in ``port_file`` and receive; die before receiving the message
    ``die_after``.
    """
    from tidemill.weightstore.errors import PeerLost
    from tidemill.weightstore.transport.broadcast import BroadcastGroup

    reason, equal = "", []
    try:
        group = BroadcastGroup.join("127.0.0.1", int(_appeared(Path(port_file))), 1, 2, "pair", backend, deadline_s)
        for number, size in enumerate(sizes):
            if number == die_after:
                os.kill(os.getpid(), 9)
            equal.append(bool(torch.equal(group.receive(size, deadline_s).cpu(), pattern(size))))
        group.close()
    except PeerLost as error:
        reason = str(error)
    return {"reason": reason, "equal": equal, "works": _works()}


def open_handle(handle: dict[str, Any], ready_file: str, hold: bool) -> dict[str, Any]:
    """Open a handle of staged memory and return the sum and the first bytes; with ``hold`` keep it until killed."""
    from tidemill.weightstore.transport.handles import Mapped, Offered

    shares = handle.get("shares")
    if shares is not None:  # bytes as hexadecimal digits, because the arguments are JSON
        handle["shares"] = [
            [bytes.fromhex(item[4:]) if str(item).startswith("hex:") else item for item in share] for share in shares
        ]
    tensor = Offered(Mapped(), handle).tensor()
    found = {"sum": int(tensor.long().sum()), "first": tensor[:8].tolist(), "device": tensor.device.type}
    if hold:
        _appear(Path(ready_file), json.dumps(found))
        time.sleep(3600)
    return found


def pattern(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).mul_(31).remainder_(251).to(torch.uint8)


def _works() -> bool:
    """Return whether this process can still compute on its device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return bool((torch.ones(4, device=device) * 2).sum().item() == 8)


def _appear(file: Path, text: str) -> None:
    file.with_suffix(".part").write_text(text)
    file.with_suffix(".part").rename(file)


def _appeared(file: Path, limit_s: float = 120.0) -> str:
    deadline = time.monotonic() + limit_s
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.01)
    return file.read_text()


BODIES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (algorithms, roles, checkpoint, join, group_of_one, peer_never_comes, sender, receiver, open_handle)
}


def main() -> None:
    name, out, arguments = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    _appear(out, json.dumps(BODIES[name](*arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that is left in a call of NCCL may keep the interpreter from ending


if __name__ == "__main__":
    main()
