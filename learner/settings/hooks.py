"""Settings of the section ``learner.hooks``: functions of users that the ranks call within a step."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    """Functions by import path that every rank calls within a step (docs/extending.md)."""

    before_log_probs: str = ""
    """module:function of a ``BeforeLogProbs``, before each pass for log-probs without gradient (of the proximal policy, of the reference);
    empty = none."""
    before_step: str = ""
    """module:function of a ``BeforeStep``, before each optimizer step of the policy; empty = none."""

    def __post_init__(self) -> None:
        for name, path in self.given.items():
            module, colon, function = path.partition(":")
            if not (module and colon and function):
                raise ValueError(f"{name}: want module:function, got {path!r}")

    @property
    def given(self) -> dict[str, str]:
        """Import paths by setting, of the hooks that are set."""
        return {one.name: path for one in fields(self) if (path := getattr(self, one.name))}
