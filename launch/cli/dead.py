"""``tidemill dead``: lists dead tasks, and stores the operator's decision to requeue or drop them."""

import argparse
import asyncio
import os
import socket

from rich.console import Console

from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.dead import DROP, REQUEUE
from tidemill.bus.wire.messages import Dead, DeadLetterDecision, Prompt, Requeue
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import change, look
from tidemill.launch.samples.text import plain, to_json
from tidemill.learner.feed.history import shown_history

ANSWER_S = 5.0  # Seconds to wait for the learner's records of a decision
PROMPT_SHOWN = 72  # Maximum number of characters shown of a prompt


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("word", nargs="?", choices=("list", "requeue", "drop"), default="list")
    parser.add_argument("tasks", nargs="*", type=int, metavar="TASK", help="these tasks; or --all, or --reason")
    parser.add_argument("--all", action="store_true", help="all tasks; with list: also those that are decided")
    parser.add_argument("--reason", default="", metavar="TEXT", help="tasks with this text in their reason")
    parser.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """List dead tasks, or store a decision on some. Returns 0, or 1 while the learner has not recorded it."""
    if args.word == "list":
        return look(args, show_dead)
    if not (args.tasks or args.all or args.reason):
        raise ValueError(f"{args.word}: want ids of tasks, --all or --reason TEXT")
    return change(args, decide_dead_letters)


async def show_dead(bus: Bus, args: argparse.Namespace) -> int:
    """List dead tasks, newest last; without --all only tasks without a decision; return 0."""
    console = Console(highlight=False, soft_wrap=True)
    letters, decisions = await _read(bus)
    with_reason = [letter for letter in letters.values() if args.reason in letter.reason]
    chosen = [letter for letter in with_reason if args.all or letter.task not in decisions]
    for letter in chosen:
        word = decisions[letter.task].word if letter.task in decisions else ""
        if args.json:
            print(to_json(_as_map(letter, word)))
        else:
            shown = f" [{word}]" if word else ""
            attempts = f"{letter.attempts} attempts, last by {plain(letter.actor or 'unknown')}"
            console.print(f"task {letter.task}{shown}: {attempts}: {plain(letter.reason)}", markup=False)
            console.print(f"    {plain(_short(letter.prompt))}", style="dim", markup=False)
    if not args.json and (removed := (await shown_history(bus)).letters):
        console.print(f"{removed} older ones were removed, because DEAD was almost full (bus.quota_bytes)")
    if not chosen and not args.json:
        reason = f" with {args.reason!r} in its reason" if args.reason else ""
        console.print(f"no dead task{reason} ({len(letters)} in all; --all shows them)")
    return 0


async def decide_dead_letters(bus: Bus, args: argparse.Namespace) -> int:
    """Store the decision ``args.word``, requeue or drop, for some dead tasks, for all, or for those with a reason.

    A decision is durable; a learner that is not running reads it when it starts. Returns 0 when all is done, 1 when the
    learner has not recorded it yet. Raises ValueError for a task that is not dead.
    """
    console = Console(highlight=False, soft_wrap=True)
    letters, decisions = await _read(bus)
    with_reason = [letter.task for letter in letters.values() if args.reason in letter.reason]
    chosen = args.tasks or [task for task in with_reason if task not in decisions]  # ``run`` wants one of the three
    for task in chosen:
        _check(letters, task, args.word)
    decided = [task for task in chosen if await _decide(bus, console, decisions, task, args.word)]
    if args.word == DROP or not decided:
        return 0
    return await _wait_recorded(bus, console, decided)


def _check(letters: dict[int, Dead], task: int, word: str) -> None:
    if task not in letters:
        raise ValueError(f"task {task} is not dead; dead tasks: {', '.join(map(str, sorted(letters))) or 'none'}")
    if word == REQUEUE and letters[task].root < 0:
        raise ValueError(f"task {task} cannot be requeued: it could not be read, so its prompt is not known")


async def _decide(bus: Bus, console: Console, decisions: dict[int, DeadLetterDecision], task: int, word: str) -> bool:
    by = f"{os.environ.get('USER', 'unknown')} on {socket.gethostname()}"
    if task not in decisions and await bus.dead.decide(DeadLetterDecision(task=task, word=word, by=by)):
        console.print(f"task {task}: {word}")
        return True
    before = decisions.get(task) or (await bus.dead.decisions())[task]
    decision = f"{plain(before.word)}, by {plain(before.by) or 'unknown'}"
    console.print(f"task {task}: already decided: {decision}; the first decision counts", markup=False)
    return False


async def _wait_recorded(bus: Bus, console: Console, tasks: list[int]) -> int:
    unrecorded = set(tasks)
    try:
        async with asyncio.timeout(ANSWER_S):
            async for _, record in bus.plans.follow():
                if isinstance(record, Requeue):
                    unrecorded.discard(record.task)
                if not unrecorded:
                    console.print("recorded by the learner; the prompt is issued when admission allows the next task")
                    return 0
    except TimeoutError:
        pass
    feeders = await LiveView(bus).alive("feeder")
    away = "no learner is running; it reads the decision when it starts"
    console.print(f"not recorded yet: {'the learner is busy, or needs no more prompts' if feeders else away}")
    return 1


async def _read(bus: Bus) -> tuple[dict[int, Dead], dict[int, DeadLetterDecision]]:
    return {dead.task: dead async for _, dead in bus.dead.scan()}, await bus.dead.decisions()


def _as_map(dead: Dead, word: str) -> dict[str, object]:
    fields = ("task", "reason", "attempts", "actor", "prompt", "root", "reissues")
    return {name: getattr(dead, name) for name in fields} | {"word": word or None}


def _short(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else " | ".join(str(turn.get("content", "")) for turn in prompt)
    text = " ".join(text.split())
    return text if len(text) <= PROMPT_SHOWN else text[: PROMPT_SHOWN - 3] + "..."
