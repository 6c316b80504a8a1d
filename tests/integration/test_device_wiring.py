"""Environment of the processes that `tidemill up`, `learner` and `host` start on a machine with a fake nvidia-smi: each
has its devices.

The children are real interpreters with the real command line, and end as soon as they have written down their
environment.
"""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bus_fixtures import BusOpener
from tests.check_kit import write_model, write_run
from tests.gpu_kit import MIB, fake_nvidia_smi, uuid_of
from tests.gpu_kit import row as gpu_row
from tests.waits import LIMIT_S, until
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire.rows import Capabilities, LiveRow

ROOT = Path(__file__).resolve().parents[2]
RECORDER = """
import json, os, sys, time
import tidemill.launch.devices.visible
tidemill.launch.devices.visible.nccl_of = lambda program="": "2.29.7"
place = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else 0
words = sys.orig_argv[place + 1 :] if sys.orig_argv[place] == "tidemill" else [""]
if words[0] in ("engine", "rank", "feeder", "actor"):
    name = words[words.index("--id") + 1] if "--id" in words else words[0] + os.environ.get("RANK", "")
    with open(os.environ["RECORDED"] + "/" + name + ".tmp", "w") as file:
        json.dump(dict(os.environ), file)
    os.rename(file.name, os.environ["RECORDED"] + "/" + name)
    while words[0] == "rank" and os.path.exists(os.environ["RECORDED"] + "/hold"):
        time.sleep(0.01)
    os._exit(0)
"""
"""A sitecustomize: it runs before the command. NCCL is installed; ranks stay until the file ``hold`` is gone."""
OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "TIDEMILL_ENGINE__DEVICES", "LOCAL_RANK", "PYTORCH_ALLOC_CONF", "NCCL_ALGO")


class Machine:
    """A machine with some GPUs, and the environments of the processes started on it."""

    def __init__(self, directory: Path, gpus: int | None) -> None:
        self._directory, recorded, customized = directory, directory / "recorded", directory / "custom"
        for made in (recorded, customized):
            made.mkdir()
        (customized / "sitecustomize.py").write_text(RECORDER)
        hidden = (*OF_DEVICES, "PYTORCH_CUDA_ALLOC_CONF")
        path = os.environ["PATH"] if gpus is None else fake_nvidia_smi(directory / "bin", gpus)
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden} | {
            "PATH": path,
            "PYTHONPATH": f"{customized}{os.pathsep}{ROOT}",
            "RECORDED": str(recorded),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidemill", *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=300)

    def devices_of(self, name: str) -> dict[str, str]:
        """Return the variables of a child that was started, as far as they are about devices."""
        found = json.loads((self._directory / "recorded" / name).read_text())
        return {key: found[key] for key in OF_DEVICES if key in found}

    def children(self) -> list[str]:
        return sorted(path.name for path in (self._directory / "recorded").iterdir() if path.suffix != ".tmp")

    @property
    def hold(self) -> Path:
        """The file that keeps ranks running."""
        return self._directory / "recorded/hold"

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a command, with its output in the file ``log``."""
        with (self._directory / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tidemill", *arguments], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()


def own(*numbers: int) -> dict[str, str]:
    """Return the variables of an engine on these devices."""
    uuids = [uuid_of(number) for number in numbers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "TIDEMILL_ENGINE__DEVICES": json.dumps(uuids)}


def of_rank(local: int, *numbers: int) -> dict[str, str]:
    visible = ",".join(uuid_of(number) for number in numbers)
    several = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": str(local), **several}


async def test_up_places_ranks_and_engines(tmp_path: Path) -> None:
    machine, file = Machine(tmp_path, 4), str(write_run(tmp_path))
    machine.hold.touch()
    settings = ("learner.data_parallel=2", "up.engines=2", "engine.devices=[3, 2]", "up.view=plain")
    process = machine.start("up", file, *(word for setting in settings for word in ("--set", setting)))
    try:
        children = {"rank0", "rank1", "feeder", "engine-0", "engine-1"}
        await until(lambda: children <= set(machine.children()) or process.poll() is not None)
        assert process.poll() is None, machine.log
        machine.hold.unlink()
        assert await asyncio.to_thread(process.wait, LIMIT_S) == 0, machine.log
    finally:
        process.kill()
        process.wait()
    assert [machine.devices_of(f"rank{rank}") for rank in (0, 1)] == [of_rank(0, 0, 1), of_rank(1, 0, 1)]
    assert "CUDA_VISIBLE_DEVICES" not in machine.devices_of("feeder")
    assert [machine.devices_of(f"engine-{number}") for number in (0, 1)] == [own(3), own(2)]


def test_up_refuses_a_run_without_enough_devices_before_anything_starts(tmp_path: Path) -> None:
    machine, file = Machine(tmp_path, 2), str(write_run(tmp_path))
    result = machine.run("up", file, "--set", "up.engines=2")
    assert result.returncode == 78
    assert "devices: want 3 devices (1 for ranks, 2 x 1 for engines), got 2 visible (0, 1)" in result.stderr
    assert machine.children() == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("gpus", "first"), [(3, of_rank(0, 2, 0)), (None, {"LOCAL_RANK": "0"})])
async def test_a_learner_states_its_devices(
    nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path, gpus: int | None, first: dict[str, str]
) -> None:
    """With devices by hand; and on a machine without any, where nothing about devices is in the environment."""
    machine, file = Machine(tmp_path, gpus), str(write_run(tmp_path))
    async with open_bus() as bus:
        machine.hold.touch()
        ranks = ["--set", "learner.data_parallel=2", *(["--set", "learner.devices=[2, 0]"] if gpus else [])]
        words = ("learner", "--config", file, "--bus", nats_server.url, "--set", f"run={bus.run}", "--checked", *ranks)
        process = machine.start(*words)
        try:
            # The row of its start comes first, and has none.
            stated = (await _row(LiveView(bus), "learner", process, lambda row: row.phase != "starting")).capabilities
            machine.hold.unlink()
            assert await asyncio.to_thread(process.wait, LIMIT_S) == 0, machine.log
        finally:
            process.kill()
            process.wait()
    assert machine.devices_of("rank0") == first
    assert machine.devices_of("rank1") == first | {"LOCAL_RANK": "1"}
    if gpus:
        assert f"devices ranks={uuid_of(2)},{uuid_of(0)}" in machine.log
    both = Capabilities(devices=(uuid_of(0), uuid_of(2)), nccl="2.29.7", device_memory_bytes=MIB << 20)
    assert stated == (both if gpus else Capabilities())


async def test_an_agent_of_a_node_states_its_devices(
    nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path
) -> None:
    """Before the other node is there: in its live row what pushes need, in its row for the leader what must be
    equal.
    """
    machine, file = Machine(tmp_path, 2), str(write_run(tmp_path))
    async with open_bus() as bus:
        words = ("--bus", nats_server.url, "--set", f"run={bus.run}", "--checked", "--set", "learner.data_parallel=4")
        process = machine.start("learner", "--config", file, *words, "--nodes", "2", "--node-rank", "0")
        try:
            row = await _row(LiveView(bus), "learner", process, lambda row: bool(row.waits_for))
            offered, _ = await bus.rows("run").read("node.0")
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, LIMIT_S)
    used = (uuid_of(0), uuid_of(1))
    assert row.capabilities == Capabilities(devices=used, nccl="2.29.7", device_memory_bytes=MIB << 20)
    assert offered is not None and offered["versions"]["NCCL"] == "2.29.7"  # type: ignore[index]


async def test_a_host_gives_its_engines_what_the_learner_leaves(
    nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path
) -> None:
    """Two of three GPUs: the learner's row names the first. The third engine is not started, and the host's row has the
    reason.

    A row that the first engine has left behind, in an earlier start of the host, keeps no device from it.
    """
    machine = Machine(tmp_path, 3)
    async with open_bus() as bus:
        await bus.rows("run").put("config", {"engine": {"devices": ["7"]}})
        row = LiveRow(
            role="learner",
            id="learner",
            host="h",
            pid=1,
            phase="working",
            capabilities=Capabilities(devices=(uuid_of(0),)),
        )
        left = replace(row, role="engine", id="engine-h-0", capabilities=Capabilities(devices=(uuid_of(1),)))
        async with HeartbeatPublisher(bus, row) as heartbeat, HeartbeatPublisher(bus, left) as earlier:
            for publisher in (heartbeat, earlier):
                publisher.update()
                await publisher.stored()
            words = [
                "host",
                "--bus",
                nats_server.url,
                "--run",
                bus.run,
                "--name",
                "h",
                "--dir",
                str(tmp_path / "h"),
                "engines=3",
            ]
            process = machine.start(*words)
            try:
                reason = (
                    await _row(LiveView(bus), "host", process, lambda row: "not started" in row.waits_for)
                ).waits_for
                # A started child writes its file as soon as its interpreter runs.
                await until(lambda: len(machine.children()) >= 2 or process.poll() is not None)
                assert process.poll() is None, machine.log
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, LIMIT_S)
    assert "engine-h-2 not started: engine: want 1 free device(s), got none free of 3 visible (0, 1, 2)" in reason
    assert {name: machine.devices_of(name) for name in machine.children()} == {
        "engine-h-0": own(1),
        "engine-h-1": own(2),
    }


@pytest.mark.parametrize(
    ("settings", "learner_host", "why"),
    [
        (
            {},
            "elsewhere",
            r"engine-h-0 not started: memory of device 0: want 0\.0 GB \(0\.0 GB for 1 engine\(s\); .*95% of it",
        ),
        (
            {"weights": {"bucket_bytes": 1 << 60}},
            "",
            r"not started: /dev/shm: want .* GB free for the largest bucket of 1 SGLang server",
        ),
        pytest.param({"weights": {"bucket_bytes": 1 << 60}}, "elsewhere", "", marks=pytest.mark.slow),
    ],
    ids=["device", "shared memory", "shared memory of another machine"],
)
async def test_a_host_starts_no_engine_without_memory(
    nats_server: EmbeddedServer,
    open_bus: BusOpener,
    tmp_path: Path,
    settings: dict[str, Any],
    learner_host: str,
    why: str,
) -> None:
    """On its device for the run's model; or in /dev/shm, if the learner is on the same machine by its live row."""
    machine = Machine(tmp_path, 1)
    small = "" if settings else "16 MiB"
    if small:
        fake_nvidia_smi(tmp_path / "bin", script=f"echo '{gpu_row(0, memory=small)}'")
    model = {"path": str(write_model(tmp_path / "model", vocab_size=200_000))}
    settings = {**settings, "weights": {"transport": "handles", **settings.get("weights", {})}}
    async with open_bus() as bus:
        await bus.rows("run").put(
            "config", {"engine": {"kind": "sglang"} if not small else {}, "model": model, **settings}
        )
        row = LiveRow(role="learner", id="learner", host=learner_host or socket.gethostname(), pid=1, phase="working")
        async with HeartbeatPublisher(bus, row) as heartbeat:
            heartbeat.update()
            await heartbeat.stored()
            words = [
                "host",
                "--bus",
                nats_server.url,
                "--run",
                bus.run,
                "--name",
                "h",
                "--dir",
                str(tmp_path / "h"),
                "engines=1",
            ]
            process = machine.start(*words)
            try:

                async def decided() -> bool:
                    return bool(machine.children() or "not started" in await waits_for())

                async def waits_for() -> str:
                    return " ".join([row.waits_for for row in await LiveView(bus).alive("host")])

                await until(decided, alive=lambda: process.poll() is None)
                assert re.search(why, found := await waits_for()), found
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, LIMIT_S)
    assert machine.children() == ([] if why else ["engine-h-0"])


async def _row(
    view: LiveView, role: str, process: "subprocess.Popen[bytes]", right: Callable[[LiveRow], bool]
) -> LiveRow:
    """Return the first live row of a role that is ``right``."""

    async def those() -> list[LiveRow]:
        return [row for row in await view.alive(role) if right(row)]

    row: LiveRow = (await until(those, alive=lambda: process.poll() is None))[0]
    return row
