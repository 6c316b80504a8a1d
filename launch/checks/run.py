"""All checks of a run before it starts, for ``tidemill config``, ``check``, ``up`` and ``learner``."""

from dataclasses import dataclass
from pathlib import Path

from tidemill.launch.checks.data import check_data, check_debug, check_evaluation
from tidemill.launch.checks.devices import check_devices
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.functions import check_algorithm, check_bridge, check_filters, check_reward, check_rollouts
from tidemill.launch.checks.machine import check_bus, check_engine, check_memory, check_places, check_store
from tidemill.launch.checks.model import check_model
from tidemill.launch.checks.teachers import check_teachers
from tidemill.launch.checks.tokens import check_end_tokens, check_renderer, check_tokenizer, check_tools
from tidemill.launch.settings.config_loader import Loaded
from tidemill.launch.settings.prepare import Prepared, PreparedOtherwise, refuse_other
from tidemill.launch.settings.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """The intended use of a configuration by the calling process."""

    trains: bool = True  # False if it starts no learner: the evaluation sets are its only data
    # True if it starts actors, engines and scorers on this machine: reward and program must be here.
    starts_workers: bool = True
    uses_bus: bool = False  # True if it needs the server at `bus.url` at once
    resumes: bool = False  # True if it resumes the run in its directory, when there is one
    fresh: bool = False  # True if the content of the run's directory is removed first
    call_reward: bool = False  # True if a reward by import path is called, too; it may do anything


def check(loaded: Loaded, purpose: Purpose) -> Report:
    """Return the report of all checks. It takes about a second, loads no torch, and writes nothing.

    It starts nvidia-smi, and a process for code of the user's own: losses, hooks, programs of rollouts. A store of
    checkpoints gets a small object, which is removed, where the purpose reaches for other services.
    """
    config, report = loaded.config, Report(loaded.origins)
    prepared = check_prepare(report, config, fresh=purpose.fresh)
    model = check_model(report, config, prepared=prepared.model)
    tokenize = check_tokenizer(report, config, model) if model is not None else None
    if model is not None and model.directory is not None:
        check_end_tokens(report, model.directory)
    reads_prompts = purpose.trains and not config.debug.trains_only
    data = check_data(report, config, model, tokenize, prepared=prepared.prompts) if reads_prompts else None
    held_out = check_evaluation(report, config, model, tokenize)
    rows = [row for prompts in (data, held_out) if prompts is not None for row in prompts.rows]
    starts_workers = purpose.starts_workers and not config.debug.trains_only
    actors_here = starts_workers and config.up.actors > 0
    rewards_here = starts_workers and config.up.scorers > 0 if config.actor.scorers.enabled else actors_here
    check_debug(report, config)
    check_reward(report, config, rows, on_this_machine=rewards_here, call=purpose.call_reward)
    check_rollouts(report, config, on_this_machine=actors_here)
    check_renderer(report, config, model, on_this_machine=actors_here)
    check_tools(report, config, model)
    check_teachers(report, config, model, data, reach=purpose.starts_workers)
    check_filters(report, config)
    check_algorithm(report, config)
    check_bridge(report, config)
    check_engine(report, config, model, on_this_machine=starts_workers and config.up.engines > 0)
    check_bus(report, config, model, data, reach=purpose.uses_bus)
    check_places(report, config, model, trains=purpose.trains)
    if purpose.trains:
        check_store(report, config, reach=purpose.uses_bus)
    engines = config.up.engines if starts_workers else 0
    has_ranks = purpose.trains and not config.debug.rollout_only
    check_memory(report, config, model, engines=engines, trains=has_ranks)
    check_devices(report, config, model, engines=engines, learner=has_ranks)
    if purpose.resumes:
        from tidemill.launch.checks.resume import check_resume

        check_resume(report, config)
    return report


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
        report.error("prepare", "model.path", want=want, got="all of them", cure=cure)
    elif not (used.model and used.prompts):
        setting, value = ("data.path", config.data.path) if used.model else ("model.path", config.model.path)
        got = f"{value!r}, which is used instead"
        want = f"{setting} to be what it makes"
        report.warning("prepare", where, want=want, got=got, cure="no action needed if intended")
    try:
        complete = not fresh and refuse_other(config.prepare, config.root / "prepared")
    except PreparedOtherwise as error:
        want = "nothing there, or files made with the same settings"
        cure = "remove it, or set another directory"
        report.error("prepare", str(error.directory), want=want, got=error.reason, cure=cure)
        complete = True
    return PreparedPaths() if complete else used
