"""Containers of our images: by podman, on the machines of a lab, as little allowed as docs/images.md has it.

The options of podman beside those of the page are for machines without cgroups v2, iptables or a daemon.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.net.lab import Machine
from tests.waits import LIMIT_S

PROGRAMS = ("podman", "runc")
ROLES = ("actor", "engine", "learner")
LIMITED = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--user=1000:1000")
DRAIN_S = 60
LIFE_S = 900
"""Seconds after which podman ends a container that a killed test has left over."""


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with a storage. A container is in the network namespace of the podman that starts it."""

    store: Path
    """Directory of images and containers: that of `make images`, or one of a user."""
    volumes: Path
    """Directory in which volumes are made."""
    owner: int = 1000
    """The number that the containers' user has outside of them."""
    prefix: tuple[str, ...] = ()
    """How a command becomes one of another user."""
    tmpfs: str = "mode=1777"

    def __call__(self, *words: str, check: bool = True, machine: Machine | None = None) -> str:
        """Run a command; return its output. Raises AssertionError with its errors."""
        places = ("--root", f"{self.store}/store", "--runroot", f"{self.store}/run", "--storage-driver", "overlay")
        enter = ("nsenter", f"--net=/proc/{machine.init}/ns/net", "--") if machine is not None else ()
        command = (*enter, *self.prefix, "podman", *places, "--cgroup-manager=cgroupfs", "--runtime=runc", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd="/")
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout + ("" if check else done.stderr)

    def volume(self, name: str) -> Path:
        """Return a new directory that the containers' user owns."""
        directory = self.volumes / name
        directory.mkdir()
        os.chown(directory, self.owner, self.owner)
        return directory

    def options(self, volumes: Mapping[Path, str]) -> list[str]:
        """Options of a container. ``volumes``: directories, and where the container has them."""
        places = [f"--volume={directory}:{place}" for directory, place in volumes.items()]
        memory = ["/tmp"] if "/run/tidemill" in volumes.values() else ["/tmp", "/run/tidemill"]
        tmpfs = ["--read-only-tmpfs=false", *(f"--tmpfs={place}:{self.tmpfs}" for place in memory)]
        limits = ["--ulimit=nofile=20000:20000", "--ulimit=nproc=5000:5000", f"--timeout={LIFE_S}"]
        return [*LIMITED, *limits, "--network=host", f"--stop-timeout={DRAIN_S}", *places, *tmpfs]


def why_not_rootless(user: str) -> str:
    """Return why this user cannot have containers; empty if it can."""
    if shutil.which("newuidmap") is None:
        return "want newuidmap (make programs-images)"
    if not any(line.startswith(f"{user}:") for line in Path("/etc/subuid").read_text().splitlines()):
        return f"want a user {user} with numbers in /etc/subuid (make programs-images)"
    return ""


@contextmanager
def rootless(root: Podman, user: str) -> Iterator[Podman]:
    """Yield podman as an ordinary user, in whose storage our images are; at the end nothing is left of it."""
    (first,) = [line.split(":")[1] for line in Path("/etc/subuid").read_text().splitlines() if f"{user}:" in line]
    number = pwd.getpwnam(user).pw_uid
    directory = Path(tempfile.mkdtemp(prefix="tidemill-rootless-", dir="/var/tmp"))
    variables = (f"HOME={directory}", f"XDG_RUNTIME_DIR={directory}/xdg", f"PATH={os.environ['PATH']}")
    prefix = ("setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "env", "-i", *variables)
    # runc may copy no file of the image into a tmpfs without capabilities
    podman = Podman(directory, directory, int(first) + 999, prefix, "mode=1777,notmpcopyup")
    try:
        os.chown(directory, number, number)
        (directory / "xdg").mkdir(mode=0o700)
        os.chown(directory / "xdg", number, number)
        for role in ROLES:
            archive = directory / f"{role}.tar"
            root("save", "--quiet", f"--output={archive}", f"localhost/tidemill-{role}")
            archive.chmod(0o644)
            podman("load", "--quiet", f"--input={archive}")
            archive.unlink()
        yield podman
    finally:
        with contextlib.suppress(OSError, ValueError):  # the process that keeps the user's namespace
            os.kill(int((directory / "xdg/libpod/tmp/pause.pid").read_text()), signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Container:
    """A container, from ``start`` to ``remove``."""

    podman: Podman
    name: str
    machine: Machine

    @classmethod
    def start(
        cls, podman: Podman, name: str, role: str, machine: Machine, *words: str, volumes: Mapping[Path, str]
    ) -> "Container":
        run = ("run", "--detach", f"--name={name}", *podman.options(volumes), f"localhost/tidemill-{role}", *words)
        podman(*run, machine=machine)
        return cls(podman, name, machine)

    def kill(self) -> None:
        """Kill its processes, and wait for their end."""
        self.podman("kill", "--signal=KILL", self.name)
        self.podman("wait", self.name)

    def start_again(self) -> None:
        self.podman("start", self.name, machine=self.machine)

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
