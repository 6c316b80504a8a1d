"""Metric sinks for MLflow and Trackio, which are installed by the user. Each keeps one run for a run of ours."""

import os
import re
import time
from typing import Any

from tidemill.launch.metrics.sinks import StepMetrics, series_of

_RUN_TAG = "tidemill.run_id"
_MOST_METRICS = 1000  # Metrics of one request. Source: "Request Limits" of MLflow's REST API
_LONGEST_NAME = 250


class MLflow:
    """Logs to one run of an experiment, which has the name of ours and is found again by a tag with our ``run_id``.

    ``tracking_uri``: a server or a database, such as ``sqlite:///mlflow.db``; empty = MLFLOW_TRACKING_URI. Scores of
    evaluations have the step of their weights.
    """

    def __init__(self, *, experiment: str = "tidemill", tracking_uri: str = "") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import, which starts it
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install it: pip install mlflow") from None
        self._client: Any = MlflowClient(tracking_uri=tracking_uri or None)
        self._metric, self._experiment = Metric, experiment
        self._run, self._had = "", dict[str, int]()

    def has(self, record: StepMetrics) -> bool:
        """Return whether the run had these metrics when it was found."""
        self._open(record)
        return record.step <= self._had.get(mlflow_name(series_of(record)), -1)

    def __call__(self, record: StepMetrics) -> None:
        self._open(record)
        now_ms = int(1000 * time.time())
        values = {**record.metrics, series_of(record): record.step}
        metrics = [self._metric(mlflow_name(name), value, now_ms, record.step) for name, value in values.items()]
        # The last request has the mark of the step: a step of which a part was logged is logged again.
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def _open(self, record: StepMetrics) -> None:
        if self._run:
            return
        experiment = self._client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([place], filter_string=f"tags.`{_RUN_TAG}` = '{record.run_id}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(place, run_name=record.run, tags={_RUN_TAG: record.run_id})
        self._had = {name: int(step) for name, step in run.data.metrics.items() if name.startswith("last/")}
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def close(self) -> None:
        """Mark the run as finished."""
        if self._run:
            self._client.set_terminated(self._run)


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts. Rewards and losses of users name metrics: a refused one would come back."""
    parts = [part.strip(" ") for part in re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII).split("/")]
    return "/".join(part if part.strip(".") else f"{part}_" for part in parts)[:_LONGEST_NAME]


class Trackio:
    """Logs to one run of a project, named after ours and its creation time, by the library's own settings.

    It goes to the library's directory here (``TRACKIO_DIR``), a server (``TRACKIO_SERVER_URL``) or a space.
    """

    def __init__(self, *, project: str = "tidemill") -> None:
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install it: pip install trackio") from None
        self._trackio: Any = trackio
        self._project = project
        self._run: Any = None

    def __call__(self, record: StepMetrics) -> None:
        if self._run is None:
            # Its own numbers of this machine would be those of the command, not of the run.
            quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            self._run = self._trackio.init(project=self._project, name=record.run_id, resume="allow", **quiet)
        self._run.log(dict(record.metrics), step=record.step)

    def close(self) -> None:
        """Wait until all is stored."""
        if self._run is not None:
            self._run.finish()
