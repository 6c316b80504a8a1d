"""A learner whose ranks are processes of a launcher: real torchrun and mpirun, Kubeflow's command and variables, and
the variables of srun by hand.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests.chaos.parts import PATIENCE_S, Parts, parts
from tests.chaos.test_instants import new_steps
from tests.chaos.test_nodes import _running as running
from tests.forked import Forked
from tests.launched import run_tidemill, tidemill
from tests.programs import PACKAGES
from tests.template import ROOT
from tests.unhurried import UNHURRIED
from tests.whole.prepared import made
from tests.whole.running import SMOKE, until_step
from tidemill.bus.client.addresses import KeptPort
from tidemill.launch.run.run_end import end_of

ENDLESS = ("learner.steps=1000000", "learner.checkpoint_every=3", "bus.lease_s=5", UNHURRIED)


PROGRAMS = Path(sys.executable).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python")
MPI = {
    "mpirun.openmpi": "--allow-run-as-root --map-by ppr:2:node --host 127.0.0.2:2,127.0.0.3:2 --mca plm_rsh_agent",
    "mpirun.mpich": "-ppn 2 -hosts 127.0.0.2,127.0.0.3 -launcher ssh -launcher-exec",
}
"""Options for two nodes of two processes on this machine, to be followed by a program in the place of ssh."""
TRAIN_JOB = ROOT / "launch/deploy/kubernetes/trainjob.yaml"


def words(run: Parts, *options: str) -> list[str]:
    settings = [word for setting in (f"directory={run.root}", *run.settings) for word in ("--set", setting)]
    return ["learner", "--config", str(SMOKE), "--bus", run.url, *settings, *options]


@contextmanager
def srun(run: Parts, nodes: int, per_node: int, *options: str) -> Iterator[list[Forked]]:
    """Start learners as ``srun --nodes=N --ntasks-per-node=P`` does, on this machine; kill those that are left."""
    started: list[Forked] = []
    for rank in range(nodes * per_node):
        variables = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": rank // per_node}
        variables |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NNODES": nodes}
        variables |= {"SLURM_STEP_NUM_TASKS": nodes * per_node, "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})"}
        environment = {name: str(value) for name, value in variables.items()} | {"PYTHONUNBUFFERED": "1"}
        log = run.directory / f"task-{rank}.log"
        started.append(tidemill(*words(run, *options), output=log, environment=environment))
    try:
        yield started
    finally:
        for process in started:
            process.kill()


async def codes(started: list[Forked], run: Parts) -> list[int]:
    """Return the exit codes of all. A process that stays is named with its log."""
    try:
        return [await asyncio.to_thread(process.wait, PATIENCE_S) for process in started]
    except TimeoutError:
        logs = "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in run.directory.glob("task-*.log"))
        raise AssertionError(logs) from None


def rank_of(run: Parts, rank: int) -> psutil.Process:
    """Return the process of a rank, the last that was started."""
    log = (run.directory / f"task-{rank}.log").read_text()
    return psutil.Process(int(re.findall(rf"started child=rank {rank} pid=(\d+)", log)[-1]))


@pytest.fixture(autouse=True)
def prepared(fork_server: None) -> None:
    """Make model and prompts once, before an event loop that must not be blocked runs."""
    made(SMOKE)


async def trained(run: Parts, commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> str:
    """Run commands beside each other to their ends, which must be good, as the accounting; return their output."""

    async def completed(command: Sequence[str], given: Mapping[str, str]) -> tuple[int, str]:
        environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", **given}
        log = run.directory / f"launched-{environment.get('PET_NODE_RANK', '')}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(PATIENCE_S):
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        return code, log.read_text()

    ends = await asyncio.gather(*(completed(*start) for start in zip(commands, variables, strict=True)))
    output = "\n".join(text for _, text in ends)
    assert [code for code, _ in ends] == [0] * len(commands), output[-6000:]
    audit = await asyncio.to_thread(run_tidemill, "audit", "--bus", run.url)
    assert audit.returncode == 0, audit.output
    return output


@pytest.mark.slow
async def test_torchrun_starts_the_ranks_and_they_end_as_one(tmp_path: Path) -> None:
    with parts(tmp_path, "learner.steps=4", "learner.data_parallel=2") as run:
        await run.begin("engine", "actor")
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "tidemill", *words(run)]
        output = await trained(run, [command], [{}])
        assert re.search(r"local rank 1: .*started child=rank 1", output), output[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("program", MPI)
async def test_mpirun_starts_two_ranks_on_each_of_two_nodes(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"want {program}: {PACKAGES[program]} (make programs)")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = -x ] && shift\nshift\nexec sh -c "$*"\n')  # [-x] HOST COMMAND
    ssh.chmod(0o755)
    with parts(tmp_path, "learner.steps=4", "learner.data_parallel=4", "learner.checkpoint.store=shared") as run:
        await run.begin("engine", "actor")
        command = [program, "-n", "4", *MPI[program].split(), str(ssh), str(PROGRAMS / "tidemill"), *words(run)]
        output = await trained(run, [command], [{}])
        assert set(re.findall(r"started child=rank (\d)", output)) == set("0123"), output[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["agent", "torchrun"])
async def test_a_train_job_of_kubeflow_starts_a_rank_in_each_of_two_pods(
    launcher: Sequence[str], tmp_path: Path
) -> None:
    """The command of the file, with the variables of Kubeflow's plugin for torch (pkg/runtime/framework/plugins/torch);
    also behind torchrun.
    """
    trainer = yaml.safe_load(TRAIN_JOB.read_text())["spec"]["trainer"]
    with parts(tmp_path, "learner.steps=4", "learner.data_parallel=2", "learner.checkpoint.store=shared") as run:
        await run.begin("engine", "actor")
        with KeptPort() as port:
            shared = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port.number)}
        shared |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1"}
        pods = [shared | {"PET_NODE_RANK": str(node), "JOB_COMPLETION_INDEX": str(node)} for node in (0, 1)]
        program = [*launcher, *trainer["command"][: 2 if launcher else None]]
        await trained(run, [[*program, *words(run)[1:]]] * 2, pods)


@pytest.mark.slow
async def test_two_nodes_of_two_processes_lose_a_rank_are_drained_and_go_on(tmp_path: Path) -> None:
    with parts(tmp_path, *ENDLESS, "learner.data_parallel=4", "learner.checkpoint.store=shared") as run:
        await run.begin("engine", "actor")
        async with run.bus() as bus:
            with srun(run, 2, 2, "--drained-code", "99") as started:
                first = await running(bus, 0)
                await new_steps(bus, 2)
                rank_of(run, 3).kill()
                await running(bus, first.epoch)
                await new_steps(bus, 2)
                assert [process.returncode for process in started] == [None] * 4
                for process in (started[0], started[3]):  # one on each node, also one that is no agent
                    process.send_signal(signal.SIGTERM)
                assert await codes(started, run) == [99] * 4
            assert await end_of(bus) is None
            with srun(run, 2, 2) as started:
                await new_steps(bus, 1)
                started[3].kill()  # no other process can be the parent of its rank
                assert set(await codes(started[:3], run)) == {1}
        assert (await asyncio.to_thread(run_tidemill, "audit", "--bus", run.url)).returncode == 0


@pytest.mark.slow
async def test_processes_of_one_node_end_with_one_code(tmp_path: Path) -> None:
    """A killed rank; a killed process of local rank 0; settings that no restart cures; the last step."""
    with parts(tmp_path, "learner.data_parallel=2", "learner.checkpoint_every=1", UNHURRIED) as run:
        await run.begin("engine", "actor")
        run.settings += ("learner.steps=1000000",)
        async with run.bus() as bus:
            with srun(run, 1, 2) as started:
                await until_step(bus, 1)
                rank_of(run, 1).kill()
                assert await codes(started, run) == [1, 1]
            with srun(run, 1, 2) as started:
                await new_steps(bus, 1)
                rank = rank_of(run, 1)
                started[0].kill()
                assert await codes(started[1:], run) == [1]
                assert not rank.is_running()
            run.settings += ("model.path=/none",)
            with srun(run, 1, 2) as started:
                assert await codes(started, run) == [78, 78]
            run.settings = (*run.settings[:-2], "learner.steps=1")
            with srun(run, 1, 2) as started:
                assert await codes(started, run) == [0, 0]
