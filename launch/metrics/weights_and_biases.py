"""Metrics in a run of Weights & Biases."""

from typing import Any

from tidemill.launch.metrics.port import StepMetrics


class WeightsAndBiases:
    """Logs to one run, which has the name of ours and is resumed by our ``run_id``.

    Each metric has the step as its horizontal axis, because scores of evaluations come behind later steps, and the library refuses a step
    that falls. Its key and its mode come from its own variables (``WANDB_API_KEY``, ``WANDB_MODE``).
    """

    def __init__(self, *, project: str, entity: str = "", group: str = "", directory: str = "") -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install it: pip install wandb") from None
        except ImportError as error:
            raise ValueError(f"wandb: {error}") from None
        self._wandb = wandb
        self._options = {"project": project, "entity": entity or None, "group": group or None, "dir": directory or None}
        self._run: Any = None
        self._had: dict[str, int] = {}

    def has(self, one: StepMetrics) -> bool:
        """Return whether the run had these metrics when it was resumed."""
        self._open(one)
        return one.step <= self._had.get(_of(one), -1)

    def __call__(self, one: StepMetrics) -> None:
        """Log the metrics of a step."""
        self._open(one)
        self._run.log({"step": one.step, _of(one): one.step, **one.metrics})

    def _open(self, one: StepMetrics) -> None:
        if self._run is None:
            self._run = self._wandb.init(name=one.run, id=one.run_id, resume="allow", **self._options)
            self._run.define_metric("step")
            self._run.define_metric("last/*", hidden=True)
            self._run.define_metric("*", step_metric="step")
            summary = dict(self._run.summary) if self._run.resumed else {}
            self._had = {name: int(step) for name, step in summary.items() if name.startswith("last/")}

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


def _of(one: StepMetrics) -> str:
    """Return the name under which the last step is logged, of the steps or of an evaluation set, whose steps rise each by themselves."""
    return f"last/{next(iter(one.metrics), 'eval/').rpartition('/')[0]}" if one.evaluation else "last/step"
