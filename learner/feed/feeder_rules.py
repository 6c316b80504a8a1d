"""Settings of the feeder's process, beyond the rules of the DataSource."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.wire.episode_limits import Budget
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.algorithms.alarms import AlarmConfig
from tidemill.learner.data.curriculum import CurriculumRules


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederRules:
    """Settings of the process, beyond the rules of the DataSource."""

    run: str
    root: Path
    """Directory of the checkpoints."""
    sampling: Sampling
    group_size: int
    checkpoint_every: int
    keep_checkpoints: int
    copies: int = 0
    """Holders of each file of a checkpoint; 0 = all nodes share one directory, or there is a store."""
    store: str = ""
    """URL of the store of checkpoints; empty = there is none."""
    num_nodes: int = 1
    ahead: int
    """Steps planned before a rank requests them: 0 or 1."""
    batch_timeout_s: float
    failing_tasks: int = 16
    failing_s: float = 600.0
    vocab_size: int | None
    routed: RoutedShape | None = None
    """Sizes of the model's routing, where the experts in samples are replayed; else None."""
    pad_to: int
    """Row lengths are multiples of this number of tokens."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a response; empty = not known."""
    from_checkpoint: Path | None = None
    """Checkpoint with the initial weights of the run; None = those of the model directory."""
    curriculum: CurriculumRules = field(default_factory=CurriculumRules)
    """Prompts that are left out for their pass rate."""
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Limits of episodes, by rollout."""
    recorded: frozenset[str] = frozenset()
    """Rollouts that take the recorded responses of the rows as samples."""
    epoch: int = 0
    """Epoch that was raised for this start, and for no other; 0 = the feeder raises it."""
    metadata: bool = False
    """True if the advantages may depend on the metadata of samples: with a function by import path, and with roles."""
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    """Action on alarms, of which the feeder raises ``long_episodes``."""
    step_settings: JsonObject = field(default_factory=dict)
    """Record of the settings that decide the result of a step (``tidemill.learner.settings.step_settings``); empty = no step trains."""
    save_rollout: str = ""
    """File for the samples of each step, with ``{step}`` in its name; empty = none."""
    initial_model: str = ""
    """Directory that is published as version 0 by the feeder, because no rank publishes any; empty = a rank does."""
