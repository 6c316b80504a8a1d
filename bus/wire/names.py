"""The form of a run's name. In a module of its own: the command line reads it without numpy, keepers without pydantic."""

import re

RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # It can be part of a subject and of a stream's name
