"""Checks of the user's own code: rewards and filters with their options; losses, hooks, bridges and programs."""

import asyncio
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

from tidemill.actors.rollout_settings import MULTI_TURN, OF_SLIME, RolloutConfig, served
from tidemill.bus.system.functions import described, errors_as
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Status
from tidemill.bus.wire.task_settings import BY_ROLLOUT
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.own_objects import defect
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.algorithms.choices import OFFERED, OWN_ARGUMENTS
from tidemill.learner.filters import contract_of
from tidemill.learner.prompts.rows import PromptRow
from tidemill.rewards.errors import BadRewardOption, RewardFailed, RewardNotImported, UnknownReward
from tidemill.rewards.group import GROUP
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.registry import ASKING, COMPARING, SANDBOXED, SEVERAL, TABLE, bind, load
from tidemill.rewards.scorers import opened

FIX_MODULE = "fix the name or the module; modules are searched in this directory and in PYTHONPATH"
CALL_S = 10.0  # Time limit in seconds of the one call of a reward by import path, with --check-reward
PROGRAMS = ("agent:", "slime:")  # Beginnings of `use` with a module and a name in it
GSPO_WIDE = 0.01  # A clip range of GSPO's ratio that is wider than this belongs to another loss
# Settings of the algorithm that name one function, with the same arguments for every choice.
OWN_SETTINGS = ("loss", "weight.level", "aggregation")
HOOK_ARGUMENTS = ("moment",)  # Arguments of a hook (`learner/trainer/hooks.py`)


def check_reward(
    report: Report, config: RunConfig, rows: Sequence[PromptRow], *, on_this_machine: bool, call: bool
) -> None:
    """Load the reward with its options; score the first row that is for it, if it is built in or ``call`` is set.

    ``on_this_machine``: it is computed here; else a missing module is a warning: others may have it.
    """
    if config.samples_nothing:
        report.good("reward", "none needed: all samples are recorded responses")
        return
    if config.actor.scorers.enabled and not config.up.scorers:
        want = "scorers"
        cure = "start some: tidemill scorer --bus URL, or tidemill host ... scorers=N; or set up.scorers"
        report.warning("reward", "actor.scorers.enabled", want=want, got="up.scorers: 0", cure=cure)
    scored = [row for row in rows if row.rollout not in config.recorded_rollouts]
    if config.actor.group_reward:
        _check_group(report, config, on_this_machine=on_this_machine)
    check_one = partial(_check_one, report, on_this_machine=on_this_machine, call=call)
    for part in config.actor.reward_parts.values():
        row = next((row for row in scored if part.applies(row.metadata)), None)
        settings = (f"actor.reward_parts.{part.name}", f"actor.reward_parts.{part.name}.options")
        check_one(part.reward, dict(part.options), row, settings=settings)
    if config.actor.reward_parts or (config.actor.group_reward and not config.actor.reward):
        return
    settings, row = ("actor.reward", "actor.reward_options"), next(iter(scored), None)
    check_one(config.actor.reward, config.actor.reward_options, row, settings=settings)


def _check_group(report: Report, config: RunConfig, *, on_this_machine: bool) -> None:
    name, options = config.actor.group_reward, config.actor.group_reward_options
    severity = report.error if on_this_machine or ":" not in name else report.warning
    settings = ("actor.group_reward", "actor.group_reward_options")
    with _refusals(report, "reward", name, settings, "a reward of groups that can be loaded", severity):
        bind(name, options, GROUP)
        report.good("reward", f"{name} loaded, not called")


@contextmanager
def _refusals(
    report: Report, topic: str, name: str, settings: tuple[str, str], want: str, severity: Callable[..., None]
) -> Iterator[None]:
    """Report a function that cannot be loaded with its options. ``settings``: of its name, and of its options."""
    try:
        yield
    except RewardNotImported as error:
        report.error(topic, settings[0], want=f"{name} imported", got=error.reason, cure="fix the module")
    except UnknownReward as error:
        severity(topic, settings[0], want=want, got=f"{name!r}: {error.reason}", cure=FIX_MODULE)
    except BadRewardOption as error:
        where = f"{settings[1]}.{error.option}"
        report.error(topic, where, want=f"an option of {name}", got=error.reason, cure="fix it, or remove it")


def check_rollouts(report: Report, config: RunConfig, *, on_this_machine: bool) -> None:
    """Find the interpreter or the code of every rollout. ``on_this_machine``: actors run on this machine."""
    rollouts = config.rollouts
    loaded = served(rollouts, config.actor.rollouts)
    for name, rollout in rollouts.items():
        severity = report.error if on_this_machine and name in loaded else report.warning
        if rollout.recorded:
            continue
        if rollout.python:
            if shutil.which(rollout.python) is None:
                where = f"rollouts.{name}.python"
                cure = "give the path of the interpreter that has the program's packages"
                got = f"{rollout.python!r}: no such program"
                severity("rollouts", where, want="a Python interpreter", got=got, cure=cure)
            continue
        for setting, path in _imports(rollout):
            if reason := _absent(path, kind="slime" if rollout.use.startswith(OF_SLIME) else "any"):
                where = f"rollouts.{name}.{setting}"
                got = f"{path!r}: {reason}"
                severity("rollouts", where, want="a program that can be imported", got=got, cure=FIX_MODULE)


def _imports(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting of a rollout that names a module, or a name in it (``module:name``), and this path."""
    yield "use", rollout.use.partition(":")[2] if rollout.use.startswith(PROGRAMS) else rollout.module
    if rollout.use != MULTI_TURN:
        return
    tools = rollout.options.get("tools")
    uses = [tool.get("use") if isinstance(tool, dict) else tool for tool in (tools if isinstance(tools, list) else ())]
    named = [(f"options.tools[{place}]", use) for place, use in enumerate(uses)]
    named.append(("options.environment", rollout.options.get("environment")))
    yield from ((setting, use) for setting, use in named if isinstance(use, str) and ":" in use)


def _absent(path: str, *, kind: str) -> str:
    if ":" in path:
        return defect(path, kind=kind)
    try:
        with errors_as(lambda error: ValueError(described(error))):
            return "" if importlib.util.find_spec(path) else "no such module"
    except ValueError as error:
        return str(error)


def check_filters(report: Report, config: RunConfig) -> None:
    """Load every filter with its options, as the feeder does."""
    for chosen in config.data.filters.values():
        settings = (f"data.filters.{chosen.name}.use", f"data.filters.{chosen.name}.options")
        with _refusals(report, "filters", chosen.use, settings, "a filter that can be loaded", report.error):
            bind(chosen.use, chosen.options, contract_of(chosen))
            report.good("filters", f"{chosen.name}: {chosen.use} loaded")


def _check_one(
    report: Report,
    name: str,
    options: JsonObject,
    row: PromptRow | None,
    *,
    settings: tuple[str, str],
    on_this_machine: bool,
    call: bool,
) -> None:
    if name == BY_ROLLOUT:
        report.good("reward", "none needed: every episode gets its reward from its rollout, or fails")
        return
    if not name:
        want = f"a reward: one of {', '.join(sorted(TABLE))}, or an import path module:function"
        report.error("reward", settings[0], want=want, got="none", cure="set, for example, actor: {reward: exact}")
        return
    severity = report.error if on_this_machine or (":" not in name and name not in SANDBOXED) else report.warning
    score = None
    with _refusals(report, "reward", name, settings, "a reward that can be loaded", severity):
        score = load(name, options)
    if score is None:
        return
    if row is not None and (call or (name in TABLE and name not in ASKING)):
        _call(report, name, options, score, row, where=settings[0])
    else:
        reason = "--check-reward calls it once" if row is not None else "none of the rows read is for it"
        report.good("reward", f"{name} loaded, not called ({reason})")


def _call(report: Report, name: str, options: JsonObject, score: Scorer, row: PromptRow, *, where: str) -> None:
    """Score the label as the response; a reward by import path in a child, as in an actor: it may end its process."""
    if name in COMPARING and not _is_answer(row.label, many=name in SEVERAL):
        kinds = ((list, "list"), (dict, "map"))
        kind = next((word for kind, word in kinds if isinstance(row.label, kind)), None) or json.dumps(row.label)
        want = f"a text or a number under {report.at('data.label_key')}, which {name} compares responses with"
        cure = "name the key that holds the answer, or use a reward of your own"
        report.error("reward", f"row {row.number + 1} of data.path", want=want, got=f"a {kind}", cure=cure)
        return
    request = RewardRequest(
        prompt=row.prompt, response=str(row.label), label=row.label, status=Status.COMPLETED, metadata=row.metadata
    )
    try:
        got = asyncio.run(_in_child(name, options, request) if ":" in name else _within(score, request))
    except (RewardFailed, TimeoutError) as error:  # an actor would store the sample as failed
        reason = f"no answer in {CALL_S:g} s" if isinstance(error, TimeoutError) else error.reason
        want = f"a number for row {row.number + 1} of data.path with its label as the response"
        report.error("reward", where, want=want, got=reason, cure=f"fix {name}")
        return
    report.good("reward", f"{name}: the label of row {row.number + 1} as the response is worth {got}")


async def _in_child(name: str, options: JsonObject, request: RewardRequest) -> float | dict[str, float]:
    async with opened(name, options, ProcessLimits(timeout_s=CALL_S, workers=1)) as score:
        return await score(request)


async def _within(score: Scorer, request: RewardRequest) -> float | dict[str, float]:
    async with asyncio.timeout(CALL_S):
        return await score(request)


def _is_answer(label: object, *, many: bool) -> bool:
    if many and isinstance(label, list):
        return all(_is_answer(item, many=False) for item in label)
    return isinstance(label, str | int | float)


def check_algorithm(report: Report, config: RunConfig) -> None:
    """Load functions and hooks given as import paths, and compare them with their call; warn of bad clip ranges."""
    _doubt_gspo(report, config)
    algorithm, hooks = config.learner.algorithm, config.learner.hooks.given
    functions: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]
    functions = [(f"algorithm.{name}", attrgetter(name)(algorithm), OWN_ARGUMENTS[name], ()) for name in OWN_SETTINGS]
    functions.append(("algorithm.advantage", algorithm.advantage, OWN_ARGUMENTS["advantage"], OFFERED))
    rules = algorithm.reject.functions
    functions += [("algorithm.reject.rules", path, OWN_ARGUMENTS["reject.rules"], ()) for path in rules]
    functions += [(f"hooks.{name}", path, HOOK_ARGUMENTS, ()) for name, path in hooks.items()]
    for name, path, arguments, offered in functions:
        if ":" in path:
            signature = ", ".join([*arguments, *(["*", *offered] if offered else [])])
            page = "docs/extending.md" if name.startswith("hooks.") else "docs/algorithms.md"
            reason = defect(path, arguments, offered)
            _report_code(report, "algorithm", f"learner.{name}", path, reason, f"a function ({signature})", page)


def check_bridge(report: Report, config: RunConfig) -> None:
    """Load the class of ``learner.bridge`` and the rules of ``learner.family``; the ranks check what they are."""
    if path := config.learner.bridge:
        reason, want = defect(path, kind="class"), "a class of LocalLayers"
        _report_code(report, "model", "learner.bridge", path, reason, want, "docs/models.md")
    if path := config.learner.family:
        _report_code(report, "model", "learner.family", path, defect(path, kind="any"), "a Family", "docs/families.md")


def _report_code(report: Report, topic: str, setting: str, path: str, reason: str, want: str, page: str) -> None:
    if reason:
        cure = f"fix it; modules are searched in this directory and in PYTHONPATH ({page} has the contract)"
        report.error(topic, setting, want=want, got=f"{path!r}: {reason}", cure=cure)
    else:
        report.good(topic, f"{setting}: {path} is there")


def _doubt_gspo(report: Report, config: RunConfig) -> None:
    """Warn of anchors, ranges and aggregations that do not suit GSPO. Source: docs/algorithms.md, section 3.11."""
    algorithm, name = config.learner.algorithm, "learner.algorithm"
    assert algorithm.clip.high is not None
    if algorithm.loss not in ("gspo", "gspo_token"):
        return
    if algorithm.anchor == "rollout" and algorithm.clip.high < GSPO_WIDE:
        cure = f"use anchor: proximal, as in correction: {algorithm.loss}"
        got = f"clip.high {algorithm.clip.high} at anchor: rollout"
        want = "gspo anchored at the proximal policy: against mu, noise alone is larger than this range"
        report.warning("algorithm", f"{name}.anchor", want=want, got=got, cure=cure)
    elif algorithm.anchor == "proximal" and algorithm.clip.high > GSPO_WIDE:
        want = "about 3e-4 and 4e-4: the ratio of a response moves far less than that of a token"
        got = f"{algorithm.clip.low} and {algorithm.clip.high}"
        cure = f"use correction: {algorithm.loss}, or set clip.low and clip.high"
        report.warning("algorithm", f"{name}.clip.high", want=want, got=got, cure=cure)
    if algorithm.aggregation != "seq_mean_token_mean" and algorithm.correction != "luspo":
        want = "seq_mean_token_mean with gspo: every response counts the same"
        cure = f"use correction: {algorithm.loss}, or set it"
        got = str(algorithm.aggregation)
        report.warning("algorithm", f"{name}.aggregation", want=want, got=got, cure=cure)
