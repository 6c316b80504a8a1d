"""Settings of the section ``learner.hooks``: functions of users that the ranks call within a step."""

from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import AfterValidator

from tidemill.bus.section import IMPORT_PATH, refusal, section


def _checked(path: str) -> str:
    module, colon, function = path.partition(":")
    if path and not (module and colon and function):
        raise refusal(IMPORT_PATH)
    return path


Hook = Annotated[str, AfterValidator(_checked)]


@section
@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    """Functions by import path that every rank calls within a step (docs/extending.md)."""

    before_log_probs: Hook = ""
    """module:function of a ``BeforeLogProbs``, before each pass for log-probs without gradient (of the proximal policy,
    of the reference); empty = none.
    """
    before_step: Hook = ""
    """module:function of a ``BeforeStep``, before each optimizer step of the policy; empty = none."""

    @property
    def given(self) -> dict[str, str]:
        """Import paths by setting, of the hooks that are set."""
        return {field.name: path for field in fields(self) if (path := getattr(self, field.name))}
