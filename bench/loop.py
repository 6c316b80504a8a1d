"""The whole loop against its slower half: samples/s of an asynchronous run, of generating alone, and of training alone.

The same model, prompts, engine, actor and learner on the same cores, one after the other, in rounds. Generating alone: bus, engine and
actor, fed with tasks by this process; nobody trains. Training alone: the learner executes the recorded plans of the run again from its
first step; nobody generates. Where all share two cores the loop cannot reach its slower half: the work of both has to be done, and what
doing it one after the other would give is printed, too.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from bench.learn import CONFIG, ROOT, quiet
from bus.connection import Bus, connect
from bus.epoch import raise_epoch
from bus.messages import Done, Sampling, Task
from launch.config import RunConfig
from launch.process import Child
from launch.roles import BUS_URL_FILE
from launch.settings import load, to_map
from learner.prompts import model_tokenizer
from weightstore.registry import VersionRegistry

LIMIT_S = 300.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args(arguments)
    rows: list[tuple[float, float, float]] = []
    for number in range(args.rounds):
        directory = ROOT / "runs" / "bench" / f"loop-{number}"
        settings = (f"directory={directory}", f"learner.steps={args.steps}", "up.require_reward=-1", f"seed={number}")
        config = load(CONFIG, settings).config
        loop = whole_loop(config, settings)
        train = asyncio.run(train_only(config))
        generate = asyncio.run(generate_only(config, args.steps * config.samples_per_step))
        rows.append((loop, generate, train))
        print(f"round {number}: loop {loop:.0f}, generate only {generate:.0f}, train only {train:.0f} samples/s", flush=True)
    ratios = [loop / min(generate, train) for loop, generate, train in rows]
    serial = [loop * (1 / generate + 1 / train) for loop, generate, train in rows]
    print(f"loop / slower half: ratio {median(ratios):.2f} (rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    print(f"loop / both one after the other: ratio {median(serial):.2f}")


def whole_loop(config: RunConfig, settings: tuple[str, ...]) -> float:
    """Samples per second from the first step's outcome to the last's."""
    words = [word for setting in settings for word in ("--set", setting)]
    quiet([sys.executable, "-m", "launch", "up", str(CONFIG), "--fresh", *words])
    lines = [json.loads(line) for line in (config.root / "metrics.jsonl").read_text().splitlines()]
    return (len(lines) - 1) * config.samples_per_step / (lines[-1]["seconds"] - lines[0]["seconds"])


async def train_only(config: RunConfig) -> float:
    """The learner again, on the recorded stream, with its checkpoints taken away."""
    shutil.rmtree(config.checkpoints)
    async with asyncio.timeout(LIMIT_S):
        bus_child = await started(config, "bus")
        try:
            url = await address(config)
            async with connect(url, config.run, config.bus, name="bench") as bus:
                await bus.rows("run").delete("checkpoint")
                learner = await started(config, "learner", "--bus", url)
                try:
                    return await outcomes_per_second(bus, config) * config.samples_per_step
                finally:
                    await learner.end(30)
        finally:
            await bus_child.end(30)


async def outcomes_per_second(bus: Bus, config: RunConfig) -> float:
    """Steps per second of the newest epoch, from its first outcome to the last."""
    epoch = 0
    async for _, record in bus.plans.scan():
        epoch = max(epoch, record.epoch)
    first = 0.0
    async for _, record in bus.plans.follow():
        if isinstance(record, Done) and record.epoch > epoch:
            first = first or time.monotonic()
            if record.step == config.learner.steps:
                return (record.step - 1) / (time.monotonic() - first)
    raise AssertionError("the log has ended")


async def generate_only(config: RunConfig, num_samples: int) -> float:
    """Bus, engine and actor; tasks from here; as many in flight as the staleness budget admits."""
    fresh = replace(config, directory=f"{config.directory}-generate")
    shutil.rmtree(fresh.root, ignore_errors=True)
    fresh.root.mkdir(parents=True)
    children = [await started(fresh, "bus")]
    try:
        async with asyncio.timeout(LIMIT_S):
            url = await address(fresh)
            async with connect(url, fresh.run, fresh.bus, name="bench") as bus:
                await bus.create_layout()
                await bus.rows("run").put("config", to_map(fresh))
                epoch = await raise_epoch(bus)
                await bus.tasks.fence(epoch)
                await VersionRegistry(bus).publish_initial(fresh.model.path, epoch)
                children += [await started(fresh, role, "--bus", url) for role in ("engine", "actor")]
                return await generated_per_second(bus, fresh, epoch, num_samples)
    finally:
        for child in reversed(children):
            await child.end(30)


async def generated_per_second(bus: Bus, config: RunConfig, epoch: int, num_samples: int) -> float:
    """Issue tasks as samples come in; samples per second from the first one on."""
    text = await asyncio.to_thread(Path(config.data.path).read_text)
    rows = [json.loads(line) for line in text.splitlines()]
    tokenize, numbers, per_task = model_tokenizer(config.model.path), count(), config.learner.group_size

    async def issue() -> None:
        number = next(numbers)
        row = rows[number % len(rows)]
        tokens = np.array(tokenize(row["prompt"]), np.int32)
        sampling = Sampling(max_new_tokens=config.sampling.max_new_tokens, seed=number)
        common = {"run": bus.run, "epoch": epoch, "prompt": row["prompt"], "label": row["label"], "prompt_tokens": tokens}
        await bus.tasks.issue(Task(**common, group_size=per_task, sampling=sampling, prompt_epoch=0, offset=number))

    for _ in range((config.staleness.max_lag + 1) * config.learner.groups_per_step):
        await issue()
    read, first = 0, 0.0
    async for _ in bus.samples.read(None):
        first = first or time.monotonic()
        read += 1
        if read == num_samples:
            return (read - 1) / (time.monotonic() - first)
        if read % per_task == 0:
            await issue()
    raise AssertionError("the stream has ended")


async def started(config: RunConfig, role: str, *more: str) -> Child:
    """A process of the run."""
    file = config.root / "config.yaml"
    if not file.exists():
        import yaml

        file.write_text(yaml.safe_dump(to_map(config), sort_keys=False))
    child = Child(role, [role, "--config", str(file), *more], config.root / "logs" / f"bench-{role}.log")
    await child.start()
    return child


async def address(config: RunConfig) -> str:
    """Where the bus of the run answers."""
    file = config.root / BUS_URL_FILE
    while not file.exists():  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.02)
    return file.read_text().strip()


if __name__ == "__main__":
    main()
