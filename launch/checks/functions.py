"""Checks of the user's own code: the reward, loaded with its options; losses, advantages, hooks and bridges, by their
source.

Modules of losses are not imported: they may load torch.
"""

import ast
import asyncio
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from tidemill.actors.rollout_settings import MULTI_TURN, RolloutConfig, served
from tidemill.bus.processes.limits import ProcessLimits
from tidemill.bus.system.foreign import described, errors_as
from tidemill.bus.system.functions import FunctionRefused, check_call, find_function
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Status
from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.algorithms.choices import OFFERED
from tidemill.learner.filters.buffer_filters import contract_of
from tidemill.learner.prompts.rows import PromptRow
from tidemill.rewards.errors import BadRewardOption, RewardFailed, RewardNotImported, UnknownReward
from tidemill.rewards.group import GROUP
from tidemill.rewards.part_settings import BY_ROLLOUT
from tidemill.rewards.port import RewardRequest, Scorer
from tidemill.rewards.registry import ASKING, COMPARING, SANDBOXED, SEVERAL, TABLE, bind, load
from tidemill.rewards.scorers import opened

FIX_MODULE = "fix the name or the module; modules are searched in this directory and in PYTHONPATH"
CALL_S = 10.0
"""Time limit in seconds of the one call of a reward by import path, with --check-reward."""
PROGRAMS = ("agent:", "slime:")
"""Beginnings of ``use`` with a module and a name in it."""
GSPO_WIDE = 0.01
"""A clip range of GSPO's ratio that is wider than this belongs to another loss."""
CONTRACTS = {
    "loss": (4, (), "(log_probs_T, anchor_T, tokens, config)"),
    "advantage": (2, OFFERED, f"(rewards_N, groups_N, *, {', '.join(OFFERED)})"),
    "weight.level": (4, (), "(delta_T, mask_T, sequence_T, num_sequences)"),
    "aggregation": (3, (), "(mask_T, sample_T, denominators)"),
    "reject.rules": (4, (), "(delta_T, mask_T, sequence_T, num_sequences)"),
}
HOOK: tuple[int, tuple[str, ...], str] = (1, (), "(moment)")
"""Number of positional arguments that the learner passes, named ones that a function may ask for, and the signature in
messages.
"""

_FOLLOWED = 8
"""Imports that are followed from one module to the next."""


def check_reward(report: Report, config: RunConfig, rows: Sequence[PromptRow], *, here: bool, call: bool) -> None:
    """Load the reward with its options, and score the first of ``rows`` that is for it, if the reward is built in or
    ``call`` is set.

    ``here``: the processes that compute it, actors or scorers, run on this machine. If none does, a missing module is a
    warning: it may be on their machines.
    """
    if config.samples_nothing:
        report.good("reward", "none needed: all samples are recorded responses")
        return
    if config.actor.scorers.enabled and not config.up.scorers:
        want, cure = (
            "scorers",
            "start some: tidemill scorer --bus URL, or tidemill host ... scorers=N; or set up.scorers",
        )
        report.warning("reward", report.at("actor.scorers.enabled"), want=want, got="up.scorers: 0", cure=cure)
    scored = [row for row in rows if row.rollout not in config.recorded_rollouts]
    if config.actor.group_reward:
        _check_group(report, config, here=here)
    for part in config.actor.reward_parts.values():
        row = next((row for row in scored if part.applies(row.metadata)), None)
        settings = (f"actor.reward_parts.{part.name}", f"actor.reward_parts.{part.name}.options")
        _check_one(report, part.reward, dict(part.options), row, settings=settings, here=here, call=call)
    if config.actor.reward_parts or (config.actor.group_reward and not config.actor.reward):
        return
    settings, row = ("actor.reward", "actor.reward_options"), next(iter(scored), None)
    _check_one(report, config.actor.reward, config.actor.reward_options, row, settings=settings, here=here, call=call)


def _check_group(report: Report, config: RunConfig, *, here: bool) -> None:
    name = config.actor.group_reward
    try:
        bind(name, config.actor.group_reward_options, GROUP)
    except BadRewardOption as error:
        where = report.at(f"actor.group_reward_options.{error.option}")
        report.error("reward", where, want=f"an option of {name}", got=error.reason, cure="fix it, or remove it")
    except UnknownReward as error:
        severity = report.error if here or ":" not in name else report.warning
        want = "a reward of groups that can be loaded"
        severity("reward", report.at("actor.group_reward"), want=want, got=f"{name!r}: {error.reason}", cure=FIX_MODULE)
    else:
        report.good("reward", f"{name} loaded, not called")


def check_rollouts(report: Report, config: RunConfig, *, here: bool) -> None:
    """Find the interpreter, the module and the name of every rollout, without loading it. ``here``: actors run on this
    machine.
    """
    rollouts = config.rollouts
    loaded = served(rollouts, config.actor.rollouts)
    for name, rollout in rollouts.items():
        severity = report.error if here and name in loaded else report.warning
        if rollout.recorded:
            continue
        if rollout.python:
            if shutil.which(rollout.python) is None:
                where, cure = (
                    report.at(f"rollouts.{name}.python"),
                    "give the path of the interpreter that has the program's packages",
                )
                severity(
                    "rollouts",
                    where,
                    want="a Python interpreter",
                    got=f"{rollout.python!r}: no such program",
                    cure=cure,
                )
            continue
        for setting, path in _imports(rollout):
            if reason := _absent(path):
                where, cure = (
                    report.at(f"rollouts.{name}.{setting}"),
                    "fix the name; modules are searched in this directory and in PYTHONPATH",
                )
                severity("rollouts", where, want="a program that can be imported", got=f"{path!r}: {reason}", cure=cure)


def _imports(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting of a rollout that names a module, or a name in it (``module:name``), and this path."""
    yield "use", rollout.use.partition(":")[2] if rollout.use.startswith(PROGRAMS) else rollout.module
    if rollout.use != MULTI_TURN:
        return
    tools = rollout.options.get("tools")
    uses = [tool.get("use") if isinstance(tool, dict) else tool for tool in (tools if isinstance(tools, list) else ())]
    named = [
        *((f"options.tools[{place}]", use) for place, use in enumerate(uses)),
        ("options.environment", rollout.options.get("environment")),
    ]
    yield from ((setting, use) for setting, use in named if isinstance(use, str) and ":" in use)


def _absent(path: str) -> str:
    """Return the reason that a module, or ``module:name``, cannot be imported; empty if none is known. The packages
    above are imported.
    """
    try:
        with errors_as(lambda error: ValueError(described(error))):
            if not importlib.util.find_spec(path.partition(":")[0]):
                return "no such module"
            return missing(path) if ":" in path else ""
    except ValueError as error:
        return str(error)


def check_filters(report: Report, config: RunConfig) -> None:
    """Load every filter with its options, as the feeder does."""
    for chosen in config.data.filters.values():
        setting = f"data.filters.{chosen.name}"
        try:
            bind(chosen.use, chosen.options, contract_of(chosen))
        except BadRewardOption as error:
            where = report.at(f"{setting}.options.{error.option}")
            report.error(
                "filters", where, want=f"an option of {chosen.use}", got=error.reason, cure="fix it, or remove it"
            )
        except UnknownReward as error:
            want, got = "a filter that can be loaded", f"{chosen.use!r}: {error.reason}"
            report.error("filters", report.at(f"{setting}.use"), want=want, got=got, cure=FIX_MODULE)
        else:
            report.good("filters", f"{chosen.name}: {chosen.use} loaded")


def _check_one(
    report: Report,
    name: str,
    options: JsonObject,
    row: PromptRow | None,
    *,
    settings: tuple[str, str],
    here: bool,
    call: bool,
) -> None:
    where = report.at(settings[0])
    if name == BY_ROLLOUT:
        report.good("reward", "none needed: every episode gets its reward from its rollout, or fails")
        return
    if not name:
        want = f"a reward: one of {', '.join(sorted(TABLE))}, or an import path module:function"
        report.error("reward", where, want=want, got="none", cure="set, for example, actor: {reward: exact}")
        return
    try:
        score = load(name, options)
    except RewardNotImported as error:
        report.error("reward", where, want=f"{name} imported", got=error.reason, cure="fix the module")
        return
    except UnknownReward as error:
        severity = report.error if here or (":" not in name and name not in SANDBOXED) else report.warning
        cure = "fix the name; modules are searched in this directory and in PYTHONPATH"
        severity("reward", where, want="a reward that can be loaded", got=f"{name!r}: {error.reason}", cure=cure)
        return
    except BadRewardOption as error:
        option = f"{settings[1]}.{error.option}"
        report.error(
            "reward", report.at(option), want=f"an option of {name}", got=error.reason, cure="fix it, or remove it"
        )
        return
    if row is not None and (call or (name in TABLE and name not in ASKING)):
        _call(report, name, options, score, row, where=where)
    else:
        reason = "--check-reward calls it once" if row is not None else "none of the rows read is for it"
        report.good("reward", f"{name} loaded, not called ({reason})")


def _call(report: Report, name: str, options: JsonObject, score: Scorer, row: PromptRow, *, where: str) -> None:
    """Score the label itself as the response; a reward by import path in a child, as in an actor: it may end its
    process.
    """
    if name in COMPARING and not _is_answer(row.label, many=name in SEVERAL):
        kind = (
            "list" if isinstance(row.label, list) else "map" if isinstance(row.label, dict) else json.dumps(row.label)
        )
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
    """Resolve functions and hooks given as import paths, without importing them (that would load torch); warn of bad
    clip ranges.
    """
    _doubt_gspo(report, config)
    algorithm = config.learner.algorithm
    functions = [
        (f"algorithm.{path}", attrgetter(path)(algorithm), contract)
        for path, contract in CONTRACTS.items()
        if path != "reject.rules"
    ]
    functions += [("algorithm.reject.rules", path, CONTRACTS["reject.rules"]) for path in algorithm.reject.functions]
    functions += [(f"hooks.{name}", path, HOOK) for name, path in config.learner.hooks.given.items()]
    for name, path, (count, offered, signature) in functions:
        if ":" not in path:
            continue
        try:
            reason = misfit(path, count, offered)
        except (ImportError, ValueError, SyntaxError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        setting = f"learner.{name}"
        if reason:
            page = "docs/extending.md" if name.startswith("hooks.") else "docs/algorithms.md"
            cure = f"fix it; modules are searched in this directory and in PYTHONPATH ({page} has the contract)"
            report.error(
                "algorithm", report.at(setting), want=f"a function {signature}", got=f"{path!r}: {reason}", cure=cure
            )
        else:
            report.good("algorithm", f"{setting}: {path} is there")


def check_bridge(report: Report, config: RunConfig) -> None:
    """Look for the class of ``learner.bridge`` in the source of its module, without importing it (that would load
    torch).
    """
    path = config.learner.bridge
    if not path:
        return
    try:
        reason = misfit_class(path)
    except (ImportError, ValueError, SyntaxError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        cure = "fix it; modules are searched in this directory and in PYTHONPATH (docs/models.md has the contract)"
        report.error(
            "model", report.at("learner.bridge"), want="a class of LocalLayers", got=f"{path!r}: {reason}", cure=cure
        )
    else:
        report.good("model", f"learner.bridge: {path} is there")


def _doubt_gspo(report: Report, config: RunConfig) -> None:
    """Warn of anchors, ranges and aggregations that do not suit GSPO. Source: docs/algorithms.md, section 3.11."""
    algorithm, name = config.learner.algorithm, "learner.algorithm"
    assert algorithm.clip.high is not None
    if algorithm.loss not in ("gspo", "gspo_token"):
        return
    if algorithm.anchor == "rollout" and algorithm.clip.high < GSPO_WIDE:
        cure, got = (
            f"use anchor: proximal, as in correction: {algorithm.loss}",
            f"clip.high {algorithm.clip.high} at anchor: rollout",
        )
        want = "gspo anchored at the proximal policy: against mu, noise alone is larger than this range"
        report.warning("algorithm", report.at(f"{name}.anchor"), want=want, got=got, cure=cure)
    elif algorithm.anchor == "proximal" and algorithm.clip.high > GSPO_WIDE:
        want = "about 3e-4 and 4e-4: the ratio of a response moves far less than that of a token"
        got, cure = (
            f"{algorithm.clip.low} and {algorithm.clip.high}",
            f"use correction: {algorithm.loss}, or set clip.low and clip.high",
        )
        report.warning("algorithm", report.at(f"{name}.clip.high"), want=want, got=got, cure=cure)
    if algorithm.aggregation != "seq_mean_token_mean" and algorithm.correction != "luspo":
        want, cure = (
            "seq_mean_token_mean with gspo: every response counts the same",
            f"use correction: {algorithm.loss}, or set it",
        )
        report.warning(
            "algorithm", report.at(f"{name}.aggregation"), want=want, got=str(algorithm.aggregation), cure=cure
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """The statement that defines a name."""

    module: str
    name: str
    node: ast.stmt


def misfit(path: str, count: int, offered: Sequence[str]) -> str:
    """Return the defect of the function at ``module:function``; empty if its source shows none.

    ``count``: its positional arguments; ``offered``: arguments that it may ask for by name.
    Raises ImportError, ValueError, SyntaxError, OSError for a module that cannot be read.
    """
    definition = _definition(*_parts(path))
    if isinstance(definition, str):
        return definition
    if definition is None:
        return _misfit_here(path, count, offered)
    match definition.node:
        case ast.FunctionDef(args=arguments):
            return _unlike(arguments, count, offered)
        case ast.AsyncFunctionDef():
            return "an async function"
        case ast.ClassDef():
            return "a class"
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return _misfit_value(value, count, offered)
    return ""


def missing(path: str) -> str:
    """Return the reason that there is nothing at ``module:name``; empty if there is, or no source shows it. Raises as
    ``misfit``.
    """
    definition = _definition(*_parts(path))
    return definition if isinstance(definition, str) else ""


def misfit_class(path: str) -> str:
    """Return the defect of the class at ``module:Class``; empty if its source shows none. Raises as ``misfit``."""
    definition = _definition(*_parts(path))
    if isinstance(definition, str):
        return definition
    match None if definition is None else definition.node:
        case None | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Assign(value=ast.Constant() | ast.Lambda()):
            return "no class"
    return ""


def _parts(path: str) -> tuple[str, str]:
    module, _, name = path.partition(":")
    return module, name


def _definition(module: str, name: str) -> _Found | str | None:
    """Return the statement that defines a name, behind the imports; else the defect, or None for a module without a
    source in Python.

    The empty text is returned for a name that may come from a star import.
    """
    for _ in range(_FOLLOWED):
        spec = importlib.util.find_spec(module)
        if spec is None:
            return f"no module {module}"
        if not spec.origin or not spec.origin.endswith(".py"):
            return None
        statements = list(_statements(ast.parse(Path(spec.origin).read_bytes()).body))
        nodes = [node for node in statements if name in _names(node)]
        if not nodes:
            has_star = any(
                isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
                for node in statements
            )
            return "" if has_star else f"{module} has no {name!r}"
        node = nodes[-1]
        if isinstance(node, ast.Import):
            return "a module"
        if not isinstance(node, ast.ImportFrom):
            return _Found(module, name, node)
        package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return ""


def _misfit_here(path: str, count: int, offered: Sequence[str]) -> str:
    """Import a module of Python's own that has no source, and compare; nothing is known of others."""
    if path.partition(":")[0].partition(".")[0] not in sys.stdlib_module_names:
        return ""
    try:
        check_call(
            find_function(path), [f"argument_{number}" for number in range(count)], offered, path=path, setting=""
        )
    except FunctionRefused as error:
        return error.reason
    return ""


def _misfit_value(value: ast.expr | None, count: int, offered: Sequence[str]) -> str:
    match value:
        case ast.Lambda(args=arguments):
            return _unlike(arguments, count, offered)
        case ast.Constant(value=constant):
            return f"{constant!r}, which is no function"[:80]
        case (
            ast.JoinedStr()
            | ast.List()
            | ast.Tuple()
            | ast.Dict()
            | ast.Set()
            | ast.ListComp()
            | ast.DictComp()
            | ast.SetComp()
        ):
            return "no function"
    return ""  # the result of a call, such as functools.partial: the ranks compare it


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module that run when it is imported, those within ``if``, ``try`` and ``with`` too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [handler.body for handler in node.handlers] if isinstance(node, ast.Try) else []
            orelse = [node.orelse] if isinstance(node, ast.If | ast.Try) else []
            last = [node.finalbody] if isinstance(node, ast.Try) else []
            for inner in (*handlers, *orelse, node.body, *last):
                yield from _statements(inner)
        else:
            yield node


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        yield from (
            part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )


def _unlike(arguments: ast.arguments, count: int, offered: Sequence[str]) -> str:
    """Return how a signature differs from the call; empty if it fits."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    takes = ", ".join([*positional, *(argument.arg for argument in arguments.kwonlyargs)]) or "nothing"
    named = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    needed = [*positional[count : len(positional) - len(arguments.defaults)], *named]
    called = f"it is called with {count} arguments" + (f", and may ask for {', '.join(offered)}" if offered else "")
    short = len(positional) < count and arguments.vararg is None
    return f"it takes {takes}; {called}" if short or not set(needed) <= set(offered) else ""
