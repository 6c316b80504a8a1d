"""Makes the files that a run needs before it starts, once: ``model/`` and ``prompts.jsonl``, with a record of their settings."""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.settings.datasets import prompts, write_prompts
from tidemill.launch.settings.prepare_config import PrepareConfig

logger = logging.getLogger(__name__)

RECORD = "prepared.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Paths of the files."""

    model: Path
    prompts: Path

    @classmethod
    def in_(cls, directory: Path) -> "Prepared":
        """Return the paths of the files in ``directory``, whether they exist or not."""
        return cls(model=directory / "model", prompts=directory / "prompts.jsonl")


class PreparedOtherwise(ValueError):
    """The directory holds files made from another config, or files of unknown origin."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return f"{self.directory}: {self.reason}; remove the directory, or choose another one"


def prepare(config: PrepareConfig, directory: Path) -> Prepared:
    """Make ``model/`` and ``prompts.jsonl`` in ``directory``, unless they exist already; an incomplete directory is made again.

    Returns their paths. Raises PreparedOtherwise, naming the differences, if they were made from another config.
    """
    prepared, wanted = Prepared.in_(directory), dataclasses.asdict(config)
    if refuse_other(config, directory):
        return prepared
    directory.mkdir(parents=True, exist_ok=True)
    _write_record(directory, wanted, complete=False)
    _make(config, prepared)
    _write_record(directory, wanted, complete=True)
    return prepared


def refuse_other(config: PrepareConfig, directory: Path) -> bool:
    """Return whether the files of ``config`` exist already. Raises PreparedOtherwise for files of another config or unknown origin."""
    prepared, wanted = Prepared.in_(directory), dataclasses.asdict(config)
    record = _read_record(directory)
    if record is None and (prepared.model.exists() or prepared.prompts.exists()):
        raise PreparedOtherwise(directory, f"has a model or prompts but no {RECORD}: they were not made by this program")
    if record is not None and record["config"] != wanted:
        raise PreparedOtherwise(directory, f"was made from another config: {_differences(record['config'], wanted)}")
    return record is not None and bool(record["complete"])


def digest(config: Mapping[str, object]) -> str:
    """Return the SHA-256 of a config, the same for the same values in any order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _make(config: PrepareConfig, prepared: Prepared) -> None:
    from tidemill.launch.settings.tiny_model import make_model

    shutil.rmtree(prepared.model, ignore_errors=True)
    count = write_prompts(prepared.prompts, prompts(config))
    logger.info("prompts written file=%s count=%d", prepared.prompts, count)
    make_model(prepared.model, config)
    logger.info("model written directory=%s layers=%d hidden=%d", prepared.model, config.layers, config.hidden)


def _read_record(directory: Path) -> JsonObject | None:
    path = directory / RECORD
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["digest"] != digest(record["config"]):
        raise PreparedOtherwise(directory, f"{RECORD} was changed by hand")
    return dict(record)


def _write_record(directory: Path, config: Mapping[str, object], *, complete: bool) -> None:
    write_whole(directory / RECORD, json.dumps({"digest": digest(config), "complete": complete, "config": config}, indent=2) + "\n")


def _differences(there: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    names = sorted({*there, *wanted})
    return ", ".join(f"{n}: there {there.get(n)!r}, wanted {wanted.get(n)!r}" for n in names if there.get(n) != wanted.get(n))
