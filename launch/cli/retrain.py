"""``tidemill replay --train``: a learner alone repeats the recorded steps of a run, in a directory of its own.

The streams of the run are copied, not changed. No engine and no actor runs: every batch is a batch of PLAN, with
the log-probs recorded in its samples. Each step has the settings of its first execution, and the weights are the same
bits; with others (``--set learner...``) it is off-policy training on the recorded samples.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, current_epoch
from tidemill.bus.wire.messages import Plan
from tidemill.bus.wire.subjects import SETTINGS_KEY
from tidemill.launch.run.directory import directory_of_one
from tidemill.launch.run.up import CONFIG_FILE, run_up
from tidemill.launch.settings.config_loader import changes, from_map, load, to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.buffer.ledger import read_state
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY

BUS_DIRECTORY, CHECKPOINTS = "bus", "checkpoints"
ALONE = (
    *("up.engines=0", "up.actors=0", "up.require_reward=-1e30", "prepare=null", "bus.cluster=1", "bus.auth=false"),
    *("eval.every=0", "eval.best=''", "eval.stop_after=0"),
    *("learner.checkpoint.store=local", "learner.checkpoint.copies=2"),
)
"""Settings of a learner without engines and actors, on a bus of its own; no reward is required of old samples."""


def retrain(run_dir: str, out: str, settings: Sequence[str]) -> int:
    """Repeat all steps that have their samples; return the exit code of ``tidemill up``. Raises ValueError."""
    source, target = Path(run_dir), Path(out)
    if not run_dir or not (source / CONFIG_FILE).exists():
        raise ValueError(f"--train: want --run-dir, the directory of a run on this machine, got {run_dir!r}")
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"--train: want a directory that is empty or not there yet, got {out}")
    before = load(source / CONFIG_FILE, settings, os.environ).config
    if before.bus.url or before.bus.auth or not (source / BUS_DIRECTORY / "store").exists():
        raise ValueError(
            f"--train: want a run with an embedded bus without users, whose streams are in its directory, got {run_dir}"
        )
    with directory_of_one(source, resume=True, fresh=False):
        shutil.copytree(
            source / BUS_DIRECTORY, target / BUS_DIRECTORY, ignore=shutil.ignore_patterns("*.ports", "*.pid", "port")
        )
        first, last, epoch = asyncio.run(_rewound(source, target, before, unchanged=not settings))
    print(f"{before.run}: steps {first} to {last} again, in {target}")
    mine = (f"directory={target}", f"learner.steps={last}", *ALONE)
    config = from_map(to_map(before), str(source / CONFIG_FILE), changes(mine, {}))
    shutil.copy(source / CONFIG_FILE, target / CONFIG_FILE)  # makes it a run that can be resumed
    return run_up(config, resume=True, fresh=False, after_epoch=epoch)


async def _rewound(source: Path, target: Path, config: RunConfig, *, unchanged: bool) -> tuple[int, int, int]:
    """Rewind the copied run to the earliest step from which all samples are present.

    Returns (first step, last step) to repeat, at most up to ``learner.steps``, and the epoch of the run's newest
    learner.
    """
    server = EmbeddedServer(target / BUS_DIRECTORY, BusConfig())
    await asyncio.to_thread(server.start)
    try:
        async with connect(server.url, config.run, name="replay") as bus:
            epoch = await current_epoch(bus)
            last = max([record.step async for _, record in bus.plans.scan() if isinstance(record, Plan)], default=0)
            if not last:
                raise ValueError(f"--train: {source} has no recorded step")
            rows = bus.rows("wanted")
            for key in await rows.keys():  # a resumed run would keep these numbers, not take those of ``ALONE``
                await rows.delete(key)
            if not unchanged:
                await _forget_settings(bus)
            done = await _set_back(bus, source, target)
    finally:
        await asyncio.to_thread(server.stop)
    if done >= min(last, config.learner.steps):
        raise ValueError(
            f"--train: no step behind step {done} is recorded, and what came before is trimmed "
            "(bus.history_samples keeps more)"
        )
    return done + 1, min(last, config.learner.steps), epoch


async def _forget_settings(bus: Bus) -> None:
    rows = bus.rows("run")
    for key in await rows.keys():
        if key.startswith(f"{SETTINGS_KEY}."):
            await rows.delete(key)


async def _set_back(bus: Bus, source: Path, target: Path) -> int:
    """Select the start: no checkpoint if nothing was trimmed, else the oldest valid one. Returns its step or 0."""
    if (await bus.samples.info()).first_seq <= 1:
        await bus.rows("run").delete(CHECKPOINT_KEY)
        return 0
    kept = [checkpoint.path for checkpoint in reversed(disk.listed(source / CHECKPOINTS))]
    oldest, _ = disk.latest_valid(kept)
    if oldest is None:
        raise ValueError(f"--train: samples were trimmed, and no checkpoint in {source / CHECKPOINTS} is whole")
    copied = target / CHECKPOINTS / oldest.name
    shutil.copytree(oldest, copied)
    checkpoint, state = disk.named(oldest), read_state(disk.read_state(oldest))
    row = {"directory": str(copied), "step": checkpoint.step, "epoch": checkpoint.epoch, "chain": state["chain"]}
    await bus.rows("run").put(CHECKPOINT_KEY, row)
    return checkpoint.step
