"""Outputs of modules for fixed prompts in a file: written for the learner and for engines alike. Knows numpy, no torch.

file = safetensors, as of ``train_file``; tensors: <prompt>.<module>, float32 [T, size]; the header has their order of computation
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.learner.debug.train_file import MODULES, Array, read, write
from tidemill.learner.errors import DebugFileRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDump:
    """The content of a file."""

    source: str
    """Program that computed the outputs: learner or engine, with its model."""
    dtype: str
    """Dtype of weights and activations there."""
    prompts: Sequence[Sequence[int]]
    outputs: Mapping[str, Array]
    """``<prompt>.<module>`` -> [T, size], in the order of computation."""


def write_modules(path: Path, outputs: Mapping[str, Array], *, prompts: Sequence[Sequence[int]], dtype: str, source: str) -> None:
    """Write a dump, whole or not at all."""
    header = {"kind": MODULES, "source": source, "dtype": dtype, "prompts": [list(one) for one in prompts], "order": list(outputs)}
    write(path, header, outputs)


def read_modules(path: Path) -> ModuleDump:
    """Read a dump. Raises DebugFileRefused."""
    header, tensors = read(path)
    if header.get("kind") != MODULES:
        raise DebugFileRefused(str(path), "a dump of modules", f"one of kind {header.get('kind')!r}")
    outputs = {name: tensors[name] for name in header["order"]}
    return ModuleDump(source=header["source"], dtype=header["dtype"], prompts=header["prompts"], outputs=outputs)
