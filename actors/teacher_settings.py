"""Settings of teachers: servers that score the tokens of samples, for on-policy distillation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Strict
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.section import Sections, refusal, section, short
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.rewards.part_settings import fits


def _server(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise refusal("http://HOST:PORT")
    return url.rstrip("/")


Server = Annotated[str, AfterValidator(_server)]


@section
@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One teacher, an entry of ``actor.teachers``."""

    name: SkipJsonSchema[str] = field(default="", init=False)
    urls: Annotated[
        tuple[Server, ...], Strict(False), BeforeValidator(lambda urls: [urls] if isinstance(urls, str) else urls)
    ] = ()
    """Addresses of its servers with SGLang's HTTP API: SGLang, ``tidemill teacher``, or a router before several."""
    url: Server | None = None
    """One more of these addresses."""
    model: str = ""
    """Directory of its model: ``tidemill up`` serves it on this machine's CPUs (built-in engine), and sets ``urls``."""
    when: JsonObject = field(default_factory=dict)
    """Metadata that a row must have for this teacher to score its samples; empty = any row."""

    def __post_init__(self) -> None:
        if not self.servers and not self.model:
            want = "want urls, of servers that run, or model, a directory that `tidemill up` serves"
            raise ValueError(f"urls: {want}; got neither")

    @property
    def servers(self) -> tuple[str, ...]:
        """All addresses of its servers."""
        return self.urls if self.url is None else (*self.urls, self.url)

    def applies(self, metadata: JsonMapping) -> bool:
        """Return whether this teacher scores the samples of a row with such metadata."""
        return fits(self.when, metadata)


Teachers = Sections[Annotated[TeacherConfig, short("url", TeacherConfig)]]
"""The teachers by name, in order: the first that applies to a row scores its samples."""


def chosen(teachers: Iterable[TeacherConfig], metadata: JsonMapping) -> TeacherConfig | None:
    """Return the first teacher that applies to a row with such metadata; None = none does."""
    return next((teacher for teacher in teachers if teacher.applies(metadata)), None)
