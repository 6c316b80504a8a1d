"""What a release has, in environments of its own outside the checkout: the commands find configurations and data by
name, beside files of the user with the names of ours.

One environment has the packages that the wheel declares, from the index, and no others. The other one, which trains,
has the gigabytes of this environment, without the checkout that is installed in it.
"""

import json
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.built import ROOT, VERSION, build, environment, wheel
from tests.skips import skip_without_index
from tidemill.launch.settings.extras import EXTRAS

OF_OTHERS = {"triton", "verifiers"}
"""Packages that no extra has: one comes with torch for GPUs, and one cannot live with ours (docs/rollouts.md)."""
MISSING = """
import importlib, json, pkgutil, tidemill
missing = {}
for module in pkgutil.walk_packages(tidemill.__path__, "tidemill."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps(missing))
"""
RAISES = "raise RuntimeError('a file of the working directory was imported in place of ' + __name__)\n"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def program(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, installed from the wheel."""
    directory = new_environment(tmp_path_factory.mktemp("program") / "venv")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
    # A line of a .pth file adds a directory, and none of its .pth files: the editable installation stays out
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "bin/nats-server").symlink_to(Path(sys.executable).with_name("nats-server"))
    done = install(directory, wheel(dist), "--no-deps")
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "bin/tidemill"


@pytest.fixture(scope="module")
def bare(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, installed from the wheel with the packages that it declares."""
    directory = new_environment(tmp_path_factory.mktemp("bare") / "venv")
    done = install(directory, wheel(dist), "--constraint", ROOT / "constraints.txt")
    if done.returncode:
        skip_without_index(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "bin/tidemill"


def new_environment(directory: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    return directory


def install(directory: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ("-m", "pip", "--python", directory / "bin/python", "install", "--quiet", "--no-compile", *words)
    return subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory whose files have the names of ours, and would raise."""
    for name in ("actors", "bus", "learner", "rewards", "types", "queue"):
        (tmp_path / f"{name}.py").write_text(RAISES)
    for name in ("launch", "tests", "weightstore", "tidemill"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(RAISES)
    for name in ("digits", "launch/configs", "launch/data/real"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "launch/configs/digits.yaml").write_text("wrong: true")
    (tmp_path / "launch/data/real/train.jsonl").write_text("wrong")
    return tmp_path


def run(program: Path, project: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [program, *words], cwd=project, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "RuntimeError" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_version_is_that_of_the_tag_in_sdist_and_wheel(dist: Path, program: Path, project: Path) -> None:
    assert run(program, project, "--version") == f"tidemill {VERSION}\n"
    with tarfile.open(dist / f"tidemill-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "Makefile", "constraints.txt", "docs/index.md", "tests/built.py"} <= names


def test_commands_find_configurations_by_name(program: Path, project: Path) -> None:
    assert "Asynchronous" in run(program, project, "--help")
    assert "made at the start: digits" in run(program, project, "check", "digits")
    refused = run(program, project, "config", "digts", code=78)
    assert "arithmetic, " in refused and "did you mean digits?" in refused


def test_shipped_data_is_that_of_the_package(program: Path, project: Path) -> None:
    """A configuration of the package has its data; the files of ``init`` are the user's own."""
    assert "site-packages/tidemill/launch/data/real/train.jsonl: " in run(program, project, "data", "check", "real")
    assert "train.jsonl: written" in run(program, project, "init", "real")
    assert "train.jsonl: " in run(program, project, "data", "check", "run.yaml")


def test_a_run_by_name_trains(program: Path, project: Path) -> None:
    settings = ("learner.steps=2", "up.require_reward=0", "learner.groups_per_step=4")
    run(program, project, "up", "digits", *(word for text in settings for word in ("--set", text)))
    assert (project / "runs/digits/final/model.safetensors").exists()


def test_the_packages_that_the_wheel_declares_are_enough(bare: Path, project: Path) -> None:
    assert run(bare, project, "--version") == f"tidemill {VERSION}\n"
    assert "pip download" in run(bare, project, "init", "real")
    assert "240 prompts, 0 errors" in run(bare, project, "data", "check", "real")
    assert "ok      disk" in run(bare, project, "check", "digits")
    lines = run(bare, project, "check", "run.yaml", code=78).splitlines()
    assert len([line for line in lines if line.startswith("error")]) == 1, "the model, which is not made yet"
    assert "pip install 'tidemill[engine]'" in run(bare, project, "up", "digits", code=78)


def test_a_module_lacks_packages_of_extras_alone(bare: Path) -> None:
    """And none in what a bus, an actor and a reward are made of."""
    python = bare.with_name("python")
    done = subprocess.run([python, "-I", "-c", MISSING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in missing.values()} <= OF_OTHERS.union(*EXTRAS.values())
    of_base = ("tidemill.bus.", "tidemill.actors.actor.", "tidemill.rewards.", "tidemill.launch.cli.")
    assert not [module for module in missing if module.startswith(of_base)]
