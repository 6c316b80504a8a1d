"""The commands of the units, and of the file of SkyPilot, with their environments: a run with 0 lost and 0 twice."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.units import UNITS, command, unit
from tests.launched import run_tidemill
from tests.template import ROOT
from tests.waits import LIMIT_S, poll
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.server.auth import PASSWORD_VARIABLE, USER_VARIABLE, read_credentials
from tidemill.bus.system.processes import die_with_parent

pytestmark = pytest.mark.slow
RUN = "smoke"
SKY = ROOT / "launch/deploy/skypilot/workers.yaml"
BIN = Path(sys.executable).parent
"""Directory of the command, in place of /opt/tidemill/bin."""


class Machine:
    """A machine with systemd, in a directory of the test: its ``/etc`` and ``/var/lib``."""

    def __init__(self, directory: Path) -> None:
        self.etc, self.state = directory / "etc", directory / "lib"
        self.work = self.state / "tidemill" / RUN
        for folder in (self.etc, self.work):
            folder.mkdir(parents=True)
        with KeptPort() as port:
            self.url = f"nats://127.0.0.1:{port.number}"
        config = yaml.safe_load((ROOT / "launch/configs/smoke.yaml").read_text())
        config["bus"] |= {"host": "127.0.0.1", "port": port.number}
        config["engine"] |= {"device": "cpu"}
        (self.etc / f"{RUN}.yaml").write_text(yaml.safe_dump(config))
        self.variables = {"BUS": self.url, "WORKERS": "engines=1 actors=1"}
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str], environment: Mapping[str, str], name: str) -> "subprocess.Popen[bytes]":
        """Start a command with this environment alone."""
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, cwd=self.work, env=dict(environment), stdout=log, stderr=log, preexec_fn=die_with_parent()
            )
        self.started.append(process)
        return process

    def start_unit(self, role: str) -> "subprocess.Popen[bytes]":
        """Run ``ExecStartPre`` of a unit, and start its ``ExecStart``."""
        service = unit(UNITS / f"tidemill-{role}@.service")["Service"]
        declared = dict(word.split("=", 1) for word in service["Environment"].split())
        environment = {**declared, "PATH": declared["PATH"].replace("/opt/tidemill/bin", str(BIN)), **self.variables}
        lines = [
            service[name].replace("/etc/tidemill", str(self.etc))
            for name in ("ExecStartPre", "ExecStart")
            if name in service
        ]
        for line in lines[:-1]:
            words = command(line, RUN, self.state, environment)
            assert self.start(words, environment, f"{role}-pre").wait(LIMIT_S) == 0, self.logs()
        return self.start(command(lines[-1], RUN, self.state, environment), environment, role)

    def start_sky(self) -> "subprocess.Popen[bytes]":
        """Start the ``run`` section of SkyPilot's file, in a home directory where ``setup`` has been."""
        task = yaml.safe_load(SKY.read_text())
        home = self.state / "home"
        (home / "tidemill").mkdir(parents=True)
        (home / "tidemill/bin").symlink_to(BIN)
        declared = {name: str(value or "") for name, value in {**task["envs"], **task["secrets"]}.items()}
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), **declared, **self.variables}
        return self.start(["bash", "-c", task["run"]], environment, "sky")

    def audit(self) -> "subprocess.CompletedProcess[str]":
        words = ["audit", "--bus", self.url, "--checkpoints", str(self.work / "runs/smoke/checkpoints")]
        return subprocess.run(
            [BIN / "tidemill", *words], capture_output=True, text=True, timeout=LIMIT_S, cwd=self.work
        )

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in self.state.rglob("*.log"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for process in machine.started:
        if process.poll() is None:
            process.terminate()
            process.wait(LIMIT_S)


def start_host(machine: Machine) -> "subprocess.Popen[bytes]":
    return machine.start_unit("host")


@pytest.mark.parametrize("workers", [start_host, Machine.start_sky])
def test_the_commands_make_a_run_on_a_bus_with_users(
    machine: Machine, workers: Callable[[Machine], "subprocess.Popen[bytes]"]
) -> None:
    file = machine.etc / f"{RUN}.yaml"
    config = yaml.safe_load(file.read_text())
    config["bus"]["auth"] = True
    file.write_text(yaml.safe_dump(config))
    machine.start_unit("bus")
    auth, users, of_learner = machine.work / "runs/smoke/auth", machine.work / "users", machine.variables
    poll((machine.work / "runs/smoke/bus.url").exists)
    users.mkdir()
    for name in ("engine-0.env", "actor-0.env"):
        shutil.copy(auth / name, users)
    user, password = read_credentials(auth / "host-0.env")
    of_host = {"WORKERS": f"--users {users} engines=1 actors=1", USER_VARIABLE: user, PASSWORD_VARIABLE: password}
    machine.variables = of_learner | of_host
    host = workers(machine)
    machine.variables = of_learner
    assert machine.start_unit("learner").wait(LIMIT_S) == 0, machine.logs()
    assert host.wait(LIMIT_S) == 0, machine.logs()
    done = run_tidemill("audit", "--run-dir", str(machine.work / "runs/smoke"))
    assert done.returncode == 0, done.output


@pytest.mark.parametrize("workers", [start_host, Machine.start_sky])
def test_the_commands_make_a_run(machine: Machine, workers: Callable[[Machine], "subprocess.Popen[bytes]"]) -> None:
    bus = machine.start_unit("bus")
    host = workers(machine)
    learner = machine.start_unit("learner")
    assert learner.wait(LIMIT_S) == 0, machine.logs()
    assert host.wait(LIMIT_S) == 0, machine.logs()  # it ends with the run
    done = machine.audit()
    assert done.returncode == 0, done.stdout + done.stderr
    bus.send_signal(signal.SIGTERM)
    assert bus.wait(LIMIT_S) == 0, machine.logs()
