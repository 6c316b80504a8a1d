"""A row of sequences through a sharded model, and through the plain model of transformers: one after the other there.

``main`` is the body of one rank of a world.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.families import LENGTHS, VOCAB, place_here, plain_model, sequences
from tidemill.launch.devices.shapes import adapter_tensors
from tidemill.learner.backends.fsdp.lora import add_adapters, tuned
from tidemill.learner.backends.fsdp.model import FsdpModel, open_model
from tidemill.learner.backends.fsdp.policy import Replay
from tidemill.learner.backends.fsdp.self_test import row_of
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.optimizer import OF_EXPERTS, LoraConfig, Tuning

TRANSPOSED = ("gpt_oss",)
"""Families with experts whose weights are [E, in, out]."""
LORA = LoraConfig(rank=3, alpha=4.5)
"""A rank that is no multiple of what grouped products want."""


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


def matrices_of(plain: Any, transposed: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random A and B, as PEFT has them in files, by the names of the weights: of experts and of ``o_proj``."""
    draws, matrices = torch.Generator().manual_seed(5), {}
    for name, weight in plain.named_parameters():
        target = ".".join(name.split(".")[-2:])
        if target in OF_EXPERTS and weight.dim() == 3:
            experts, outputs, inputs = weight.mT.shape if transposed else weight.shape
        elif target == "o_proj.weight":
            experts, (outputs, inputs) = 1, weight.shape
        else:
            continue
        a, b = (
            torch.randn(LORA.rank * experts, inputs, generator=draws),
            torch.randn(outputs, LORA.rank * experts, generator=draws),
        )
        matrices[name] = (a / inputs**0.5, b / 10)
    return matrices


def of_expert(number: int, experts: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two matrices of an expert: rows of A side by side, columns of B in turn."""
    return a.unflatten(0, (experts, LORA.rank))[number], b[:, number::experts]


def products(matrices: Mapping[str, tuple[Tensor, Tensor]], plain: Any, transposed: bool) -> dict[str, Tensor]:
    """Return scale * B A of every weight, in its place."""
    added = {}
    for name, (a, b) in matrices.items():
        weight = plain.get_parameter(name)
        experts = len(weight) if weight.dim() == 3 else 1
        each = [of_expert(number, experts, a.double(), b.double()) for number in range(experts)]
        product = LORA.scale * torch.stack([b @ a for a, b in each]).float()
        added[name] = product[0] if weight.dim() == 2 else product.mT if transposed else product
    return added


def write_peft(directory: Path, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Write the matrices under PEFT's names: of two weights of a module the one that is declared last is outside."""
    tensors = {}
    for name, pair in matrices.items():
        module, _, weight = name.rpartition(".")
        inside = weight in ("gate_up_proj", "up_proj") and f"{module}.down_proj" in matrices
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{module}{'.base_layer' * inside}.lora_{letter}.weight"] = matrix
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")


class AdaptedModel:
    """A model with random adapters of its experts, which it has read from a directory. Collective."""

    def __init__(self, directory: Path, *, recompute: bool = False) -> None:
        self.transposed, self.plain = directory.name in TRANSPOSED, plain_model(directory)
        self.matrices = matrices_of(self.plain, self.transposed)
        of_experts = {target for target in OF_EXPERTS for name in self.matrices if name.endswith(target)}
        targets = tuple(sorted(of_experts | {"o_proj" for name in self.matrices if name.endswith("o_proj.weight")}))
        self.files = directory.with_name(f"{directory.name}, adapters of {os.environ.get('RANK', '')}")
        write_peft(self.files, self.matrices)
        self.config = replace(LORA, targets=targets, adapter=str(self.files))
        options: dict[str, Any] = {"recompute": recompute, "prepare": partial(add_adapters, config=self.config)}
        self.model = open_model(directory, dtype="float32", place=place_here(), **options)
        adapters = tuned(self.model, Tuning(lora=self.config))
        assert adapters is not None
        self.adapters = adapters

    def exported(self) -> dict[str, Tensor]:
        """Return the merged weights by the names of the files. Collective."""
        return dict(self.model.export(self.adapters.merged))

    def not_counted(self, directory: Path) -> int:
        """Return the elements of adapters that the table of memory does not count."""
        shapes = {name: tuple(tensor.shape) for name, tensor in files_of(directory).items()}
        counted = adapter_tensors(shapes, self.config, backend="fsdp")
        trained = [tensor for tensor in self.model.parameters() if tensor.requires_grad]
        return sum(tensor.numel() for tensor in trained) - sum(map(math.prod, counted.values()))


def adapted(directory: Path, *, recompute: bool = False, experts: str = "") -> dict[str, Any]:
    """Return the differences of a model with adapters of its experts from transformers' with merged weights.

    ``experts``: the implementation of transformers; empty = the default. Collective.
    """
    ours = AdaptedModel(directory, recompute=recompute)
    model, plain, matrices, transposed, files = ours.model, ours.plain, ours.matrices, ours.transposed, ours.files
    if experts:
        model.transformer.set_experts_implementation(experts)
    with torch.no_grad():
        for name, product in products(matrices, plain, transposed).items():
            plain.get_parameter(name).add_(product)
    log_probs_TV, gradients = row_pass(model)
    wanted_TV, of_weights = plain_pass(plain)
    wanted = dict(_of_matrices(matrices, of_weights, transposed))
    merged = files.with_name(f"{files.name}, merged")
    plain.save_pretrained(merged)
    exported, saved = ours.exported(), files_of(merged)
    assert exported.keys() == saved.keys() or dist.get_rank()  # of transformers the first rank alone writes
    return {
        "log_probs": float((log_probs_TV - wanted_TV).abs().max()),
        "trained": sorted(set(gradients) ^ set(wanted)),
        "gradients": gap(gradients, {name: grad * dist.get_world_size() for name, grad in wanted.items()}),
        "export": max((float((exported[name] - tensor).abs().max()) for name, tensor in saved.items()), default=0.0),
        "dtypes": [name for name, tensor in saved.items() if exported[name].dtype != tensor.dtype],
        "adapters": different(dict(ours.adapters.export()), load_file(files / "adapter_model.safetensors")),
        "not counted": ours.not_counted(directory),
    }


def _of_matrices(
    matrices: Mapping[str, tuple[Tensor, Tensor]], of_weights: Mapping[str, Tensor], transposed: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of A and B, expert by expert, from those of the merged weights."""
    for name, (a, b) in matrices.items():
        layer, _, weight = name.rpartition(".")
        gradient = of_weights[name]
        if gradient.dim() == 2:
            yield f"{layer}.lora_A", LORA.scale * b.T @ gradient
            yield f"{layer}.lora_B", LORA.scale * gradient @ a.T
            continue
        each = [
            (*of_expert(number, len(gradient), a, b), of_one.T if transposed else of_one)
            for number, of_one in enumerate(gradient)
        ]
        yield f"{layer}.lora_A.{weight}", torch.stack([LORA.scale * b.T @ of_one for _, b, of_one in each])
        yield f"{layer}.lora_B.{weight}", torch.stack([LORA.scale * of_one @ a.T for a, _, of_one in each])


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
        has_experts = any(name.endswith(OF_EXPERTS) for name, _ in model.transformer.named_parameters())
        of_adapters = {"adapted": adapted(directory, recompute=True)} if has_experts else {}
        yield directory.name, {**result, **of_adapters, "sent": list(part), "routed": routing}


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
