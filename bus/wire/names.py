"""Names in settings and messages, without numpy and pydantic: commands and keepers of rewards start fast."""

import re

RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # A run's name can be part of a subject and of a stream's name
BY_ROLLOUT = "by_rollout"  # ``actor.reward`` of a run in which every episode gets its reward from its rollout
