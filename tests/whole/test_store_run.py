"""A run with its checkpoints in a store: `tidemill up` is killed, all checkpoints on the disk are deleted, and the run
goes on.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path

import psutil
import pytest

from tests.whole.running import UP_LIMIT_S, Up, assert_books_balance, until_step, up
from tests.whole.test_whole_run import retrain, weights
from tidemill.bus.streams.bus import Bus
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.checkpoints.store_uploads import survey

STEPS = 12


async def killed_behind_a_checkpoint(run: Up) -> int:
    """Kill `tidemill up`, with all its children, a step behind a checkpoint that is in the store.

    Returns the step of the latest checkpoint just before: a newer one may be the latest meanwhile, and its bus ends
    with it.
    """
    async with run.bus() as bus, asyncio.timeout(UP_LIMIT_S):
        step = await latest(bus)
        await until_step(bus, step + 1)
        saved = await bus.rows("run").get(CHECKPOINT_KEY)
        children = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        run.process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
    assert not alive, "they write below the directory that is removed next"
    assert saved is not None
    return int(saved[0]["step"])


async def latest(bus: Bus) -> int:
    """Wait for the first checkpoint that is the latest, and return its step."""
    async for row in bus.rows("run").watch(CHECKPOINT_KEY):
        if row is not None:
            return int(row[0]["step"])
    raise AssertionError("the row is watched for ever")


@pytest.mark.slow
def test_a_learner_without_its_disk_comes_to_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    settings = (
        f"learner.checkpoint.store={url}",
        f"learner.steps={STEPS}",
        "learner.checkpoint_every=2",
        "learner.weights_digest=true",
    )
    with up(tmp_path, *settings) as run:
        step = asyncio.run(killed_behind_a_checkpoint(run))
    shutil.rmtree(run.directory / "checkpoints")
    store = ObjectStore(url, "smoke")
    found, _ = survey(store)
    assert step <= max(disk.named(Path(name)).step for name, one in found.items() if one.is_whole), found.keys()
    with up(tmp_path, *settings, flags=("--resume",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    logs = "".join(path.read_text() for path in (run.directory / "logs").glob("learner*"))
    resumed = [int(found) for found in re.findall(r"resumed step=(\d+) ", logs)]
    assert len(resumed) == 2 and step <= resumed[1] < STEPS, resumed
    assert "gave OTHER weights" not in logs
    assert_books_balance(run.summary, max_lag=2)
    assert sorted({line["step"] for line in run.metrics}) == list(range(1, STEPS + 1))
    assert {name for name, one in survey(store)[0].items() if one.is_whole} >= {f"step-{STEPS}-epoch-2"}, (
        "the last one is there, too"
    )
    again, kept = tmp_path / "again", {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    assert f"steps 1 to {STEPS} again" in retrain(run.directory, again)
    assert weights(again) == weights(run.directory)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == kept, (
        "the store is the run's alone"
    )
    assert json.loads((again / "summary.json").read_text())["samples_trained"] == run.summary["samples_trained"]
