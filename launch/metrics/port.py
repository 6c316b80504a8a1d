"""A metric sink: a function that is given the metrics of one step after the other. Knows no bus and no sink."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import Contract


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


SINK = Contract(
    word="metric sink",
    options="--option",
    argument="StepMetrics",
    path="tidemill.launch.metrics.port:SINK",
    table={
        "jsonl": "tidemill.launch.metrics.sinks:Jsonl",
        "tensorboard": "tidemill.launch.metrics.sinks:TensorBoard",
        "wandb": "tidemill.launch.metrics.sinks:WeightsAndBiases",
    },
    encode=lambda one: json.dumps(asdict(one)).encode(),
    decode=_decoded,
    checked=_nothing,
)
"""A function ``(StepMetrics, **options) -> None``, plain or async, or a class: one instance of it is made with the
options and called. A ``close()`` of the instance is called at the end. One that raises is called again with the same
metrics, until it returns. An instance may have ``has(StepMetrics) -> bool``: what it has from an earlier command is not
given to it again.
"""
