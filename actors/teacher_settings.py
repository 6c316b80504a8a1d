"""Settings of teachers: servers that score the tokens of samples, for on-policy distillation."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tidemill.bus.config import RUN_NAME
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.part_settings import fits


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One teacher, an entry of ``actor.teachers``."""

    name: str
    urls: tuple[str, ...] = ()
    """Addresses of its servers, each with SGLang's HTTP API: SGLang, ``tidemill teacher``, or a router before several."""
    model: str = ""
    """Directory of its model: ``tidemill up`` starts the built-in engine with it on this machine's CPUs, and sets ``urls``."""
    when: JsonMapping = field(default_factory=dict)
    """Metadata that a row must have for this teacher to score its samples; empty = any row."""

    def applies(self, metadata: JsonMapping) -> bool:
        """Return whether this teacher scores the samples of a row with such metadata."""
        return fits(self.when, metadata)


def parse_teachers(given: JsonMapping, where: str = "teachers") -> list[TeacherConfig]:
    """Return the teachers in order: the first that applies to a row scores its samples. Raises ValueError naming the setting."""
    return [_teacher(name, value, f"{where}.{name}") for name, value in given.items()]


def chosen(teachers: Sequence[TeacherConfig], metadata: JsonMapping) -> TeacherConfig | None:
    """Return the first teacher that applies to a row with such metadata; None = none does."""
    return next((one for one in teachers if one.applies(metadata)), None)


def _teacher(name: object, value: object, where: str) -> TeacherConfig:
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise ValueError(f"{where}: want a name of 1 to 64 of A-Z a-z 0-9 _ -")
    if isinstance(value, str):
        value = {"url": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: want a map with urls or model, got {value!r}")
    known = {one.name for one in dataclasses.fields(TeacherConfig)} - {"name"} | {"url"}
    if unknown := sorted(str(key) for key in value if key not in known):
        raise ValueError(f"{where}.{unknown[0]}: no such setting; there are {', '.join(sorted(known))}")
    model, when = value.get("model", ""), value.get("when", {})
    urls = _urls(value, where)
    if not isinstance(model, str):
        raise ValueError(f"{where}.model: want the directory of a model, got {model!r}")
    if not urls and not model:
        raise ValueError(f"{where}: want urls, of servers that run, or model, a directory that `tidemill up` serves; got neither")
    if not isinstance(when, Mapping) or not all(isinstance(key, str) for key in when):
        raise ValueError(f"{where}.when: want a map of metadata, such as {{reward: math}}, got {when!r}")
    return TeacherConfig(name=name, urls=urls, model=model, when=dict(when))


def _urls(value: Mapping[str, object], where: str) -> tuple[str, ...]:
    given = value.get("urls", ())
    listed = [*given] if isinstance(given, list | tuple) else [given]
    if value.get("url"):
        listed.append(value["url"])
    for url in listed:
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
            fine = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fine = False
        if not fine:
            raise ValueError(f"{where}.urls: want http://HOST:PORT, got {json.dumps(url, default=str)}")
    return tuple(str(url).rstrip("/") for url in listed)
