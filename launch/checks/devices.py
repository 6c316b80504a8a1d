"""Check of the devices: the placement of ranks and engines here, or why there is none. Starts only nvidia-smi."""

import os

from tidemill.actors.serving.builtin.blocks import host_memory
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.machine import GPU
from tidemill.launch.checks.model import CheckedModel, rank_rows
from tidemill.launch.devices.demand import ModelSize, rank_variables, refuse_expandable_engine, want_of
from tidemill.launch.devices.placement import place
from tidemill.launch.devices.shapes import Node, Placed, PlacementRefused, described
from tidemill.launch.devices.visible import this_node
from tidemill.launch.settings.run_config import RunConfig

PLACEMENT = "placement"  # Topic of the findings on a machine with devices


def check_devices(
    report: Report, config: RunConfig, model: CheckedModel | None, *, engines: int, learner: bool = True
) -> None:
    """Report the places of the ranks and of ``engines`` engines, which are started on this machine."""
    size = ModelSize() if model is None else ModelSize(model.tensors, model.critic_tensors, model.backend)
    try:
        node = this_node(os.environ)
        placed = place([node], want_of(config, node, learner=learner, engines=engines, size=size))
        _refuse_allocator(config, node, placed)
    except PlacementRefused as refused:
        report.error("devices", refused.where, want=refused.want, got=refused.got, cure=refused.cure)
        return
    if not node.devices:
        _want_cuda(report, config, engines=engines, learner=learner)
        report.good("devices", "none visible here (nvidia-smi): ranks and engines run on the CPU")
        return
    for line in described([node], placed):
        report.good(PLACEMENT, line)
    _report_unchecked(report, node, placed, size)
    if learner and model is not None and config.learner.device != "cpu":
        _check_host_memory(report, config, model, ranks=len(placed.ranks))


def _refuse_allocator(config: RunConfig, node: Node, placed: Placed) -> None:
    for rank in placed.ranks:
        rank_variables(node, rank, config, os.environ)
    if config.learner.colocated and any(engine.uuids for engine in placed.engines):
        refuse_expandable_engine(config.engine, os.environ)


def _want_cuda(report: Report, config: RunConfig, *, engines: int, learner: bool) -> None:
    """Refuse ``device: cuda`` without a driver. (Without nvidia-smi there may be one, and torch finds its devices.)"""
    if GPU.exists():
        return
    is_builtin = engines and config.engine.kind == "builtin"
    devices = {
        "learner.device": learner and config.learner.device,
        "engine.device": is_builtin and config.engine.device,
    }
    for setting, device in devices.items():
        if device == "cuda":
            want = "auto or cpu: this machine has no GPU"
            report.error("devices", setting, want=want, got="cuda", cure="change it")


def _check_host_memory(report: Report, config: RunConfig, model: CheckedModel, *, ranks: int) -> None:
    """Compare what ranks on GPUs keep in this machine's memory with its size."""
    if model.shape is None and not model.tensors:
        report.good("host memory", "not checked: the tensors of the model are not known")
        return
    rows = [row for row in rank_rows(model, config, cuda=True) if row.on_host]
    needed = sum(row.bytes * (ranks if row.process == "rank" else 1) for row in rows)
    total = host_memory()
    kept = f"what {ranks} rank(s) keep outside their devices"
    if needed <= total:
        report.good("host memory", f"{total / 1e9:.1f} GB, {needed / 1e9:.1f} GB needed for {kept}")
        return
    parts = ", ".join(row.part for row in sorted(rows, key=lambda row: -row.bytes))
    want = f"{needed / 1e9:.1f} GB of the machine's memory for {kept} ({parts})"
    used = {
        "learner.offload_optimizer": config.learner.offload_optimizer,
        "learner.checkpoint.background": config.learner.checkpoint.background,
    }
    settings = [name for name, is_used in used.items() if is_used]
    cure = " or ".join(["use a larger machine", *(f"{name}: false" for name in settings)])
    got = f"{total / 1e9:.1f} GB"
    report.error("host memory", settings[0] if settings else "learner", want=want, got=got, cure=cure)


def _report_unchecked(report: Report, node: Node, placed: Placed, size: ModelSize) -> None:
    used = {uuid for process in placed.processes for uuid in process.uuids}
    unknown = [device.name for device in node.devices if device.uuid in used and not device.memory_bytes]
    if unknown:
        report.good(PLACEMENT, f"memory of device {', '.join(unknown)} not checked: nvidia-smi does not report it")
    if used and not size.tensors:
        report.good(PLACEMENT, "memory not checked: the tensors of the model are not known")
