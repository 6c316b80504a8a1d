"""Runs of containers on four machines, read-only, as user 1000, some or all of which are killed: 0 lost, 0 twice."""

import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.containers import PROGRAMS, Container, Podman, rootless, why_not_rootless
from tests.net.lab import Lab, why_not
from tests.waits import LIMIT_S, poll

STEPS = 30
BLOWS, SEED = 10, 7
PORT = 4222
USER = "tidemill-test"
"""An ordinary user, whom `make programs-images` makes."""


@pytest.fixture
def podman(request: pytest.FixtureRequest, tmp_path: Path) -> Podman:
    store = request.config.getoption("--image-store")
    if not store:
        pytest.skip("want --image-store DIR, where our images are (make test-images)")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"want {', '.join(missing)} (make programs-images)")
    if why_not():
        pytest.skip(why_not())
    return Podman(Path(store).resolve(), tmp_path)


class Site:
    """The containers of one run, each on a machine of its own."""

    def __init__(self, podman: Podman, lab: Lab, steps: int) -> None:
        self.podman, self.lab, self.steps = podman, lab, steps
        self.url = f"nats://{lab['bus'].address}:{PORT}"
        self.containers: list[Container] = []
        self.disks = {name: podman.volume(name) for name in ("bus", "learner")}

    def start(self, name: str, role: str, *words: str) -> Container:
        """Start a container; bus and learner have a volume, the others nothing but memory."""
        machine = self.lab[name.partition("-")[0]]
        disk = self.disks.get(machine.name)
        volumes = {disk: "/run/tidemill"} if disk is not None else {}
        name = f"tidemill-test-{os.getpid()}-{name}"
        self.containers.append(Container.start(self.podman, name, role, machine, *words, volumes=volumes))
        return self.containers[-1]

    def configured(self, *words: str) -> list[str]:
        settings = (f"learner.steps={self.steps}", "learner.checkpoint_every=5", "bus.insecure=true")
        return [*words, *(word for setting in settings for word in ("--set", setting))]

    def run(self, *workers: str) -> dict[str, Container]:
        """Start bus, learner and workers, the latter named ROLE-NUMBER; return their containers."""
        smoke = ("--config", "smoke")
        at = (f"bus.host={self.lab['bus'].address}", f"bus.port={PORT}")
        address = [word for setting in at for word in ("--set", setting)]
        started = {"bus": self.start("bus", "actor", *self.configured("bus", *smoke), *address)}
        prepare = self.start("learner-prepare", "learner", *self.configured("prepare", "smoke"))
        assert prepare.wait() == 0, self.logs()
        learner = self.configured("learner", *smoke)
        started["learner"] = self.start("learner", "learner", *learner, "--bus", self.url)
        for name in workers:
            role = name.partition("-")[0]
            started[name] = self.start(name, role, role, "--bus", self.url, "--id", name)
        return started

    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        steps = self.disks["learner"].glob("runs/smoke/checkpoints/step-*")
        return max((int(path.name.split("-")[1]) for path in steps), default=0)

    def until_step(self, step: int) -> None:
        poll(lambda: self.step() >= step, every_s=0.1, timeout_s=LIMIT_S)

    def kill(self, *victims: Container) -> None:
        """Kill containers, and start them again when all are dead."""
        for container in victims:
            container.kill()
        for container in victims:
            container.start_again()

    def seconds_of_steps(self, count: int) -> float:
        """Return the seconds in which the next steps are done."""
        began_s = time.monotonic()
        self.until_step(self.step() + count)
        return time.monotonic() - began_s

    def end(self, started: dict[str, Container]) -> None:
        """Wait for the end of the learner, drain the others, and check the accounting."""
        assert started["learner"].wait() == 0, self.logs()
        workers = [name for name in started if name not in ("bus", "learner")]
        assert {name: started[name].stop() for name in workers} == dict.fromkeys(workers, 0)
        words = ("audit", "--bus", self.url, "--checkpoints", "/run/tidemill/runs/smoke/checkpoints")
        audit = self.start("learner-audit", "actor", *words)
        assert audit.wait() == 0, audit.log()
        assert started["bus"].stop() == 0, started["bus"].log()

    def logs(self) -> str:
        return "\n".join(f"== {container.name}\n{container.log()}" for container in self.containers)


@contextmanager
def site(podman: Podman, directory: Path, steps: int) -> Iterator[Site]:
    """Yield a site of four machines, whose containers are removed at the end."""
    with Lab(directory, "bus", "learner", "engine", "actor") as lab:
        place = Site(podman, lab, steps)
        try:
            yield place
        finally:
            for container in reversed(place.containers):
                container.remove()


@pytest.mark.slow
def test_four_containers_make_a_run(podman: Podman, tmp_path: Path) -> None:
    check_a_run(podman, tmp_path)


@pytest.mark.slow
def test_four_containers_of_an_ordinary_user_make_a_run(podman: Podman, tmp_path: Path) -> None:
    if why_not_rootless(USER):
        pytest.skip(why_not_rootless(USER))
    with rootless(podman, USER) as podman_of_user:
        check_a_run(podman_of_user, tmp_path)


def check_a_run(podman: Podman, directory: Path) -> None:
    """Three of four containers are killed."""
    with site(podman, directory, STEPS) as place:
        started = place.run("engine-0", "actor-0")
        for step, victim in ((5, "engine-0"), (10, "actor-0"), (15, "learner")):
            place.until_step(step)
            place.kill(started[victim])
        place.end(started)


@pytest.mark.slow
def test_a_storm_over_containers_and_all_engines_lost_at_once(podman: Podman, tmp_path: Path) -> None:
    """The next blow comes a random number of steps after the one before. At the end the learner is drained."""
    chosen = random.Random(SEED)
    with site(podman, tmp_path, 1_000_000) as place:
        started = place.run("engine-0", "engine-1", "actor-0", "actor-1")
        for _ in range(BLOWS):
            place.until_step(place.step() + chosen.randrange(5, 15))
            place.kill(*(started[name] for name in chosen.sample(sorted(started), chosen.choice((1, 1, 2)))))
        place.until_step(place.step() + 10)
        before_s = place.seconds_of_steps(20)
        place.kill(started["engine-0"], started["engine-1"])
        after_s = [place.seconds_of_steps(20) for _ in range(5)]
        print(f"20 steps took {before_s:.1f} s before, and after it {after_s} s", file=sys.stderr)
        assert min(after_s) < 2 * before_s
        assert started["learner"].stop() == 0, place.logs()
        place.end(started)
