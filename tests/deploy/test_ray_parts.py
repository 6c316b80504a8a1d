"""What `tidemill ray` asks of a cluster, and the owner of a process, which needs no Ray."""

import sys
from pathlib import Path

from tests.refusals import refusal
from tests.waits import LIMIT_S, poll
from tidemill.bus import exit_codes
from tidemill.launch.deploy.ray_owner import Owner, Program, command_of
from tidemill.launch.deploy.ray_run import Demand
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_paths import CONFIGS


def config(*settings: str) -> RunConfig:
    return load([CONFIGS / "smoke.yaml"], settings, {}).config


def test_the_learners_nodes_have_the_devices_of_their_ranks() -> None:
    demand = Demand.of(config("learner.nodes=2", "learner.data_parallel=8"), devices=64)
    assert demand.bundles == [{"CPU": 2, "GPU": 4}, {"CPU": 1, "GPU": 4}]
    assert demand.options("engine-3", None) == {"num_cpus": 1, "num_gpus": 1}
    assert demand.options("actor-0", None)["num_gpus"] == 0


def test_a_cluster_without_devices_gives_none() -> None:
    demand = Demand.of(config(), devices=0)
    assert demand.bundles == [{"CPU": 2}]
    assert demand.options("engine-0", None)["num_gpus"] == 0


def test_colocated_engines_are_refused() -> None:
    colocated = config("learner.colocated=true", "weights.overlap=false")
    with refusal(ValueError, place="learner.colocated", got="true"):
        Demand.of(colocated, devices=8)


def program(directory: Path, *command: str) -> Program:
    return Program(
        name="a",
        command=command,
        log_file=directory / "logs/a.log",
        environment={"SAID": "from the driver"},
        config_file=directory / "config.yaml",
        config_text="run: a\n",
    )


def test_an_owner_writes_the_configuration_and_returns_the_end(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['SAID']); print('error: no room'); sys.exit(75)"
    owner = Owner(program(tmp_path, sys.executable, "-c", code))
    ended = owner.wait(LIMIT_S)
    assert ended is not None and (ended.code, ended.last_lines) == (75, "from the driver\nerror: no room")
    assert ended.reason == "no room"
    assert (tmp_path / "config.yaml").read_text() == "run: a\n"


def test_an_owner_drains_and_starts_again(tmp_path: Path) -> None:
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15])"
    code = f"{block}; print('up', flush=True); signal.sigwait([15])"
    owner = Owner(program(tmp_path, sys.executable, "-c", code))
    first = owner.pid()
    assert owner.wait(0) is None
    log = tmp_path / "logs/a.log"
    poll(lambda: log.read_text() == "up\n")
    stopped = owner.stop(LIMIT_S)
    assert stopped is not None and stopped.code == 0
    owner.start()
    assert owner.pid() != first
    poll(lambda: log.read_text() == "up\nup\n")
    stopped = owner.stop(LIMIT_S)
    assert stopped is not None and (stopped.code, stopped.last_lines) == (0, "up")  # lines of this start alone


def test_a_program_that_is_not_there_is_a_crash(tmp_path: Path) -> None:
    ended = Owner(program(tmp_path, str(tmp_path / "nowhere"))).wait(0)
    assert ended is not None and ended.code == exit_codes.CRASHED
    assert "nowhere" in ended.reason


def test_the_program_of_the_nodes_may_be_another_one() -> None:
    assert command_of(["bus"], "/opt/tidemill/bin/tidemill") == ["/opt/tidemill/bin/tidemill", "bus"]
    assert command_of(["bus"], "")[0] == sys.executable
