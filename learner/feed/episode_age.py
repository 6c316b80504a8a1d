"""Seconds of a step's episodes against the time for which their tokens may be trained: ``max_lag`` steps.

An episode that takes longer has tokens that are too old when it ends, those of its first turns, however fast the step comes that trains it.
"""

import logging
from collections import deque
from collections.abc import Mapping

from tidemill.learner.algorithms.alarms import AlarmConfig, Context, check

log = logging.getLogger(__name__)

SECONDS, SHARE = "data/episode_seconds_p95", "data/episode_lag_share_p95"
STEPS = 16
"""Number of newest steps whose mean time counts: a checkpoint or an evaluation makes single ones long."""


class EpisodeAge:
    """Measures the time between steps, and raises the alarm ``long_episodes``."""

    def __init__(self, config: AlarmConfig, context: Context) -> None:
        self._config, self._context = config, context
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._done_s: float | None = None
        self.trouble = ""
        """The alarm of the newest step, for the feeder's row; empty = none."""

    def done(self, metrics: Mapping[str, float], now: float, *, recorded: bool = False) -> dict[str, float]:
        """Return the share for a step that was done at ``now``, monotonic seconds; nothing without episodes or a time of steps.

        ``recorded``: an earlier start took the step too, so that it waited for no samples; it is no measure of the time between steps.
        """
        before, self._done_s = self._done_s, now
        if recorded or before is None:
            return {}
        self._steps_s.append(now - before)
        limit_s = self._context.max_lag * sum(self._steps_s) / len(self._steps_s)
        if SECONDS not in metrics or limit_s <= 0:
            self.trouble = ""
            return {}
        found = {SHARE: metrics[SECONDS] / limit_s}
        alarms = check(found, self._config, self._context) if self._config.action != "off" else ()
        self.trouble = "; ".join(str(alarm) for alarm in alarms)
        for alarm in alarms:
            log.warning("alarm %s seconds=%.1f step_seconds=%.1f", alarm, metrics[SECONDS], limit_s / self._context.max_lag)
        return found
