"""A run of four containers on four machines, read-only, as user 1000; three of them are killed: 0 lost, 0 twice."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import PROGRAMS, Container, Podman
from tests.net.lab import Lab, why_not
from tests.waits import LIMIT_S, poll

pytestmark = pytest.mark.slow
STEPS = 30
PORT = 4222


@pytest.fixture
def podman(request: pytest.FixtureRequest) -> Podman:
    store = request.config.getoption("--image-store")
    if not store:
        pytest.skip("want --image-store DIR, where our images are (make test-images)")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"want {', '.join(missing)} (make programs-images)")
    if why_not():
        pytest.skip(why_not())
    return Podman(Path(store).resolve())


class Site:
    """The containers of one run, each on a machine of its own."""

    def __init__(self, podman: Podman, lab: Lab, directory: Path) -> None:
        self.podman, self.lab = podman, lab
        self.url = f"nats://{lab['bus'].address}:{PORT}"
        self.containers: list[Container] = []
        self.disks = {name: directory / name for name in ("bus", "learner")}
        for disk in self.disks.values():
            disk.mkdir()
            os.chown(disk, 1000, 1000)

    def start(self, name: str, role: str, *words: str) -> Container:
        """Start a container; bus and learner have a volume, the others nothing but memory."""
        machine = self.lab[name.partition("-")[0]]
        disk = self.disks.get(machine.name)
        volumes = {disk: "/run/tidemill"} if disk is not None else {}
        name = f"tidemill-test-{os.getpid()}-{name}"
        self.containers.append(Container.start(self.podman, name, role, machine, *words, volumes=volumes))
        return self.containers[-1]

    def configured(self, *words: str) -> list[str]:
        settings = (f"learner.steps={STEPS}", "learner.checkpoint_every=5", "bus.insecure=true")
        return [*words, *(word for setting in settings for word in ("--set", setting))]

    def logs(self) -> str:
        return "\n".join(f"== {container.name}\n{container.log()}" for container in self.containers)


@pytest.fixture
def site(podman: Podman, tmp_path: Path) -> Iterator[Site]:
    with Lab(tmp_path, "bus", "learner", "engine", "actor") as lab:
        site = Site(podman, lab, tmp_path)
        try:
            yield site
        finally:
            for container in reversed(site.containers):
                container.remove()


def test_four_containers_make_a_run(site: Site) -> None:
    smoke = ("--config", "smoke")
    at = (f"bus.host={site.lab['bus'].address}", f"bus.port={PORT}")
    bus = site.start(
        "bus", "actor", *site.configured("bus", *smoke), *(word for text in at for word in ("--set", text))
    )
    prepare = site.start("learner-prepare", "learner", *site.configured("prepare", "smoke"))
    assert prepare.wait() == 0, site.logs()
    learner = site.start("learner", "learner", *site.configured("learner", *smoke), "--bus", site.url)
    engine = site.start("engine", "engine", "engine", "--bus", site.url, "--id", "engine-0")
    actor = site.start("actor", "actor", "actor", "--bus", site.url, "--id", "actor-0")
    steps = site.disks["learner"] / "runs/smoke/checkpoints"
    for step, victim in ((5, engine), (10, actor), (15, learner)):
        poll(lambda step=step: has_checkpoint(steps, step), every_s=0.1, timeout_s=LIMIT_S)
        victim.kill()
        victim.start_again()
    assert learner.wait() == 0, site.logs()
    assert {container.name: container.stop() for container in (actor, engine)} == {actor.name: 0, engine.name: 0}
    words = ("audit", "--bus", site.url, "--checkpoints", "/run/tidemill/runs/smoke/checkpoints")
    audit = site.start("learner-audit", "actor", *words)
    assert audit.wait() == 0, audit.log()
    assert bus.stop() == 0, bus.log()


def has_checkpoint(directory: Path, step: int) -> bool:
    """Return whether a checkpoint of this step or a later one is there."""
    return any(int(path.name.split("-")[1]) >= step for path in directory.glob("step-*"))
