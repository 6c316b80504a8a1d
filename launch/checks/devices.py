"""Check of the devices: the placement of ranks and engines on this machine, or the reason why there is none. Starts only nvidia-smi."""

import os

from launch.checks.findings import Report
from launch.checks.model import CheckedModel
from launch.devices.errors import Refused
from launch.devices.placement import place
from launch.devices.shapes import described
from launch.devices.visible import this_node
from launch.devices.wanted import ModelSize, want_of
from launch.settings.run_config import RunConfig

PLACEMENT = "placement"
"""Topic of the findings on a machine with devices."""


def check_devices(report: Report, config: RunConfig, model: CheckedModel | None, *, engines: int) -> None:
    """Report the places of the ranks and of ``engines`` engines, which are started on this machine."""
    size = ModelSize() if model is None else ModelSize(model.num_parameters, model.largest_tensor)
    try:
        node = this_node(os.environ)
        placed = place([node], want_of(config, node, learner=True, engines=engines, size=size))
    except Refused as refused:
        report.error("devices", report.at(refused.where), want=refused.wanted, got=refused.found, cure=refused.cure)
        return
    if not node.devices:
        report.good("devices", "none visible here (nvidia-smi): ranks and engines run on the CPU")
        return
    for line in described([node], placed):
        report.good(PLACEMENT, line)
