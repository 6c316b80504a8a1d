"""Falcon H1: the width of its states is a setting beside the number and the size of their heads."""

from typing import Any

from tidemill.learner.backends.fsdp.family import Family


def _fit(settings: dict[str, Any]) -> None:
    settings["mamba_d_ssm"] = settings["mamba_n_heads"] * settings["mamba_d_head"]


FAMILY = Family(fit=_fit)
