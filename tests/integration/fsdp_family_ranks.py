"""A row of sequences through a sharded model, and through the plain model of transformers: one after the other there.

``main`` is the body of one rank of a world.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.families import LENGTHS, VOCAB, place_here, plain_model, sequences
from tidemill.learner.backends.fsdp.model import FsdpModel, open_model
from tidemill.learner.backends.fsdp.policy import Replay
from tidemill.learner.backends.fsdp.self_test import row_of
from tidemill.learner.errors import ConfigRefused


def weights_of_tokens() -> Tensor:
    """Return the factor of every log-prob in the loss, [T, V]."""
    return torch.randn(sum(LENGTHS), VOCAB, generator=torch.Generator().manual_seed(1)) / 100


def row_pass(model: FsdpModel, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs [T, V] of a row, and the gradients of their weighted sum by name, summed over the ranks."""

    def finish(hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        log_probs_TV = torch.log_softmax(model.head.logits(hidden_TH, model.head_weight()).float(), -1)
        return (log_probs_TV * weights_of_tokens()[: len(log_probs_TV)]).sum(), log_probs_TV.detach()

    model.zero_grad()
    loss, log_probs_TV = model(torch.cat(sequences(lengths)), row_of(lengths), finish)
    loss.backward()
    gradients = {name.removeprefix("transformer."): parameter.grad for name, parameter in model.named_parameters()}
    return log_probs_TV, {name: whole(grad) for name, grad in gradients.items() if grad is not None}


def plain_pass(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same of transformers' model, which gets each sequence alone."""
    logits = [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in sequences()]
    log_probs_TV = torch.log_softmax(torch.cat(logits), -1)
    (log_probs_TV * weights_of_tokens()).sum().backward()
    return log_probs_TV.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gap(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of the wanted gradients, relative to the largest of them."""
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((ours[name] - grad).abs().max()) for name, grad in wanted.items()) / largest


def files_of(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model's files."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def different(exported: dict[str, Tensor], files: dict[str, Tensor]) -> list[str]:
    """Return the names that only one of them has, or in another dtype, or with other bits."""
    common = exported.keys() & files.keys()
    same = {
        name
        for name in common
        if exported[name].dtype == files[name].dtype and torch.equal(exported[name], files[name])
    }
    return sorted((exported.keys() | files.keys()) - same)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of all ranks. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def measured(directory: Path, *, recompute: bool = False, family: str = "") -> tuple[FsdpModel, dict[str, Any]]:
    """Return a family's model on all ranks, and its differences from transformers. Collective."""
    model = open_model(directory, dtype="float32", place=place_here(), recompute=recompute, family=family)
    plain = plain_model(directory)
    log_probs_TV, gradients = row_pass(model)
    wanted_TV, wanted = plain_pass(plain)
    summed = {name: grad * dist.get_world_size() for name, grad in wanted.items()}
    return model, {
        "log_probs": float((log_probs_TV - wanted_TV).abs().max()),
        "gradients": gap(gradients, summed),
        "export": different(dict(model.export()), files_of(directory)),
    }


def routed(model: FsdpModel) -> dict[str, float]:
    """Return what known experts change in log-probs and gradients, and differences from sequences alone. Collective.

    ``own``, ``unknown``, ``others``: largest change by experts of the routers' own choice, by none, by others.
    ``recorded``: experts of a row that are not those which a sequence alone has. ``alone``: largest difference of a
    row's log-probs with given experts from those of its sequences alone with the same ones.
    """
    # The sequences of each rank are in another order.
    lengths = (*LENGTHS[dist.get_rank() :], *LENGTHS[: dist.get_rank()])
    routing = Replay(model.transformer, replays=True, packed=model.findings.packed)

    def replayed(experts: Sequence[Tensor], lengths: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        with routing.replaying(), routing.row(replace(row_of(lengths), experts=tuple(experts))):
            return row_pass(model, lengths)

    def change(experts: Sequence[Tensor]) -> float:
        log_probs_TV, gradients = replayed(experts, lengths)
        assert gradients.keys() == wanted.keys()
        return max(float((log_probs_TV - wanted_TV).abs().max()), gap(gradients, wanted))

    row, singles = row_of(lengths), [row_of([length]) for length in lengths]
    with routing.recording(), routing.row(row):
        wanted_TV, wanted = row_pass(model, lengths)
    for length, single in zip(lengths, singles, strict=True):
        with routing.recording(), routing.row(single):
            row_pass(model, [length])
    of_singles = [torch.cat(parts) for parts in zip(*(single.experts for single in singles), strict=True)]
    others = [(experts + 1) % (int(experts.max()) + 1) for experts in row.experts]
    # Each token has other experts than its neighbours, so that a row of experts in the place of another one is seen.
    given = [(experts + torch.arange(len(experts))[:, None]) % (int(experts.max()) + 1) for experts in row.experts]
    parts = zip(*(experts.split(lengths) for experts in given), strict=True)
    alone = [replayed(part, [length])[0] for part, length in zip(parts, lengths, strict=True)]
    return {
        "own": change(row.experts),
        "unknown": change([experts.new_full(experts.shape, -1) for experts in row.experts]),
        "others": change(others),
        "recorded": sum(
            int((ours.sort(-1).values != theirs.sort(-1).values).sum())
            for ours, theirs in zip(row.experts, of_singles, strict=True)
        ),
        "alone": float((replayed(given, lengths)[0] - torch.cat(alone)).abs().max()),
    }


def main(directories: Sequence[Path], out: Path) -> None:
    """Measure each family on this rank, with and without recomputation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = dict(_measured(directories, out))
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def refused(directory: Path, out: Path) -> None:
    """Open a directory that cannot be read, on this rank."""
    dist.init_process_group("gloo")
    try:
        open_model(directory, dtype="float32", place=place_here())
    except ConfigRefused as error:
        (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({"field": error.field}))
    dist.destroy_process_group()


def _measured(directories: Sequence[Path], out: Path) -> Iterator[tuple[str, Any]]:
    for directory in directories:
        model, result = measured(directory, recompute=True)
        has_routers = any(type(module).__name__.lower().endswith("router") for module in model.modules())
        routing = routed(model) if has_routers else None
        part = {name: tensor.contiguous() for name, tensor in model.export_part(dist.get_world_size())}
        _write_part(part, out / directory.name, directory)
        yield directory.name, {**result, "sent": list(part), "routed": routing}


def _write_part(part: dict[str, Tensor], directory: Path, model_dir: Path) -> None:
    """Write the tensors that this rank sends into the files of a model that all ranks write. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    directory.mkdir(exist_ok=True)
    file = f"model-{rank + 1:05}-of-{world:05}.safetensors"
    save_file(part, directory / file, metadata={"format": "pt"})
    files: list[Any] = [None] * world
    dist.all_gather_object(files, dict.fromkeys(part, file))
    if rank == 0:
        index = {"metadata": {}, "weight_map": {name: file for listed in files for name, file in listed.items()}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(model_dir / "config.json", directory)
