"""Checks of the debugging modes: the files of recorded batches, and the prompts of a dump."""

from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.debug.prompts import read_prompts
from tidemill.learner.debug.rollout_file import read_header
from tidemill.learner.errors import DebugFileRefused


def check_debug(report: Report, config: RunConfig) -> None:
    """Check that every step of ``debug.load_rollout`` has a file, and that the prompts of a dump can be read."""
    debug = config.debug
    if debug.dump_modules.step:
        try:
            read_prompts(Path(debug.dump_modules.prompts))
        except DebugFileRefused as error:
            where = report.at("debug.dump_modules.prompts")
            report.error("debug", where, want=error.want, got=f"{error.where}: {error.got}", cure="fix the file")
        if debug.dump_modules.step > config.learner.steps:
            where, steps = report.at("debug.dump_modules.step"), config.learner.steps
            report.error("debug", where, want=f"<= learner.steps = {steps}", got=debug.dump_modules.step, cure="lower it")
    if debug.load_rollout:
        _check_files(report, config)


def _check_files(report: Report, config: RunConfig) -> None:
    steps, template = config.learner.steps, config.debug.load_rollout
    files = [Path(template.format(step=step)) for step in range(1, steps + 1)]
    missing = next((step for step, file in enumerate(files, 1) if not file.is_file()), None)
    where = report.at("debug.load_rollout")
    if missing is not None:
        cure = (
            f"set learner.steps: {missing - 1}, or save more steps" if missing > 1 else "fix the path, or save them with debug.save_rollout"
        )
        want = f"a file for each of learner.steps = {steps}"
        report.error("debug", where, want=want, got=f"none for step {missing}: {files[missing - 1]}", cure=cure)
        return
    try:
        headers = [read_header(file) for file in dict.fromkeys(files)]
    except DebugFileRefused as error:
        report.error("debug", where, want=error.want, got=f"{error.where}: {error.got}", cure="save it again with debug.save_rollout")
        return
    report.good("debug", f"{len(headers)} files of recorded batches, {sum(header['samples'] for header in headers)} samples")
