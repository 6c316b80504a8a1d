"""Metric sinks: the contract of a function that is given the metrics of one step after the other, and the shipped
sinks: lines of a file, event files of TensorBoard, a run of Weights & Biases, MLflow or Trackio (installed by the
user). Knows no bus.
"""

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.launch.settings import extras
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Contract

_RUN_TAG = "tidemill.run_id"
_MOST_METRICS = 1000  # Metrics of one request. Source: "Request Limits" of MLflow's REST API
_LONGEST_NAME = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, or the scores of one evaluation set."""

    run: str
    run_id: str = ""
    """Name and creation time of the run: another run of the same name, after its removal, has another one."""
    step: int
    """The step, or the step of the weights that were evaluated. Steps rise; scores come when they are there, mostly of
    earlier steps.
    """
    epoch: int
    """Epoch of the learner that reported them."""
    metrics: Mapping[str, float]
    """Values by name (``docs/metrics.md``); values of an evaluation are ``eval/SET/METRIC``. All are finite."""
    evaluation: bool = False


def _decoded(values: JsonMapping) -> StepMetrics:
    return StepMetrics(**values)


def _nothing(name: str, result: object) -> None:
    if result is not None:
        raise RewardFailed(name, f"want nothing returned, got {result!r}")


# A function `(StepMetrics, **options) -> None`, plain or async, or a class: one instance of it is made with the options
# and called. A `close()` of the instance is called at the end. One that raises is called again with the same metrics,
# until it returns. An instance may have `has(StepMetrics) -> bool`: what it has from an earlier command is not given to
# it again.
SINK = Contract(
    word="metric sink",
    options="--option",
    argument="StepMetrics",
    path="tidemill.launch.metrics.sinks:SINK",
    table={
        "jsonl": "tidemill.launch.metrics.sinks:Jsonl",
        "tensorboard": "tidemill.launch.metrics.sinks:TensorBoard",
        "wandb": "tidemill.launch.metrics.sinks:WeightsAndBiases",
        "mlflow": "tidemill.launch.metrics.sinks:MLflow",
        "trackio": "tidemill.launch.metrics.sinks:Trackio",
    },
    encode=lambda line: json.dumps(asdict(line)).encode(),
    decode=_decoded,
    checked=_nothing,
)


class Jsonl:
    """Appends a line for each step and each evaluation. A file of another run of the name is continued."""

    def __init__(self, *, path: str) -> None:
        try:
            self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - closed by ``close``
        except OSError as error:
            want = "a file in a directory that is there and can be written"
            raise ValueError(f"path: want {want}, got {path!r}: {error.strerror}") from None
        self._has = _lines_of(self._file)

    def has(self, record: StepMetrics) -> bool:
        """Return whether the file had a line of these metrics when it was opened."""
        return _key(record.run_id, record.step, record.metrics) in self._has

    def __call__(self, record: StepMetrics) -> None:
        values = {"step": record.step, "epoch": record.epoch, "run_id": record.run_id, **record.metrics}
        line, end = json.dumps(values).encode() + b"\n", self._file.seek(0, 2)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line was written", self._file.name)
        except OSError:
            self._file.truncate(end)  # the line is written again
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


Key = tuple[str, int, str]


def _key(run_id: str, step: int, metrics: Iterable[str]) -> Key:
    """Return run, step, and the evaluation set; "" for the metrics of a step."""
    first = next((name for name in metrics if name.startswith("eval/")), "")
    return run_id, step, first.rpartition("/")[0]


def _lines_of(file: BinaryIO) -> set[Key]:
    """Return the lines of a file by their keys; a last line that is not whole is removed."""
    file.seek(0)
    keys, end = set[Key](), 0
    for line in file:
        if not line.endswith(b"\n"):
            file.truncate(end)
            break
        end += len(line)
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            values = json.loads(line)
            metrics = values.keys() - {"step", "epoch", "run_id"}
            keys.add(_key(str(values.get("run_id", "")), int(values["step"]), metrics))
    return keys


class TensorBoard:
    """Writes scalars under the names of the metrics; a directory for each run below ``directory``."""

    def __init__(self, *, directory: str) -> None:
        extras.require("metrics")
        from tensorboardX import SummaryWriter

        self._directory, self._open = directory, SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def __call__(self, record: StepMetrics) -> None:
        if record.run not in self._writers:
            self._writers[record.run] = self._open(f"{self._directory}/{record.run}", write_to_disk=True)
        writer = self._writers[record.run]
        for name, value in record.metrics.items():
            writer.add_scalar(name, value, record.step)
        writer.flush()

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """Logs to one run, which has the name of ours and is resumed by our ``run_id``.

    Each metric has the step as its horizontal axis, because scores of evaluations come behind later steps, and the
    library refuses a step that falls. Its key and its mode come from its own variables (``WANDB_API_KEY``,
    ``WANDB_MODE``).
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

    def has(self, record: StepMetrics) -> bool:
        """Return whether the run had these metrics when it was resumed."""
        self._open(record)
        return record.step <= self._had.get(series_of(record), -1)

    def __call__(self, record: StepMetrics) -> None:
        self._open(record)
        self._run.log({"step": record.step, series_of(record): record.step, **record.metrics})

    def _open(self, record: StepMetrics) -> None:
        if self._run is None:
            self._run = self._wandb.init(name=record.run, id=record.run_id, resume="allow", **self._options)
            self._run.define_metric("step")
            self._run.define_metric("last/*", hidden=True)
            self._run.define_metric("*", step_metric="step")
            summary = dict(self._run.summary) if self._run.resumed else {}
            self._had = {name: int(step) for name, step in summary.items() if name.startswith("last/")}

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


def series_of(record: StepMetrics) -> str:
    """Return the name under which the last step is logged: steps and evaluation sets rise each by themselves."""
    return f"last/{next(iter(record.metrics), 'eval/').rpartition('/')[0]}" if record.evaluation else "last/step"


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
        # The last request has the mark of the step: a step that was logged in part is logged again.
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
            # Its own numbers of this machine would describe the command, not the run.
            quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            self._run = self._trackio.init(project=self._project, name=record.run_id, resume="allow", **quiet)
        self._run.log(dict(record.metrics), step=record.step)

    def close(self) -> None:
        """Wait until all is stored."""
        if self._run is not None:
            self._run.finish()
