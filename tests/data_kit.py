"""Tasks, samples and rules for tests of the data: small, explicit, no model."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from tidemill.bus.wire.messages import Kind, Sample, Sampling, Span, Status, Task
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.settings.config import StalenessConfig

RUN = "r"


def rules(**changes: Any) -> DataRules:
    values: dict[str, Any] = {
        "run": RUN,
        "steps": 8,
        "groups_per_step": 2,
        "max_lag": 1,
        "max_tokens_per_micro_batch": 32,
    } | changes
    names = {field.name for field in fields(StalenessConfig)} & values.keys()
    staleness = StalenessConfig(**{name: values.pop(name) for name in names})
    return DataRules(staleness=staleness, **values)


def task(id: int, **changes: Any) -> Task:
    values: dict[str, Any] = {
        "run": RUN,
        "epoch": 1,
        "prompt": f"prompt {id}",
        "prompt_tokens": np.array([1, 2, 3], np.int32),
        "group_size": 2,
        "sampling": Sampling(max_new_tokens=8),
        "prompt_epoch": 0,
        "offset": id - 1,
        "id": id,
    }
    return Task(**(values | changes))


def sample(
    of: Task, index: int, spans: Sequence[tuple[int, int]] = ((0, 3),), *, attempt: str = "a", **changes: Any
) -> Sample:
    """Return a sample of ``spans`` (version, tokens); its tokens and log-probs identify task, index and position."""
    length = sum(count for _, count in spans)
    response = (np.arange(length) + 10 * of.id + 100 * index) % 50 + 4
    values: dict[str, Any] = {
        "run": of.run,
        "task": of.id,
        "index": index,
        "group_size": of.group_size,
        "attempt": attempt,
        "prompt": of.prompt,
        "tokens": np.concatenate([of.prompt_tokens, response]).astype(np.int32),
        "response_length": length,
        "response": "x" * length,
        "rollout_log_probs": -(np.arange(length, dtype=np.float32) + 1) / 8,
        "loss_mask": np.ones(length, np.uint8),
        "spans": tuple(Span(version=version, num_tokens=count) for version, count in spans),
        "reward": float(index),
        "status": Status.COMPLETED,
        "sampling": of.sampling,
        "kind": of.kind,
    }
    return Sample(**(values | changes))


def eval_task(id: int) -> Task:
    return task(id, kind=Kind.EVAL)
