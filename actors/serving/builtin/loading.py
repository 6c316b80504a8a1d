"""Load a set of weights from a directory or from a bucket of a push. Blocking."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tidemill.actors.errors import UpdateRefused
from tidemill.actors.serving.builtin.weights import HEAD, Weights, read_safetensors
from tidemill.weightstore.format.checksums import ChecksumReport, report_checksums
from tidemill.weightstore.format.manifest import Bucket
from tidemill.weightstore.store import snapshot


def load_from_directory(weights: Weights, directory: Path) -> None:
    """Load and finalize a set of weights. Raises UpdateRefused unless every tensor is there once, with its shape.

    A snapshot is verified first, byte by byte (raises SnapshotBroken); a plain model directory has no checksums.
    """
    if (directory / snapshot.MANIFEST).exists():
        snapshot.verify(directory)
    filled: set[str] = set()
    weights.writes += 1
    for name, tensor in read_safetensors(directory):
        target = weights.named.get(name)
        if target is None and name == HEAD and weights.shape.tied:
            continue
        if target is None or name in filled:
            raise UpdateRefused(
                f"{directory}: {name}: " + ("stored twice" if target is not None else "the model has no tensor of this name")
            )
        if target.shape != tensor.shape:
            raise UpdateRefused(f"{directory}: {name}: want shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
        target.copy_(tensor)
        filled.add(name)
    missing = weights.named.keys() - filled
    if missing:
        raise UpdateRefused(f"{directory}: {len(missing)} of {len(weights.named)} tensors are missing, among them {min(missing)}")
    finalize(weights)


def load_from_bucket(weights: Weights, bucket: Bucket, message: Tensor, stream: "torch.cuda.Stream | None" = None) -> Tensor | None:
    """Copy the tensors of a flat bucket into ``weights``, which are not finalized. ``stream``: as for ``copy_all``.

    Returns an output projection that is tied to the embedding: ``weights`` have no tensor for it.
    """
    alias, copies = None, []
    weights.writes += 1
    for spec, place in bucket.places():
        part, dtype = message[place], getattr(torch, spec.dtype)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()  # a sender that mixes types need not align them
        tensor = part.view(dtype).view(spec.shape)
        if spec.name in weights.named:
            copies.append((weights.named[spec.name], tensor))
        else:
            alias = tensor.to(weights.dtype, copy=True)
            if alias.is_cuda:
                torch.cuda.current_stream(alias.device).synchronize()  # the sender may write there again
    copy_all(copies, stream)
    return alias


def copy_all(copies: Sequence[tuple[Tensor, Tensor]], stream: "torch.cuda.Stream | None" = None) -> None:
    """Copy from the second tensor of each pair into the first. Afterwards the sender may write into the second ones again.

    ``stream``: one for copies to a GPU alone, so that this does not wait for the tokens that are decoded meanwhile. None = on the CPU.
    """
    if stream is None:
        for target, source in copies:
            target.copy_(source)
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        with torch.cuda.stream(stream):
            for target, source in copies:
                if not source.is_cuda:
                    source = source.to(target.dtype)  # here: a GPU would need memory for it, in the other type
                target.copy_(source, non_blocking=True)
    finally:
        stream.synchronize()


def finalize(weights: Weights) -> None:
    """Compute the derived tensors of complete weights, and wait until all copies are done."""
    weights.finalize()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)  # the decoding thread must not overtake the copies


def empty_cache(device: torch.device) -> None:
    """Return memory that is not used any more to the accelerator, so that another process can have it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def checksum_report_of(weights: Weights) -> ChecksumReport:
    """Return the checksums of the weights, with those of a tied output projection."""
    return report_checksums(weights.with_alias())
