"""The findings of the checks, and the error that is raised with them. Knows no check."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.bus import exit_codes

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    level: str  # ok | warning | error
    topic: str  # model | tokenizer | data | reward | ..
    text: str  # Location, expected value, actual value and cure

    def __str__(self) -> str:
        return f"{self.level:<8}{self.topic:<10}{self.text}"


@dataclass(slots=True)
class Report:
    """All findings, in order; ``origins`` is the place of each setting that is not a default."""

    origins: Mapping[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Findings that make the run impossible."""
        return [finding for finding in self.findings if finding.level == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        """Findings that do not prevent the run."""
        return [finding for finding in self.findings if finding.level == WARNING]

    def on(self, topic: str) -> list[str]:
        """Return the texts of the findings on a topic."""
        return [finding.text for finding in self.findings if finding.topic == topic]

    def at(self, setting: str) -> str:
        """Return a setting behind the place where it was set, if it was: ``run.yaml:3: model.path``."""
        return f"{self.origins[setting]}: {setting}" if setting in self.origins else setting

    def good(self, topic: str, text: str) -> None:
        """Add a check that found no problem."""
        self.findings.append(Finding(level=OK, topic=topic, text=text))

    def error(self, topic: str, where: str, *, want: str, got: object, cure: str) -> None:
        """Add an error, as ``where: want ..., got ...; cure``. ``where``: a setting, or another place."""
        self._refusal(ERROR, topic, where, want, got, cure)

    def warning(self, topic: str, where: str, *, want: str, got: object, cure: str) -> None:
        """Add a warning, as ``error``."""
        self._refusal(WARNING, topic, where, want, got, cure)

    def _refusal(self, level: str, topic: str, where: str, want: str, got: object, cure: str) -> None:
        shown = got if isinstance(got, str) else repr(got)
        text = f"{self.at(where)}: want {want}, got {shown}; {cure}"
        self.findings.append(Finding(level=level, topic=topic, text=text))

    def refuse(self) -> None:
        """Raise CheckFailed with all errors, if there are any."""
        if self.errors:
            raise CheckFailed([finding.text for finding in self.errors])


class CheckFailed(ValueError):
    """A run cannot work as it is configured; ``reasons`` has all of them."""

    exit_code = exit_codes.CONFIG

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "\n  ".join(self.reasons)
