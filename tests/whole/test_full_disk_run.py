"""A run whose directory is on a disk that is full for a while."""

import asyncio
from pathlib import Path

import pytest

from tests.small_disk import small_disk
from tests.waits import until
from tests.whole.running import assert_books_balance, up
from tidemill.bus.server.nats_server import EmbeddedServer

STEPS = 40


@pytest.mark.slow
async def test_a_run_goes_on_when_its_full_disk_has_room_again(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    """Metrics, logs, keys and checkpoints cannot be written meanwhile. The bus's store is on another disk."""
    settings = (f"learner.steps={STEPS}", "learner.checkpoint_every=4", "up.restarts=20", f"bus.url={nats_server.url}")
    with small_disk(tmp_path / "run", size_bytes=40_000_000) as disk, up(tmp_path, *settings) as run:
        metrics = disk.root / "metrics.jsonl"
        await until(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= 2,
            alive=lambda: run.process.returncode is None,
        )
        while "learner ended with code 1" not in run.log or "metrics.jsonl: cannot be written" not in run.log:
            assert run.process.returncode is None, run.log
            disk.fill(leaving=0)
            await asyncio.sleep(0.05)
        disk.clear()
        assert await asyncio.to_thread(run.wait) == 0, run.log
        (reason, *_) = [line for line in run.log.splitlines() if "learner ended with code 1" in line]
        assert "No space left on device" in reason or "0 MB are free on the disk" in reason, reason
        assert "metrics.jsonl: written again, with " in run.log
        assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
        assert_books_balance(run.summary, max_lag=2)
