"""How many tasks a second a feeder issues: the real loop and a real nats-server, a thousand prompts, no actors.

python -m tests.bench issuing [--tasks 4000] [--rounds 3]

Rounds are interleaved: tasks that are stored one after the other, as with ``bus.tasks_per_s``, and many at once.
Printed are medians: tasks a second, and CPU of feeder and server for each task. The feeder does nothing else meanwhile.
"""

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.bench.actors import GROUP_SIZE
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.coroutines import Waiter, first_of
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feeder_settings import FeederPlaces, FeederSettings, ModelFacts
from tidemill.learner.feed.issuing import Curriculum, TaskIssuer
from tidemill.learner.feed.restart import restore
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.weightstore.store.registry import VersionRegistry

NO_LIMIT = 1e6
PROMPTS, PROMPT_TOKENS = 1000, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one task: by the clock, and of the processors of feeder and nats-server."""

    wall_s: float
    feeder_s: float
    server_s: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench issuing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=4000, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    configs = {"one after the other": BusConfig(tasks_per_s=NO_LIMIT), "many at once": BusConfig()}
    rounds: dict[str, list[Round]] = {name: [] for name in configs}
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory) / "bus", BusConfig()) as server:
        prompts = prompts_in(Path(directory))
        for _ in range(args.rounds):
            for name, config in configs.items():
                run = f"issue-{len(rounds[name])}-{'one' if config.tasks_per_s else 'many'}"
                rounds[name].append(asyncio.run(issue(server, run, config, prompts, args.tasks, Path(directory))))
    for name, measured in rounds.items():
        wall_s, feeder_s, server_s = (
            median(getattr(one, part) for one in measured) for part in ("wall_s", "feeder_s", "server_s")
        )
        costs = f"us of CPU a task: feeder {1e6 * feeder_s:.0f}, server {1e6 * server_s:.0f}"
        print(f"  {name:<20} {1 / wall_s:6.0f} tasks/s, {1 / feeder_s:6.0f} with a core of its own; {costs}")
    for part in ("wall_s", "feeder_s"):
        one, many = (median(getattr(one, part) for one in measured) for measured in rounds.values())
        print(f"RATIO {part} of a task, many at once / one after the other: {many / one:.2f}")


def prompts_in(directory: Path) -> PromptFile:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}", "label": "2"}) + "\n" for number in range(PROMPTS)))
    return PromptFile(path, tokenize=lambda prompt: [7] * PROMPT_TOKENS, max_tokens=PROMPT_TOKENS)


async def issue(
    server: EmbeddedServer, run: str, config: BusConfig, prompts: PromptFile, num_tasks: int, directory: Path
) -> Round:
    """Issue so many tasks of a new run, after a tenth of them as a warm-up."""
    places = FeederPlaces(
        run=run, bus_url=server.url, bus=config, listen="", keys=FeedKeys.new(), checkpoints=directory / "checkpoints"
    )
    settings = FeederSettings(
        places=places,
        model=ModelFacts(vocab_size=256),
        learner=LearnerConfig(steps=1, groups_per_step=num_tasks, group_size=GROUP_SIZE),
        staleness=StalenessConfig(max_lag=0),
    )
    async with connect(server.url, run, config, name="feeder") as bus:
        await bus.create_layout()
        await bus.plans.fence(1)
        await bus.tasks.fence(1)
        registry = VersionRegistry(bus)
        await registry.fence(1)
        await registry.publish(await registry.publish_initial("model", 1))
        restored = await restore(bus, settings, prompts, epoch=1, copies=None)
        issuer = TaskIssuer(bus, settings, prompts, restored, Curriculum(settings.data))
        issued, source, process = Waiter(), restored.resumed.source, psutil.Process(server.pid)

        marks: list[tuple[int, float, float, float]] = []

        async def watch() -> None:
            for count in (num_tasks // 10, num_tasks):
                while source.accounting().issued < count:
                    await issued.wait()
                times = time.monotonic(), time.process_time(), sum(process.cpu_times()[:2])
                marks.append((source.accounting().issued, *times))

        await first_of(watch(), issuer.run(issued))
    (first, *before), (last, *after) = marks
    wall_s, feeder_s, server_s = ((end - begin) / (last - first) for begin, end in zip(before, after, strict=True))
    return Round(wall_s=wall_s, feeder_s=feeder_s, server_s=server_s)


if __name__ == "__main__":
    main()
