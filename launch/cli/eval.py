"""``tidemill eval``: the scores of a model on held-out prompts, without a learner; ``tidemill texts``: responses of
the first and the last evaluated version to held-out prompts, side by side.

    bus -> engines (version 0: the model) and actors -> tasks of kind eval -> samples -> scores -> all of them end

Prompts, rewards, sampling and seeds are the same as in the evaluation beside training
(``learner/evaluation/evaluations.py``), so a checkpoint gets the scores here that its version got there, as far as
engines give the same tokens.
"""

import argparse
import asyncio
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.bus.streams.bus import Bus, connect, raise_epoch
from tidemill.bus.system.coroutines import cancellable, first_of
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.messages import Dead, Evaluated, Kind, Sample, Sampling, Status, Task
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli.arguments import add_run, refuse_no_model
from tidemill.launch.cli.find_run import look
from tidemill.launch.cli.inputs import loaded_config, with_fetched
from tidemill.launch.run import access, feeder_process, summary
from tidemill.launch.run.bus_process import BUS_START_S, start_bus
from tidemill.launch.run.summary import scores_in_words, scores_line
from tidemill.launch.run.supervisor import Supervisor
from tidemill.launch.samples.filters import Filter, prompt_text
from tidemill.launch.samples.search import SampleSearch
from tidemill.launch.samples.text import plain, reward_colour, shortened, to_json
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import Loaded, render, to_map
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.hub_names import DATASET, MODEL, parse
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.launch.settings.run_paths import config_file, recorded
from tidemill.learner.buffer.failures import UNTRAINED_SHARE, FailingTasks
from tidemill.learner.evaluation.evaluations import EvalPlan, Evaluations
from tidemill.learner.evaluation.rounds import MARK
from tidemill.weightstore.store.registry import VersionRegistry

log = logging.getLogger(__name__)


OPEN_TASKS = 256  # Prompts that are out at a time, where no training needs the engines
_SIZE = (6, 300)  # Lines and characters of a text that is shortened


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="runs/<run>/final, another directory, or org/name")
    data = "prompt file or org/name; default: eval.sets"
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA", help=data)
    parser.add_argument("--config", type=config_file, nargs="+", default=[], help="a run's YAML file, with eval.sets")
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting")
    parser.add_argument("--reward", default="", metavar="NAME", help="actor.reward: a name, or package.module:function")
    parser.add_argument("--samples", type=int, metavar="K", help="with DATA: responses to each prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="with DATA: 0 = greedy")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="with DATA: only the first N prompts")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where logs and samples are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each set")
    parser.add_argument("--print-config", action="store_true", help="print every setting and its origin, and end")


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the scores. Returns 0, 1 when a response is missing, or 75 when it was ended before."""
    with _directory(args.dir) as directory:
        args.set = [*settings(args, directory), *args.set]
        loaded = loaded_config(args)
        if args.print_config:
            print(render(loaded), end="")
            return 0
        require("engine")
        loaded, _ = with_fetched(args, loaded)
        check(loaded, Purpose(trains=False)).refuse()
        return _evaluated(loaded, as_json=args.json)


def settings(args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the settings that the arguments stand for. Raises ValueError for options of DATA without DATA."""
    model = args.model if parse(MODEL, str(args.model)) else args.model.resolve()
    if model.is_absolute():
        refuse_no_model("MODEL", args.model)
    given = {name: getattr(args, name) for name in ("samples", "temperature", "limit")}
    options = {name: value for name, value in given.items() if value is not None}
    if args.data is None and options:
        raise ValueError(f"--{next(iter(options))}: want it with DATA; without, change eval.sets of --config")
    if args.data is None and not args.config:
        raise ValueError("want DATA, a file of prompts, or --config with eval.sets")
    words = [
        *("run=eval", f"directory={directory}", "prepare=null", f"model.path={model}", "learner.colocated=false"),
        *("eval.every=1", "eval.stop_after=0", f"eval.max_open_tasks={OPEN_TASKS}"),
        'eval.best=""',  # one version has no other to be compared with, and DATA replaces the sets
        *("actor.scorers.enabled=false", "up.scorers=0", 'bus.url=""', "bus.cluster=1", "bus.auth=false"),
    ]
    if args.data is not None:
        data = args.data if parse(DATASET, str(args.data)) else args.data.resolve()
        name = re.sub("[^A-Za-z0-9_-]", "-", args.data.stem)[:40] or "data"
        sets = {name: {"path": str(data), **options}}
        words += [f"eval.sets={json.dumps(sets)}"]
    return words + ([f"actor.reward={args.reward}"] if args.reward else [])


@contextmanager
def _directory(directory: Path | None) -> Iterator[Path]:
    """Yield an empty directory for logs and the bus: ``--dir``, or one that is removed. Raises ValueError."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="tidemill-eval-") as temporary:
            yield Path(temporary)
        return
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"--dir: want an empty directory, got {str(directory)!r}, which is not empty")
    yield directory.resolve()


def _evaluated(loaded: Loaded, *, as_json: bool) -> int:
    from tidemill.bus.wire.messages import Evaluated
    from tidemill.launch.run import process

    records: list[Evaluated] = []

    async def body(draining: asyncio.Event) -> None:
        records.extend(await evaluate(loaded.config, draining))

    process.set_up_logging("eval", level=logging.WARNING)
    code = process.run(body, drain_s=loaded.config.up.drain_s * 3)
    for record in records:
        line = scores_line(record)
        print(json.dumps(line) if as_json else _block(line))
    if code or not records:
        return code or process.NOT_IN_TIME
    return int(any(record.metrics["missing"] > 0 for record in records))


def _block(line: dict[str, object]) -> str:
    hidden = ("version", "step", "set", "versions_later", "versions_later_min")
    shown = {name: value for name, value in line.items() if name not in hidden}
    rows = [f"  {name:<18} {f'{value:.6g}' if isinstance(value, float) else value}" for name, value in shown.items()]
    return "\n".join([scores_in_words(line).removesuffix(" (version 0)"), *rows])


Pair = tuple[Sample, Sample]  # Responses of two versions to one prompt


def add_texts(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--set", default="", metavar="NAME", help="evaluation set; default: the first one by name")
    parser.add_argument(
        "--count", type=int, default=10, metavar="N", help="prompts, evenly spaced (default 10; 0 = all)"
    )
    parser.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per prompt")


def run_texts(args: argparse.Namespace) -> int:
    """Print the responses of both versions. Returns 0, or 1 where fewer than two versions have responses."""
    return look(args, show_texts)


async def show_texts(bus: Bus, args: argparse.Namespace) -> int:
    """Print pairs of responses, and the means of the reward and its parts. Raises ValueError for an unknown set."""
    responses = await responses_by_version(bus)
    name = args.set or min(responses, default="")
    if name not in responses:
        names = ", ".join(responses) or "none"
        raise ValueError(f"--set: want an evaluated set with responses ({names}), got {name!r}")
    versions = sorted(responses[name])
    first, last = (responses[name][version] for version in (versions[0], versions[-1]))
    pairs = [(first[row], last[row]) for row in sorted(first.keys() & last.keys())]
    shown = evenly_spaced(pairs, args.count) if args.count else pairs
    if args.json:
        for before, after in shown:
            print(to_json(_as_map(before, after)))
    else:
        console = Console(highlight=False)
        console.print(_table(shown, f"version {versions[0]}", f"version {versions[-1]}"))
        console.print(_means(pairs), markup=False)
    return int(len(versions) < 2)


def evenly_spaced(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Return ``count`` pairs, the first and the last among them.

    A constant step would show only some kinds of prompts where kinds take turns: every sixth of four kinds, two.
    """
    last = len(pairs) - 1
    return [pairs[number * last // max(1, count - 1)] for number in range(count)] if count <= last else list(pairs)


async def responses_by_version(bus: Bus) -> dict[str, dict[int, dict[int, Sample]]]:
    """Return the first response to each row, by set and version."""
    search = SampleSearch(bus, Filter(kind=Kind.EVAL))
    responses: dict[str, dict[int, dict[int, Sample]]] = {}
    async for stored in search.forward(1, (await search.history.state()).last_seq):
        if not isinstance(sample := stored.sample, Sample):
            continue
        match sample.metadata.get(MARK):
            case {"set": str(name), "version": int(version), "row": int(row)}:
                responses.setdefault(name, {}).setdefault(version, {}).setdefault(row, sample)
    return responses


def _table(pairs: Sequence[Pair], *headers: str) -> Table:
    table = Table(show_lines=True, header_style="dim")
    for header in ("prompt", *headers):
        table.add_column(header, ratio=1)
    for before, after in pairs:
        prompt = before.prompt if isinstance(before.prompt, str) else str(before.prompt[-1].get("content", ""))
        table.add_row(Text(plain(shortened(prompt, *_SIZE)), style="dim"), _response(before), _response(after))
    return table


def _response(sample: Sample) -> Text:
    text = Text(plain(shortened(sample.response, *_SIZE)))
    return text.append(f"  {sample.score:.2f}", style=reward_colour(sample.score))


def _means(pairs: Sequence[Pair]) -> str:
    """Return the means of the reward and its parts, before and after, over all prompts."""
    columns = [[_parts(sample) for sample in side] for side in zip(*pairs, strict=True)]
    means = [
        f"{name} {' -> '.join(f'{sum(parts.get(name, 0.0) for parts in side) / len(side):.3f}' for side in columns)}"
        for name in (columns[0][0] if columns else ())
    ]
    return f"{len(pairs)} prompts: {', '.join(means)}"


def _parts(sample: Sample) -> Mapping[str, float]:
    return sample.reward if isinstance(sample.reward, dict) else {"score": sample.score}


def _as_map(before: Sample, after: Sample) -> dict[str, object]:
    rewards = {"reward_before": dict(_parts(before)), "reward_after": dict(_parts(after))}
    return {"prompt": prompt_text(before), "before": before.response, "after": after.response, **rewards}


async def evaluate(config: RunConfig, draining: asyncio.Event) -> list[Evaluated]:
    """Return the scores of ``config.model.path`` on each of ``config.eval.sets``; none if drained first."""
    write_whole(config.root / CONFIG_FILE, yaml_file.dump(recorded(to_map(config))))
    supervisor = Supervisor(config.root / "logs", restarts=config.up.restarts, window_s=config.up.restart_window_s)
    plan = await asyncio.to_thread(_plan, config)
    try:
        url = await start_bus(config, supervisor)
        address = access.own_address(config, url)
        async with connect(address, config.run, config.bus, name="eval", wait_s=BUS_START_S) as bus:
            await bus.create_layout()
            for role, count in (("engine", config.up.engines), ("actor", config.up.actors)):
                for name in (f"{role}-{number}" for number in range(count)):
                    words = ["--config", str(config.root / CONFIG_FILE), "--bus", url, "--id", name]
                    supervisor.keep(name, [role, *words])
            evaluating = asyncio.create_task(_scores(bus, plan, config), name="evaluation")
            try:
                await first_of(asyncio.shield(evaluating), supervisor.failed(), draining.wait())
                return evaluating.result() if evaluating.done() else []
            finally:
                evaluating.cancel()
                await asyncio.gather(evaluating, return_exceptions=True)
    finally:
        for role in ("actor", "engine", "bus"):
            await supervisor.end(supervisor.names(role), within_s=config.up.drain_s)


def _plan(config: RunConfig) -> EvalPlan:
    _, max_context = feeder_process.model_shape(Path(config.model.path))
    return feeder_process.eval_plan(config, Sampling(**asdict(config.sampling)), max_context)


async def _scores(bus: Bus, plan: EvalPlan, config: RunConfig) -> list[Evaluated]:
    """Take the learner's place on the bus: publish version 0, issue tasks, read samples. Raises TasksFail."""
    epoch = await raise_epoch(bus)
    await bus.plans.fence(epoch)
    await bus.tasks.fence(epoch)
    registry = VersionRegistry(bus)
    await registry.fence(epoch)
    await registry.publish_initial(config.model.path, epoch)

    async def store(task: Task) -> Task:
        return replace(task, id=await bus.tasks.issue(task))

    rounds = await asyncio.to_thread(plan.rounds)
    evaluations = Evaluations(bus, plan, rounds, epoch=epoch, store=store)
    evaluations.published(0, 0)
    failing = FailingTasks()

    async def read() -> None:
        async for received in bus.samples.read(None, kinds=(Kind.EVAL,)):
            if isinstance(received.sample, Sample):
                evaluations.arrived(received.sample)
                if received.sample.status is not Status.FAILED:
                    failing.completed()

    async def follow_dead() -> None:
        async for _, letter in bus.dead.follow():
            if isinstance(letter, Dead):
                evaluations.gone(letter)
                failing.died(letter)
                failing.refuse(config.learner.failing_tasks, config.learner.failing_s * UNTRAINED_SHARE)

    await first_of(evaluations.over(), *(cancellable(loop) for loop in (evaluations.run(), read(), follow_dead())))
    return [record for _, record in sorted((await summary.read_scores(bus)).items())]
