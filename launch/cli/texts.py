"""``tidemill texts``: responses of the first and the last evaluated version to held-out prompts, side by side."""

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Kind, Sample
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.samples.block import reward_colour
from tidemill.launch.samples.filters import Filter, prompt_text
from tidemill.launch.samples.search import SampleSearch
from tidemill.launch.samples.text import plain, shortened, to_json
from tidemill.learner.evaluation.rounds import MARK

_SIZE = (6, 300)
"""Lines and characters of a text that is shortened."""
Pair = tuple[Sample, Sample]
"""Responses of two versions to one prompt."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    parser.add_argument("--set", default="", metavar="NAME", help="evaluation set; default: the first one by name")
    parser.add_argument(
        "--count", type=int, default=10, metavar="N", help="prompts, evenly spaced (default 10; 0 = all)"
    )
    parser.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per prompt")


def run(args: argparse.Namespace) -> int:
    """Print the responses of both versions. Returns 0, or 1 where fewer than two versions have responses."""
    return look(args, show_texts)


async def show_texts(bus: Bus, args: argparse.Namespace) -> int:
    """Print pairs of responses, and the means of the reward and its parts. Raises ValueError for an unknown set."""
    responses = await responses_by_version(bus)
    name = args.set or min(responses, default="")
    if name not in responses:
        raise ValueError(
            f"--set: want an evaluated set with responses ({', '.join(responses) or 'none'}), got {name!r}"
        )
    versions = sorted(responses[name])
    first, last = (responses[name][version] for version in (versions[0], versions[-1]))
    pairs = [(first[row], last[row]) for row in sorted(first.keys() & last.keys())]
    shown = pairs if not args.count else evenly_spaced(pairs, args.count)
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
    return {
        "prompt": prompt_text(before),
        "before": before.response,
        "after": after.response,
        "reward_before": dict(_parts(before)),
        "reward_after": dict(_parts(after)),
    }
