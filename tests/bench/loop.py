"""The whole loop against its slower half: samples/s of an asynchronous run, of generating alone, and of training alone.

The same model, prompts, engine, actor and learner on the same cores, one after the other, in rounds. Training alone: a
learner with no checkpoint on the bus of the run just made executes its recorded plans again from the first step,
reading its samples from the stream; there is no generation and no push. Generating alone: bus, engine and actor with
the model that the run made (so responses are of a trained model's length), fed with tasks by this process, which also
reads the samples; there is no training.

Where both halves share two cores the loop cannot reach its slower half: the work of both has to be done. So the rate of
the two halves in sequence is printed as well, and the CPU time of a step, from which the rate on two free cores
follows.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import yaml

from tests.bench.learn import CONFIG, ROOT
from tests.bench.meter import metered
from tests.waits import until
from tidemill.bus.streams.bus import Bus, connect, current_epoch, raise_epoch
from tidemill.bus.system.processes import Child
from tidemill.bus.wire.messages import Done, Sample, Sampling, Task
from tidemill.launch.run.access import BUS_URL_FILE
from tidemill.launch.run.process import launched
from tidemill.launch.settings.config_loader import load, to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.learner.prompts.tokenizer import model_tokenizer
from tidemill.weightstore.store.registry import VersionRegistry

LIMIT_S = 600.0
END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Samples/s of each variant, and CPU seconds of a step of the loop."""

    loop: float
    generate: float
    train: float
    cpu_s: float

    @property
    def to_slower_half(self) -> float:
        return self.loop / min(self.generate, self.train)

    @property
    def to_one_after_the_other(self) -> float:
        return self.loop * (1 / self.generate + 1 / self.train)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench loop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--max-lag", type=int, default=2)
    args = parser.parse_args(arguments)
    rounds = []
    for number in range(args.rounds):
        rounds.append(one(number, args))
        print(
            f"round {number}: loop {rounds[-1].loop:.0f}, generate only {rounds[-1].generate:.0f}, train only "
            f"{rounds[-1].train:.0f} "
            f"samples/s; {1e3 * rounds[-1].cpu_s:.0f} CPU ms a step",
            flush=True,
        )
    print(f"RATIO loop / slower half: {median(each.to_slower_half for each in rounds):.2f}")
    print(f"RATIO loop / one half after the other: {median(each.to_one_after_the_other for each in rounds):.2f}")


def one(number: int, args: argparse.Namespace) -> Round:
    directory = ROOT / "runs" / "bench" / f"loop-{number}"
    settings = (
        *(
            f"directory={directory}",
            f"seed={number}",
            f"learner.steps={args.steps}",
            f"staleness.max_lag={args.max_lag}",
        ),
        *("learner.checkpoint_every=0", "up.require_reward=-1"),
    )
    config = load(CONFIG, settings).config
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "up",
        str(CONFIG),
        "--fresh",
        *(word for each in settings for word in ("--set", each)),
    ]
    run = metered(
        command, lines_file=directory / "metrics.jsonl", log_file=directory.with_suffix(".log"), directory=ROOT
    )
    seconds = run.lines[-1]["seconds"] - run.lines[0]["seconds"]
    return Round(
        loop=(len(run.lines) - 1) * config.samples_per_step / seconds,
        train=asyncio.run(train_only(config)),
        generate=asyncio.run(generate_only(config, args.steps * config.samples_per_step)),
        cpu_s=run.cpu_s_per_line(1, len(run.lines)),
    )


async def train_only(config: RunConfig) -> float:
    """Return samples per second of the learner alone, on the recorded stream, with its checkpoints deleted."""
    shutil.rmtree(config.checkpoints)
    async with asyncio.timeout(LIMIT_S), running(config, "bus"), on_bus(config) as bus:
        epoch = await current_epoch(bus)
        await bus.rows("run").delete(CHECKPOINT_KEY)
        async with running(config, "learner"):
            first_s = 0.0
            async for _, record in bus.plans.follow():
                if isinstance(record, Done) and record.epoch > epoch:
                    first_s = first_s or time.monotonic()
                    if record.step == config.learner.steps:
                        return (record.step - 1) * config.samples_per_step / (time.monotonic() - first_s)
    raise AssertionError("the log has ended")


async def generate_only(config: RunConfig, num_samples: int) -> float:
    """Return samples per second of engine and actor alone."""
    fresh = replace(
        config,
        directory=f"{config.directory}-generate",
        model=replace(config.model, path=str(config.root / "final")),
    )
    shutil.rmtree(fresh.root, ignore_errors=True)
    fresh.root.mkdir(parents=True)
    async with asyncio.timeout(LIMIT_S), running(fresh, "bus"), on_bus(fresh) as bus:
        await bus.create_layout()
        await bus.rows("run").put("config", to_map(fresh))
        epoch = await raise_epoch(bus)
        await bus.tasks.fence(epoch)
        await VersionRegistry(bus).publish_initial(fresh.model.path, epoch)
        async with running(fresh, "engine"), running(fresh, "actor"):
            return await generated_per_second(bus, fresh, epoch, num_samples)


async def generated_per_second(bus: Bus, config: RunConfig, epoch: int, num_samples: int) -> float:
    """Issue tasks as samples arrive, with as many in flight as max_lag admits; return samples per second after the
    first step's samples.
    """
    tasks, per_task, warm = tasks_of(config, epoch), config.learner.group_size, config.samples_per_step
    for _ in range((config.staleness.max_lag + 1) * config.learner.groups_per_step):
        await bus.tasks.issue(next(tasks))
    read, first_s = 0, 0.0
    async for received in bus.samples.read(None):
        assert isinstance(received.sample, Sample) and received.sample.response_length, received
        read += 1
        if read == warm:
            first_s = time.monotonic()
        if read == num_samples:
            return (read - warm) / (time.monotonic() - first_s)
        if read % per_task == 0:
            await bus.tasks.issue(next(tasks))
    raise AssertionError("the stream has ended")


def tasks_of(config: RunConfig, epoch: int) -> Iterator[Task]:
    """Yield tasks of the run's prompts, in the file's order, for ever."""
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    tokenize = model_tokenizer(config.model.path)
    for number in count():
        row = rows[number % len(rows)]
        yield Task(
            run=config.run,
            epoch=epoch,
            prompt=row["prompt"],
            prompt_tokens=np.array(tokenize(row["prompt"]), np.int32),
            label=row["label"],
            group_size=config.learner.group_size,
            sampling=Sampling(max_new_tokens=config.sampling.max_new_tokens, seed=number),
            prompt_epoch=number // len(rows),
            offset=number % len(rows),
        )


@asynccontextmanager
async def running(config: RunConfig, role: str) -> AsyncIterator[Child]:
    """Run a process of the run, and end it on leaving."""
    file = config.root / "config.yaml"
    if not file.exists():
        file.write_text(yaml.safe_dump(to_map(config), sort_keys=False))
    bus = [] if role == "bus" else ["--bus", await address(config)]
    child = launched(role, [role, "--config", str(file), *bus], config.root / "logs" / f"bench-{role}.log")
    await child.start()
    try:
        yield child
    finally:
        await child.end(END_S)


@asynccontextmanager
async def on_bus(config: RunConfig) -> AsyncIterator[Bus]:
    async with connect(await address(config), config.run, config.bus, name="bench") as bus:
        yield bus


async def address(config: RunConfig) -> str:
    """Return the address of the run's bus."""
    file = config.root / BUS_URL_FILE
    await until(file.exists)
    return file.read_text().strip()


if __name__ == "__main__":
    main()
