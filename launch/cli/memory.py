"""``tidemill config --memory``: the memory that each process of a run needs, as a table."""

import os
from itertools import groupby

from rich.console import Console
from rich.table import Table

from tidemill.actors.serving.builtin.blocks import host_memory
from tidemill.launch.checks.findings import CheckFailed, Report
from tidemill.launch.checks.model import check_model, rank_rows
from tidemill.launch.checks.prepared import check_prepare
from tidemill.launch.devices.visible import this_node
from tidemill.launch.settings.config_loader import Loaded

NOT_COUNTED = (
    "Not counted: what libraries take for themselves on a GPU (CUDA context, NCCL, cuBLAS: 1 to 3 GB together), "
    "padding of rows with sequences of different lengths, and memory that the allocator cannot use again (on the CPU "
    "about a tenth). Copies for checkpoints are there from the copy until they are written."
)

OF_ANY_FAMILY = (
    "Nor counted for this family: activations, logits, and what its engine needs. Matrices that it keeps "
    "whole on every tensor-parallel "
    "rank count as split."
)


def print_memory(loaded: Loaded) -> None:
    """Print the rows, and a sum for each process. Raises CheckFailed, DeviceError."""
    config, report = loaded.config, Report(loaded.origins)
    model = check_model(report, config, prepared=check_prepare(report, config, fresh=False).model)
    report.refuse()
    assert model is not None, "without a model there is an error"
    if model.shape is None and not model.tensors:
        raise CheckFailed([f"{model.directory}: no table: the tensors of the model are not known"])
    devices = this_node(os.environ).devices
    cuda = config.learner.device == "cuda" or (config.learner.device == "auto" and bool(devices))
    engine_memory = min((device.memory_bytes for device in devices), default=0) if cuda else host_memory()
    rows = rank_rows(model, config, cuda=cuda, engine_memory=engine_memory)
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("process", "part"):
        shown.add_column(name)
    for name in ("device", "host") if cuda else ("memory",):
        shown.add_column(name, justify="right")
    for process, parts in groupby(rows, lambda row: row.process):
        ours = list(parts)
        for row in ours:
            shown.add_row(process, row.part, *_cells(row.bytes, on_host=row.on_host, cuda=cuda))
        if len(ours) == 1:
            continue
        sums = [sum(row.bytes for row in ours if row.on_host is on_host) for on_host in (False, True)]
        shown.add_row(process, "sum", *(map(_size, sums) if cuda else [_size(sum(sums))]), style="bold")
    console = Console(highlight=False)
    console.print(shown)
    console.print(NOT_COUNTED, style="dim")
    if model.shape is None:
        console.print(OF_ANY_FAMILY, style="dim")


def _cells(size: int, *, on_host: bool, cuda: bool) -> list[str]:
    if not cuda:
        return [_size(size)]
    return ["", _size(size)] if on_host else [_size(size), ""]


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
