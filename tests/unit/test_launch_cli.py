"""The command line answers at once, and its errors are clear."""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.waits import LIMIT_S
from tidemill.launch.cli.inputs import reached_at
from tidemill.launch.cli.main import COMMANDS, INNER, command_parser, inner_parser, main

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ROOT / "tests/data/command_line.json"
"""Arguments of each command."""
FAST = 0.5
"""CPU seconds of a whole command, in those of importing torch beside it; a busy machine makes both slower."""


def tidemill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )


def processor_s() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def torch_s() -> float:
    """Return the CPU seconds of a process that imports torch."""
    before = processor_s()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return processor_s() - before


def declared(parser: argparse.ArgumentParser, *path: str) -> dict[str, list[str]]:
    """Return the options and places of every command and of its words, as ``command word`` -> names."""
    found = (
        {}
        if not path
        else {" ".join(path): [name for action in parser._actions for name in action.option_strings or [action.dest]]}
    )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= declared(inner, *path, name)
    return found


def test_every_command_has_its_module_and_its_options() -> None:
    """What a command line of an earlier release says is still understood: options come into the file, and do not leave
    it.
    """
    parsers = {**commands_of(command_parser()), **commands_of(inner_parser())}
    modules = {
        name: parser.get_default("run_command").__module__.rpartition(".")[2] for name, parser in parsers.items()
    }
    shared = {"engine": "worker", "actor": "worker", "scorer": "worker", "feeder": "learner", "rank": "learner"}
    shared |= {"bus": "servers", "router": "servers", "reward-server": "servers", "teacher": "servers"}
    shared |= {"check": "config", "prepare": "config", "cursors": "archive", "scale": "host"}
    shared |= {"texts": "eval", "restore": "backup"}
    assert modules == {name: shared.get(name, name.replace("-", "_")) for name in (*COMMANDS, *INNER)}
    assert {**declared(command_parser()), **declared(inner_parser())} == json.loads(OPTIONS.read_text())


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def test_only_the_module_of_the_given_command_is_imported() -> None:
    code = (
        "import sys\nfrom tidemill.launch.cli.main import main\ntry: main(['up', '--help'])\nexcept SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('tidemill.launch.cli.')), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr.split() == [f"tidemill.launch.cli.{name}" for name in ("arguments", "inputs", "main", "up")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("up", "launch/configs/digits.yaml", "--print-config"), 0),
        (("config", "launch/configs/digits.yaml"), 0),
        (("up", "launch/configs/digits.yaml", "--set", "learner.stepz=3"), 78),
        (("up", "no/such/file.yaml"), 78),
    ],
    ids=["help", "print-config", "config", "config-error", "no-file"],
)
def test_the_command_line_answers_in_a_fraction_of_a_second(
    arguments: tuple[str, ...], code: int, torch_s: float
) -> None:
    """One of five runs: the machine is shared, the imports are not."""
    times: list[float] = []
    while not times or (times[-1] >= FAST * torch_s and len(times) < 5):
        before = processor_s()
        result = tidemill(*arguments)
        times.append(processor_s() - before)
        assert result.returncode == code, result.stderr
    assert times[-1] < FAST * torch_s, (times, torch_s)


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--schema"]], ids=["help", "schema"])
def test_the_command_line_loads_no_heavy_package(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom tidemill.launch.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'nats', 'numpy.linalg', 'aiohttp', 'rich', 'matplotlib'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_errors_go_to_stderr_with_path_and_cure() -> None:
    result = tidemill("up", "launch/configs/digits.yaml", "--set", "staleness.maxlag=3")
    assert result.returncode == 78
    assert "staleness.maxlag: no such setting; did you mean staleness.max_lag?" in result.stderr
    assert "Traceback" not in result.stderr


def test_reading_commands_need_a_run() -> None:
    result = tidemill("tail")
    assert result.returncode == 2
    assert "--run-dir" in result.stderr
    result = tidemill("status", "--run-dir", "/nowhere")
    assert result.returncode == 2
    assert "want the directory of a run" in result.stderr


@pytest.mark.parametrize("words", [["--help"], ["nothing"]], ids=["help", "wrong command"])
def test_internal_commands_are_not_in_the_help(words: list[str]) -> None:
    result = tidemill(*words)
    shown = result.stdout + result.stderr
    assert "archive" in shown
    assert not re.search(r"^ +(feeder|rank)\b|'(feeder|rank)'", shown, re.MULTILINE), shown
    for inner in ("feeder", "rank"):
        assert "--feeder-url" in tidemill(inner, "--help").stdout


def test_modules_are_found_in_the_directory_a_command_is_started_in(tmp_path: Path) -> None:
    """The installed command's own directory is that of the environment."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tidemill").write_text(
        "import sys\nfrom tidemill.launch.cli.main import main\ncode = main(['config', sys.argv[1]])\n"
        "import own_module_here\nsys.exit(code)\n"
    )
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "own_module_here.py").write_text("")
    command = [sys.executable, str(tmp_path / "bin" / "tidemill"), str(ROOT / "launch/configs/digits.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr


def test_the_module_runs_beside_files_named_like_pythons_own(tmp_path: Path) -> None:
    """As from a wheel (-S): the finder of an editable installation would have imported some of them before."""
    package = tmp_path / "site/tidemill"
    package.mkdir(parents=True)
    rooms = (ROOT / name for name in ("actors", "bus", "launch", "learner", "rewards", "weightstore"))
    for path in (*(ROOT / "launch/tidemill").glob("*.py"), *rooms):
        (package / path.name).symlink_to(path)
    for name in ("typing", "enum", "queue", "json", "bus"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(__name__)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), sysconfig.get_path("purelib")])}
    command = [sys.executable, "-S", "-m", "tidemill", "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("role", ["engine", "actor"])
def test_a_worker_gives_up_a_bus_that_never_comes(role: str) -> None:
    result = tidemill(role, "--bus", "nats://127.0.0.1:1", "--wait", "0.2")
    assert result.returncode == 1
    assert "for at most 0.2 s (--wait)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "nats://127.0.0.1:1" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("script", ["actor", "bus", "engine", "host", "learner"])
def test_scripts_find_the_environment_beside_them(tmp_path: Path, script: str) -> None:
    """No environment is active: PATH has only the shell's own tools."""
    shutil.copytree(ROOT / "launch/scripts", tmp_path / "launch/scripts")
    program = tmp_path / ".venv/bin/tidemill"
    program.parent.mkdir(parents=True)
    program.write_text('#!/usr/bin/env bash\necho "started $1"\n')
    program.chmod(0o755)
    command = ["bash", str(tmp_path / f"launch/scripts/{script}.sh")]
    environment = {"PATH": "/usr/bin:/bin", "BUS": "nats://127.0.0.1:1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout.splitlines()[-1:] == [f"started {script}"], result.stderr


@pytest.mark.parametrize("target", ["run", "gsm8k", "sglang"])
def test_make_passes_arguments_on(target: str) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    result = subprocess.run(
        [make, "-n", target, "ARGS=--set learner.steps=20"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    (line,) = [line for line in result.stdout.splitlines() if "tidemill up" in line]
    assert line.endswith("--set learner.steps=20")


def test_a_host_passes_on_where_its_engines_listen() -> None:
    """Without options nothing is passed on: then each engine finds its address by itself."""
    for given in ([], ["--host", "10.0.0.7"], ["--host", "10.0.0.7", "--advertise", "gpu7.lab:30000"]):
        args = command_parser().parse_args(["host", "--bus", "nats://b:1", *given])
        assert reached_at(args) == given
        assert command_parser().parse_args(["engine", "--bus", "nats://b:1", *reached_at(args)]).host == args.host


@pytest.mark.parametrize(
    ("words", "usage", "why"),
    [
        (["tail", "--lastt", "3"], "usage: tidemill tail ", "unrecognized arguments: --lastt 3 (nearest: --last)"),
        (
            ["data", "import", "a", "-o", "b", "--quick=1"],
            "usage: tidemill data import ",
            "unrecognized arguments: --quick=1",
        ),
        (["status", "extra"], "usage: tidemill status ", "unrecognized arguments: extra"),
        (["--nothing"], "usage: tidemill [-h]", "the following arguments are required: COMMAND"),
    ],
)
def test_an_unknown_option_is_refused_with_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(usage) and said.rstrip().endswith(why), said


def test_a_shadow_without_a_user_of_the_bus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "smoke", "--bus", "nats://127.0.0.1:1", "--shadow", "x", "--set", "bus.auth=true"]
    assert main(["learner", *words]) == 2
    assert "--shadow: want a user of the bus for it, bus.auth_shadows: [x]" in capsys.readouterr().err


def test_the_version_is_that_of_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"tidemill {version('tidemill')}\n")
