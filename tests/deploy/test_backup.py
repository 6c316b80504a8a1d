"""A backup of a run that goes on, and the run that goes on from it after everything else is gone."""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.processes import Processes, step_after
from tests.launched import run_tidemill
from tests.refusals import refusal
from tidemill.launch.run.backup import BackupRefused, restore


@pytest.mark.slow
async def test_a_run_goes_on_elsewhere_from_its_backup_with_every_sample_of_that_instant(tmp_path: Path) -> None:
    saved = tmp_path / "backup"
    with Processes(tmp_path / "run") as run:
        for role in ("bus", "learner", "engine", "actor"):
            run.start(role)
        async with run.bus() as bus:
            await step_after(run, bus, 12)
            words = ("backup", "--run-dir", str(run.directory), "--out", str(saved))
            taken = await asyncio.to_thread(run_tidemill, *words)
            assert taken.returncode == 0, taken.output
            at_backup = await step_after(run, bus, 8)  # the run goes on
        run.kill()
        shutil.rmtree(run.directory / "bus")
        later = run.directory / "checkpoints"
    with Processes(tmp_path / "elsewhere") as run:
        restored = run_tidemill("restore", str(saved), "--run-dir", str(run.directory))
        assert restored.returncode == 0, restored.output
        run.start("bus")
        async with run.bus() as bus:
            words = ("audit", "--bus", run.url, "--run", "smoke", "--checkpoints", str(later))
            audited = await asyncio.to_thread(run_tidemill, *words)
            assert audited.returncode == 0, "checkpoints of later steps than the backup's are not its own"
            shutil.rmtree(later)
            for role in ("engine", "actor"):
                run.start(role)
            learner = run.start("learner")
            last = await step_after(run, bus, 8)
            assert 12 < last < at_backup + 8
            await run.drain(learner)
            steps = [done.step for done in await run.audited(bus)]
            assert sorted(set(steps)) == list(range(1, max(steps) + 1))


def test_a_changed_or_unfinished_backup_is_refused_and_nothing_is_put_anywhere(tmp_path: Path) -> None:
    saved = tmp_path / "backup"
    (saved / "bus/store").mkdir(parents=True)
    (saved / "bus/store/1.blk").write_bytes(b"messages")
    with refusal(BackupRefused, place=str(saved / "backup.json")):
        restore(saved, tmp_path / "run")
    entry = {"size": 8, "sha256": "0" * 64}
    manifest = {"run": "smoke", "time_s": 0, "files": {"bus/store/1.blk": entry}}
    (saved / "backup.json").write_text(json.dumps(manifest))
    with refusal(BackupRefused, place=re.compile(r"/1\.blk$")) as refused:
        restore(saved, tmp_path / "run")
    assert "digest" in str(refused.value)
    manifest["files"] = {"../other": entry}
    (saved / "backup.json").write_text(json.dumps(manifest))
    with refusal(BackupRefused, place=str(saved / "backup.json"), got="'../other'"):
        restore(saved, tmp_path / "run")
    assert not (tmp_path / "run").exists()
