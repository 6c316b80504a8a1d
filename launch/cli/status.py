"""``tidemill status``: the processes of a run and the state of its tasks and samples. It only reads."""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tidemill.actors.engines.address_checks import CURE, unreachable, verified
from tidemill.actors.serving.builtin.blocks import BLOCK
from tidemill.bus.client.jetstream import StreamState
from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.liveness import processes
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import WAIT, Cursors, shard_extents
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Done, Evaluated, Plan, Settle
from tidemill.bus.wire.rows import HistoryRow, LiveRow, Outcome
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.run import summary
from tidemill.launch.run.run_facts import Pace
from tidemill.launch.run.summary import SKIPPED
from tidemill.launch.samples.text import plain, plain_table
from tidemill.learner.debug.report import LOOKS
from tidemill.learner.feed.history import read_with_summary, shown_history

_FULL_READ_S = 10.0  # Seconds for the reads while the bus stores nothing
_MOST_NAMES = 6  # Largest number of fields, and of actors, of invalid samples that are named
# Beginnings of the names of metrics about episodes.
_OF_EPISODES = (
    *("data/episode", "data/turns_", "data/sequences_", "data/context_share", "data/budget_share/"),
    *("data/cut_", "data/overridden_", "data/malformed_"),
)


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Print the state of a run. Returns 0. Raises ValueError when it cannot be read."""
    return look(args, show_status)


async def show_status(bus: Bus, args: argparse.Namespace) -> int:
    """Print the processes of a run and the state of its tasks and samples; return 0, or 1 when they cannot be read."""
    console, reason = Console(highlight=False), await bus.full()
    if reason and not args.json:
        text = f"the bus stores nothing, the run waits: {reason}"
        console.print(text, style="bold red", markup=False, soft_wrap=True)
    try:
        async with asyncio.timeout(_FULL_READ_S if reason else None):
            status = await read_status(bus)
    except TimeoutError:  # servers of a cluster that cannot write give no answer to reads either
        print(json.dumps({"run": bus.run, "full": reason}) if args.json else "its streams cannot be read meanwhile")
        return 1
    if args.json:
        print(json.dumps(status))
    else:
        print_status(console, status)
    return 0


async def read_status(bus: Bus) -> JsonObject:
    """Return all values of ``status`` as plain maps, lists and numbers, as ``--json`` prints them."""
    rows = await processes(bus, look_s=1.5)
    state, (waiting, leased) = await bus.samples.info(), await bus.tasks.backlog()
    head, _ = await bus.rows("weights").read("head")
    plans = await read_with_summary(bus, lambda history: _read_plans(bus, history), shown_history)
    run_rows = bus.rows("run")
    metrics = plans.newest.metrics if plans.newest is not None else {}
    feeder = next((row.load for row, age in rows if row.role == "feeder" and not age), {})
    issued, alive = plans.removed_tasks + await _issued(bus, plans.tasks), [row for row, age in rows if not age]
    settled = plans.removed_tasks + len(plans.tasks)
    steps = steps_of((await run_rows.read("config"))[0])
    return {
        "run": bus.run,
        "step": plans.newest.step if plans.newest is not None else 0,
        "steps": steps,
        "left_s": plans.pace.left_s(steps) if steps else None,  # at the pace of the last steps; None = not known
        "planned": plans.planned,
        "minibatches_skipped": int(sum(plans.skipped.values())),
        "report_look": plans.report_look,
        "reward": metrics.get("data/reward_mean"),
        "evaluations": [summary.scores_line(record) for record in plans.evaluated.values()],
        "best": (await run_rows.read(subjects.BEST_KEY))[0],  # best version with a checkpoint, by `eval.best`
        "end": (await run_rows.read(subjects.END_KEY))[0],  # None while the run goes on
        "autoscale": (await bus.rows("wanted").read(subjects.AUTOSCALE_KEY))[0],
        "lag_mean": metrics.get("offpolicy/lag_mean"),
        "lag_max": metrics.get("offpolicy/lag_max"),
        "episodes": {name: value for name, value in metrics.items() if name.startswith(_OF_EPISODES)},
        "head": head if head and "version" in head else None,
        "tasks": {
            "issued": issued,
            "settled": settled,
            "open": issued - settled,
            "waiting": waiting,
            "leased": leased,
            "last_id": await bus.tasks.last_id(),
            "given_up": dict(sorted(plans.given_up.items())),
            "unserved": unserved(await bus.tasks.waiting(), alive),
        },
        "samples": _samples(state, plans, feeder),
        "cursors": await _cursors(bus),
        "processes": [_process(row, age, alive) for row, age in rows],
        "full": await bus.full(),  # why the bus stores nothing; empty while it does
        "unreadable": str(bus.refusals),
    }


async def _cursors(bus: Bus) -> JsonObject:
    """Return the places of the registered readers in the streams of samples that are there."""
    extents = await shard_extents(bus.jet)
    return {
        name: {"floor": place.floor, "behind": extents[place.created].behind(place.floor), "policy": place.policy}
        | {"given_up": place.given_up}
        for name, place in (await Cursors(bus).all()).items()
        if place.created in extents
    }


def releases_of(processes: Sequence[JsonMapping]) -> dict[str, list[str]]:
    """Return the names of the live processes by the release that they run."""
    names: dict[str, list[str]] = {}
    for row in processes:
        if not row["silent_s"]:
            names.setdefault(str(row["release"]), []).append(f"{row['role']} {row['id']}")
    return names


def unserved(waiting: Mapping[str, int], alive: Sequence[LiveRow]) -> dict[str, int]:
    """Return the numbers of tasks that wait and that no live actor leases, by rollout; none where the run has ended."""
    if not any(row.role in ("actor", "feeder") for row in alive):
        return {}
    actors = [row for row in alive if row.role == "actor"]
    named = {rollout or SINGLE_TURN: count for rollout, count in sorted(waiting.items())}
    return {
        name: count
        for name, count in named.items()
        if not any(name in row.rollouts or not row.rollouts for row in actors)
    }


def _samples(state: StreamState, plans: "_Plans", feeder: Mapping[str, float]) -> JsonObject:
    """Return the counts of samples. Those of a feeder are None while none reports."""
    of_feeder = {name: int(feeder[name]) if name in feeder else None for name in ("failed", "buffered", "invalid")}
    return {
        "first_seq": state.first_seq,
        "last_seq": state.last_seq,
        "messages": state.messages,
        "bytes": state.bytes,
        "trained": plans.trained,
        "dropped": dict(sorted(plans.dropped.items())),
        **of_feeder,
        "invalid_by_field": counts_under(feeder, "invalid"),
        "invalid_by_actor": counts_under(feeder, "invalid_of"),
        "refused": sorted(counts_under(feeder, "refused")),  # actors that send only invalid samples
    }


def _process(row: LiveRow, age_s: float, alive: Sequence[LiveRow]) -> JsonObject:
    """Return a live row as a map.

    ``verified``: a learner or router has reached it at its address (of engines alone). ``unreachable``: the processes
    that do not reach it there, each with its error.
    """
    names = ("role", "id", "host", "pid", "phase", "waits_for", "trouble", "version", "release")
    return {
        **{name: getattr(row, name) for name in names},
        "silent_s": round(age_s, 1),
        "address": row.address,
        "load": row.load,
        "capabilities": asdict(row.capabilities),
        "unreadable": row.unreadable,
        "nonce": row.nonce,
        "verified": verified(row.nonce, alive),
        "unreachable": unreachable(row.nonce, alive),
    }


@dataclass(slots=True)
class _Plans:
    """Counts from all records of PLAN so far."""

    planned: int = 0
    newest: Done | None = None
    tasks: set[int] = field(default_factory=set)  # Settled tasks: trained or given up
    removed_tasks: int = 0  # Number of settled tasks whose records are removed
    trained: int = 0  # Number of trained samples
    # Number of samples given up with their tasks, by reason; FAILED ones are in no record.
    dropped: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)  # Number of tasks given up, by reason
    # Number of minibatches with a loss or gradients that were not finite, by step.
    skipped: dict[int, float] = field(default_factory=dict)
    report_look: dict[int, int] = field(default_factory=dict)
    evaluated: dict[str, Evaluated] = field(default_factory=dict)  # Newest scores of each evaluation set
    pace: Pace = field(default_factory=Pace)


async def _read_plans(bus: Bus, history: HistoryRow) -> _Plans:
    removed_to = 0 if history.removed is None else history.removed.seq
    plans = _Plans(
        removed_tasks=history.trained_tasks + sum(history.given_up.values()),
        trained=history.trained,
        dropped=Counter(history.dropped),
        given_up=Counter(history.given_up),
        skipped={0: history.skipped},
    )
    async for seq, stored_s, record in bus.plans.stamped(follow=False):
        if seq <= removed_to and not isinstance(record, Evaluated):
            continue  # counted in the history, and about to be removed
        if isinstance(record, Plan):
            plans.planned = record.step
            plans.tasks.update(record.tasks.tolist())
            plans.trained += len(record.seqs)
        elif isinstance(record, Settle):
            plans.tasks.update(record.tasks.tolist())
            plans.given_up[record.reason] += len(record.tasks)
            if len(record.seqs):
                plans.dropped[record.reason] += len(record.seqs)
        elif isinstance(record, Done):
            plans.pace.add(record.epoch, record.step, stored_s)
            plans.skipped[record.step] = record.metrics.get(SKIPPED, 0.0)
            if LOOKS in record.metrics:
                plans.report_look[record.step] = int(record.metrics[LOOKS])
            if plans.newest is None or record.step >= plans.newest.step:
                plans.newest = record
        elif isinstance(record, Evaluated):
            plans.evaluated = summary.newest_scores([*plans.evaluated.values(), record])
    return plans


def steps_of(config: JsonMapping | None) -> int:
    """Return the steps of a run by its row on the bus; 0 = not known."""
    steps = (config or {}).get("learner", {}).get("steps", 0)
    return steps if isinstance(steps, int) else 0


def counts_under(load: Mapping[str, float], name: str) -> dict[str, int]:
    """Return the counters ``<name>/<key>`` of a live row by their key, the largest first."""
    counts = {key.partition("/")[2]: int(value) for key, value in load.items() if key.startswith(f"{name}/")}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _invalid_words(samples: JsonObject) -> str:
    if not samples["invalid"]:
        return ""
    fields, actors = (
        ", ".join(f"{escape(name)} {count}" for name, count in list(samples[counts].items())[:_MOST_NAMES])
        for counts in ("invalid_by_field", "invalid_by_actor")
    )
    return f", {samples['invalid']} invalid ({fields}; by actor {actors})"


def episodes_in_words(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step's episodes as text; empty if it had none."""
    if not metrics.get("data/episodes"):
        return ""
    spent = {
        name.rpartition("/")[2]: share
        for name, share in metrics.items()
        if name.startswith("data/budget_share/") and share
    }
    seconds = ", ".join(
        f"{part} {metrics.get(f'data/episode_{part}_seconds', 0):.1f} s" for part in ("generating", "tools", "reward")
    )
    budgets = ", ".join(f"{limit} {100 * share:.0f} %" for limit, share in spent.items())
    return (
        f"{metrics['data/episodes']:.0f} in the newest step, {metrics.get('data/turns_mean', 0):.1f} turns, "
        f"{metrics.get('data/sequences_mean', 0):.1f} sequences, "
        f"{100 * metrics.get('data/context_share', 0):.0f} % context; {seconds}"
    ) + (f"; budget spent: {budgets}" if spent else "")


async def _issued(bus: Bus, settled: set[int]) -> int:
    """Return the number of training tasks issued: in the stream, or settled by a record and trimmed from it."""
    stream = subjects.stream(bus.run, subjects.TASKS)
    counts = {
        name: count
        for name, count in (await bus.jet.subjects(stream, subjects.task(bus.run, "*"))).items()
        if subjects.trains(name)
    }
    firsts = [await bus.jet.next(stream, 1, name) for name in counts]  # None: trimmed in between
    first = min((message.seq for message in firsts if message is not None), default=None)
    return sum(counts.values()) + sum(first is None or task < first for task in settled)


def _end_in_words(end: JsonMapping) -> str:
    how = "the run is done" if end["outcome"] == Outcome.DONE else f"the learner has failed (code {end['code']})"
    return f"{how} after step {end['step']}: {end['reason']}"


def _report_in_words(look: Mapping[int, int]) -> str:
    steps = ", ".join(f"step {step} {f'{count} x LOOK' if count else 'ok'}" for step, count in look.items())
    return steps + ("; the lines are in the learner's log (docs/debugging.md)" if any(look.values()) else "")


def print_status(console: Console, status: JsonObject) -> None:
    """Print the result of ``read_status`` as text and a table."""
    head = status["head"]
    version = f"version {head['version']} (of step {head['step']})" if head else "no version yet"
    of = f" of {status['steps']}" if status["steps"] else ""
    left = "" if not status["left_s"] else f", {timedelta(seconds=int(status['left_s']))} left"
    steps = f"step {status['step']}{of} done{left}, batches planned up to step {status['planned']}"
    console.print(f"[bold]{status['run']}[/]  {steps}; weights: {version}")
    if status["reward"] is not None:
        console.print(
            f"reward {status['reward']:.3f}, lag {status['lag_mean'] or 0:.2f} mean, {status['lag_max'] or 0:.0f} max"
        )
    if words := episodes_in_words(status["episodes"]):
        console.print(f"episodes {words}", markup=False)
    for line in status["evaluations"]:
        console.print(f"evaluation {summary.scores_in_words(line)}", markup=False)
    if status["best"]:
        console.print(f"best checkpoint {summary.best_in_words(status['best'])}", markup=False)
    if status["end"]:
        console.print(_end_in_words(status["end"]), markup=False)
    if status["autoscale"]:
        console.print(f"autoscaler: {plain(status['autoscale']['reason'])}", markup=False)
    if skipped := status["minibatches_skipped"]:
        console.print(
            f"[red]skipped {skipped} minibatches: loss or gradients were not finite[/] (alarm skipped, docs/metrics.md)"
        )
    if status["report_look"]:
        console.print(f"report  {_report_in_words(status['report_look'])}", markup=False)
    _print_counts(console, status)
    samples = status["samples"]
    for row in status["processes"]:
        if row["unreachable"]:
            text = f"{row['role']} {row['id']} at {row['address']} is {'; '.join(row['unreachable'])}; {CURE}"
            console.print(plain(text), style="bold red", markup=False)
        elif row["trouble"]:
            console.print(f"trouble {row['id']}: {row['trouble']}", style="red", markup=False)
    console.print(f"stream  sequences {samples['first_seq']} to {samples['last_seq']}, {samples['bytes'] / 1e6:.1f} MB")
    for name, cursor in status["cursors"].items():
        kept = f"trimming {'waits' if cursor['policy'] == WAIT else 'does not wait'} for it"
        kept = "given up" if cursor["given_up"] else kept
        console.print(f"cursor  {name} at {cursor['floor']}, {cursor['behind']} messages behind; {kept}", markup=False)
    _print_processes(console, status)
    if len(releases := releases_of(status["processes"])) > 1:
        text = "; ".join(f"{release or 'not reported'}: {', '.join(names)}" for release, names in releases.items())
        console.print(f"releases differ (docs/upgrading.md): {text}", style="yellow", markup=False)
    passed_over = {f"by {row['role']} {row['id']}": row["unreadable"] for row in status["processes"]}
    for where, text in (*passed_over.items(), ("here", status["unreadable"])):
        if text:
            console.print(f"passed over {where}: {text}", style="yellow", markup=False)


def _print_counts(console: Console, status: JsonObject) -> None:
    tasks, samples = status["tasks"], status["samples"]
    given_up = ", ".join(f"{count} {reason}" for reason, count in tasks["given_up"].items())
    console.print(
        f"tasks   {tasks['issued']} issued: {tasks['settled']} settled, {tasks['open']} open; of these "
        f"{tasks['leased']} leased by actors, {tasks['waiting']} waiting for one"
        + (f"; given up: {given_up}" if given_up else "")
    )
    for rollout, count in tasks["unserved"].items():
        cure = f"start an actor that does: tidemill actor --rollouts {rollout}"
        text = f"{count} tasks of rollout {rollout} wait, and no actor serves it; {cure}"
        console.print(text, style="red", markup=False)
    failed = {"failed": samples["failed"]} if samples["failed"] else {}
    dropped = ", ".join(f"{count} {reason}" for reason, count in (samples["dropped"] | failed).items()) or "none"
    buffered = "" if samples["buffered"] is None else f", {samples['buffered']} buffered"
    console.print(
        f"samples {samples['trained']} trained, dropped: {escape(dropped)}{buffered}{_invalid_words(samples)}"
    )
    for actor in samples["refused"]:
        cure = "stop it, or fix it (docs/recovery.md)"
        console.print(f"[bold red]actor {actor} sends only invalid samples and is refused[/]: {cure}")


def _print_processes(console: Console, status: JsonObject) -> None:
    rooms = [kv_room(row["load"]) for row in status["processes"]]
    names = ("process", "host", "pid", "phase", "version", *(["keys and values"] if any(rooms) else []), "waits for")
    table = plain_table(*names)
    for row, room in zip(status["processes"], rooms, strict=True):
        phase = Text(f"silent for {row['silent_s']} s or more", style="red") if row["silent_s"] else _cell(row["phase"])
        version = str(row["version"]) if row["version"] >= 0 else ""
        name = f"{row['role']} {row['id']}"
        waits_for = _cell(row["waits_for"] or _unverified(row))
        of_engine = [_cell(room)] if any(rooms) else []
        table.add_row(*map(_cell, (name, row["host"], str(row["pid"]))), phase, version, *of_engine, waits_for)
    console.print(table)


def kv_room(load: Mapping[str, float]) -> str:
    """Return the use of an engine's room for keys and values by its live row; empty when it reports none."""
    used, preempted = load.get("kv_blocks_used", 0.0), int(load.get("preemptions", 0.0))
    blocks = used + load.get("kv_blocks_free", 0.0)
    if blocks <= 0:
        return ""
    text = f"{100 * used / blocks:.0f} % of {int(blocks) * BLOCK:,} tokens"
    return f"{text}, {preempted:,} preempted" if preempted else text


def _unverified(row: JsonObject) -> str:
    """Return the wait of an engine that serves, and that no process has reached yet; empty for all others."""
    serves = (row["role"], row["phase"]) == ("engine", "serving") and row["nonce"]
    waits = serves and not row["verified"] and not row["unreachable"]
    return f"a learner or router to reach it at {row['address']}" if waits else ""


def _cell(text: str) -> Text:
    return Text(plain(text))
