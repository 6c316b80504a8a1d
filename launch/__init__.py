"""The command line, the configuration of a run, and the wiring of its processes."""

from typing import TYPE_CHECKING

from tidemill.bus.public_names import public_names

if TYPE_CHECKING:
    from tidemill.launch.metrics.sinks import StepMetrics

_MODULES = {"StepMetrics": "metrics.sinks"}
__all__ = ["StepMetrics"]
__getattr__ = public_names(__name__, _MODULES)
