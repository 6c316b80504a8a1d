"""Checks of ``prepare``: the files it makes must be used, and agree with files made before."""

from dataclasses import dataclass
from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.prepare import Prepared, PreparedOtherwise, refuse_other
from tidemill.launch.settings.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPaths:
    """Files that ``prepare`` makes when the run starts, and that the run uses."""

    model: bool = False
    prompts: bool = False


def made_before(config: RunConfig) -> Path | None:
    """Return the directory of another run's prepared files, if the run uses them (as with ``--from-checkpoint``)."""
    directory = Path(config.model.path).parent
    if config.prepare is None or directory == config.root / "prepared" or Path(config.data.path).parent != directory:
        return None
    files = Prepared.in_(directory)
    try:
        complete = refuse_other(config.prepare, directory)
    except PreparedOtherwise:
        return None
    return (
        directory
        if complete and (files.model, files.prompts) == (Path(config.model.path), Path(config.data.path))
        else None
    )


def check_prepare(report: Report, config: RunConfig, *, fresh: bool) -> PreparedPaths:
    """Report prepared files that nothing reads, or that exist with other settings; return those that will be made.

    ``fresh``: the content of the run's directory is removed first.
    """
    if config.prepare is None:
        return PreparedPaths()
    directory = f"{config.directory}/prepared"
    used = PreparedPaths(
        model=config.model.path == f"{directory}/model", prompts=config.data.path == f"{directory}/prompts.jsonl"
    )
    where = "prepare.kind" if "prepare.kind" in report.origins else "prepare"
    if (before := made_before(config)) is not None:
        report.good("prepare", f"{before}: made by an earlier run, with the same settings")
        return PreparedPaths()
    if not used.model and not used.prompts:
        want = "either this and data.path, or prepare, which makes both"
        cure = "remove prepare (--set prepare=null), or the two paths"
        report.error("prepare", report.at("model.path"), want=want, got="all of them", cure=cure)
    elif not (used.model and used.prompts):
        setting, value = ("data.path", config.data.path) if used.model else ("model.path", config.model.path)
        got = f"{value!r}, which is used instead"
        want = f"{setting} to be what it makes"
        report.warning("prepare", report.at(where), want=want, got=got, cure="no action needed if intended")
    try:
        complete = not fresh and refuse_other(config.prepare, config.root / "prepared")
    except PreparedOtherwise as error:
        want = "nothing there, or files made with the same settings"
        cure = "remove it, or set another directory"
        report.error("prepare", str(error.directory), want=want, got=error.reason, cure=cure)
        complete = True
    return PreparedPaths() if complete else used
