"""Hooks: functions of users that every rank calls within a step, at the same place on all ranks.

A repeated step must give the same weights, so a hook that changes anything has to be a function of its argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from tidemill.bus.system.functions import check_call, described, errors_as, find_function
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.errors import HookFailed
from tidemill.learner.settings.config import HooksConfig

NO_HOOKS = HooksConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeLogProbs:
    """The moment before a pass for log-probs without gradient."""

    policy: str
    """proximal | reference: the policy whose weights the model has."""
    batch: StepBatch
    """This rank's part of the step."""
    chunks: tuple[Module, ...]
    """The model on this rank: the backend's modules, in the order of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """The moment before the forward and backward passes of an optimizer step."""

    minibatch: int
    """Number of the optimizer step within the batch, from 0."""
    batch: StepBatch
    """This rank's part of the step."""
    chunks: tuple[Module, ...]
    """The model on this rank: the backend's modules, in the order of the layers. Gradients are set to 0 after the hook.
    """
    optimizer: Any
    """The backend's optimizer (``Optimizer.inner``); its learning rate is set after the hook."""


class Hooks:
    """The hooks of a run. Those that are not set do nothing."""

    def __init__(self, config: HooksConfig) -> None:
        """Raises ValueError for a path that does not lead to a function of one argument."""
        self._config = config
        self._functions: dict[str, Callable[[Any], object]] = {}
        for name, path in config.given.items():
            setting = f"learner.hooks.{name}"
            self._functions[name] = find_function(path, setting)
            check_call(self._functions[name], ("moment",), path=path, setting=setting)

    def before_log_probs(self, moment: BeforeLogProbs) -> None:
        """Call the hook of this name. Raises HookFailed."""
        self._call("before_log_probs", moment)

    def before_step(self, moment: BeforeStep) -> None:
        """Call the hook of this name. Raises HookFailed."""
        self._call("before_step", moment)

    def _call(self, name: str, moment: BeforeLogProbs | BeforeStep) -> None:
        function = self._functions.get(name)
        if function is None:
            return
        path, step = self._config.given[name], moment.batch.step
        with errors_as(lambda error: HookFailed(f"learner.hooks.{name}", path, step, described(error))):
            function(moment)
