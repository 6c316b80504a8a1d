"""Metrics in a run of Weights & Biases."""

from typing import Any

from launch.metrics.port import StepMetrics


class WeightsAndBiases:
    """Logs to one run, which has the name and id of ours and is resumed by it.

    Each metric has the step as its horizontal axis, because scores of evaluations come behind later steps, and the library refuses a step
    that falls. Its key and its mode come from its own variables (``WANDB_API_KEY``, ``WANDB_MODE``).
    """

    def __init__(self, *, project: str, entity: str = "", group: str = "", directory: str = "") -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install it: pip install wandb") from None
        self._wandb = wandb
        self._options = {"project": project, "entity": entity or None, "group": group or None, "dir": directory or None}
        self._run: Any = None

    def __call__(self, one: StepMetrics) -> None:
        """Log the metrics of a step."""
        if self._run is None:
            self._run = self._wandb.init(name=one.run, id=one.run, resume="allow", **self._options)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": one.step, **one.metrics})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
