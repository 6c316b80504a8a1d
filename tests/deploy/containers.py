"""Containers of our images: by podman, on the machines of a lab, as little allowed as docs/images.md has it.

The options of podman beside those of the page are for machines without cgroups v2, iptables or a daemon.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.net.lab import Machine
from tests.waits import LIMIT_S

PROGRAMS = ("podman", "runc")
LIMITED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--user=1000:1000", "--tmpfs=/tmp")
DRAIN_S = 60
LIFE_S = 900
"""Seconds after which podman ends a container that a killed test has left over."""


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with the storage in which `make images` has built."""

    store: Path

    def __call__(self, *words: str, check: bool = True) -> str:
        """Run a command; return its output. Raises AssertionError with its errors."""
        places = ("--root", f"{self.store}/store", "--runroot", f"{self.store}/run", "--storage-driver", "overlay")
        command = ("podman", *places, "--cgroup-manager=cgroupfs", "--runtime=runc", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout + ("" if check else done.stderr)

    def options(self, machine: Machine, volumes: Mapping[Path, str]) -> list[str]:
        """Options of a container on a machine. ``volumes``: directories, and where the container has them."""
        places = [f"--volume={directory}:{place}" for directory, place in volumes.items()]
        home = [] if "/run/tidemill" in volumes.values() else ["--tmpfs=/run/tidemill:mode=1777"]
        limits = ["--ulimit=nofile=20000:20000", "--ulimit=nproc=5000:5000", f"--timeout={LIFE_S}"]
        network = [f"--network=ns:/proc/{machine.init}/ns/net", f"--stop-timeout={DRAIN_S}"]
        return [*LIMITED, *limits, *network, *places, *home]


@dataclass(frozen=True, slots=True)
class Container:
    """A container, from ``start`` to ``remove``."""

    podman: Podman
    name: str

    @classmethod
    def start(
        cls, podman: Podman, name: str, role: str, machine: Machine, *words: str, volumes: Mapping[Path, str]
    ) -> "Container":
        podman(
            "run", "--detach", f"--name={name}", *podman.options(machine, volumes), f"localhost/tidemill-{role}", *words
        )
        return cls(podman, name)

    def kill(self) -> None:
        """Kill its processes, and wait for their end."""
        self.podman("kill", "--signal=KILL", self.name)
        self.podman("wait", self.name)

    def start_again(self) -> None:
        self.podman("start", self.name)

    def wait(self) -> int:
        """Return the exit code when it has ended by itself."""
        return int(self.podman("wait", self.name))

    def stop(self) -> int:
        """Drain it by SIGTERM, as `podman stop` does; return the exit code."""
        self.podman("stop", self.name)
        state = json.loads(self.podman("inspect", "--format={{json .State}}", self.name))
        return int(state["ExitCode"])

    def log(self, last: int = 3000) -> str:
        return self.podman("logs", self.name, check=False)[-last:]

    def remove(self) -> None:
        self.podman("rm", "--force", "--time=0", self.name, check=False)
