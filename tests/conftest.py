"""Rules for every test: async tests without a plugin, no leaked task, no blocked loop, real parts required in CI."""

import asyncio
import gc
import importlib.util
import inspect
import logging
import os
import re
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.template import has_template, template
from tests.waits import turn
from tests.workers import fork_workers

pytest_plugins = ["tests.bus_fixtures", "tests.cost", "tests.sglang_servers", "tests.skips"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of torch, here and in children that do not set it: tests run beside each other, and threads that wait for a
core waste it.
"""
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
"""Nothing is compiled on CPUs, and Megatron's decorators import the compiler unless it is off: two of nine seconds of a
start.
"""

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
"""No test asks the real hub, a name of which a path that does not exist may look like. ``tests.hub_kit`` serves one."""
# The page of each run that a test starts would take a second of processor time; the tests of the page ask for it.
os.environ["TIDEMILL_UP__DASHBOARD"] = "false"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # else the library asks this address for names of coding agents first

settings.register_profile(
    "tests",
    max_examples=examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

BLOCKED_S = 20.0
"""Callbacks between two looks at the sockets that take longer than this fail the test; time in which the thread had no
core is not counted.
Generous: a first import of transformers' models, which a test may do in a callback, takes 10 s of a busy core.
"""

COMPUTING = (
    "test_adamw",
    "test_expert",
    "test_families",
    "test_lora",
    "test_megatron",
    "test_model_families",
    "test_routing",
)
"""Beginnings of the names of files that compute for most of their time; most of the others wait."""

LIMIT_S = {"unit": 120.0}
"""Seconds that an async test in this folder may take."""

FIRST = (
    "net/test_run.py",
    "net/test_learner_nodes.py",
    "net/test_learner_nodes_lost.py",
    "chaos/test_weightstore_cohorts.py",
    "integration/test_megatron_layouts.py",
    "env/test_verifiers_tasksets.py",
    "env/test_training.py",
    "chaos/test_episode_instants.py",
    "chaos/test_trouble.py",
    "kubernetes/test_kubelet.py",
    "gpu/test_gpu_up.py",
    "sglang/test_sglang_engine.py",
    "sglang/test_sglang_own_server.py",
    "sglang/test_sglang_phases.py",
    "sglang/test_sglang_loop.py",
)
"""Files of minutes, the longest first: a worker that begins with one later is the last one of all."""

PROCESSES_LIMIT_S = 400.0
"""Seconds that any other test may take: these start processes, whole runs among them, and have waits of 300 s of their
own.
"""


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the process from which ``tests.forked`` forks: for async tests: the start would block their loop."""
    template()


def pytest_unconfigure() -> None:
    if has_template():
        template().close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    args = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    watched = WatchedSelector()
    # Without asyncio's debug mode, which keeps the whole stack of every future: half of a test's time.
    # PYTHONASYNCIODEBUG=1 turns it on.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watched)) as runner:
        runner.run(_guarded(pyfuncitem.obj, args, LIMIT_S.get(pyfuncitem.path.parent.name, PROCESSES_LIMIT_S)))
    assert not watched.blocked_s, f"the event loop was blocked, in seconds: {watched.blocked_s}"
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Leave the root logger as it was before the test: commands that run in this process set up logging for a process
    of their own.
    """
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        return (yield)
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


class WatchedSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]  # the class depends on the system
    """A selector that notes when its loop comes back late: the callbacks that ran in between blocked it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked_s: list[float] = []
        """Durations of more than ``BLOCKED_S``."""
        self._waited_s = (
            waited_for_a_core_s()
        )  # before the time: a wait between the two is in both differences, or in this one alone
        self._left_s = self._noted_s = time.monotonic()

    def select(self, timeout: float | None = None) -> Any:
        away_s = time.monotonic() - self._left_s
        if away_s > BLOCKED_S and away_s - (waited_for_a_core_s() - self._waited_s) > BLOCKED_S:
            self.blocked_s.append(round(away_s, 1))
        found = super().select(timeout)
        if time.monotonic() - self._noted_s > 1:  # reading the file each time would cost more than most callbacks
            self._waited_s = waited_for_a_core_s()
            self._noted_s = time.monotonic()
        self._left_s = time.monotonic()
        return found


async def _guarded(test: Callable[..., Coroutine[Any, Any, None]], args: dict[str, Any], limit_s: float) -> None:
    """Run one async test; afterwards no task may be left running."""
    async with asyncio.timeout(limit_s) as limit:
        await test(**args)
    assert not limit.expired(), f"it took more than {limit_s:g} s, and has swallowed the cancellation"
    await turn()
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"tasks left running: {leaked}"


def waited_for_a_core_s() -> float:
    """Return the seconds for which this thread was runnable and did not run. Source: Linux,
    Documentation/scheduler/sched-stats.rst.
    """
    file = Path("/proc/thread-self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in ("weight", "aggregation", "reject"):
        parser.addoption(
            f"--{name}", action="append", default=[], metavar="MODULE:FUNCTION", help=f"a {name} of yours, likewise"
        )
    parser.addoption(
        "--loss", action="append", default=[], metavar="MODULE:FUNCTION", help="a loss of yours, for the contract tests"
    )
    parser.addoption(
        "--advantage", action="append", default=[], metavar="MODULE:FUNCTION", help="an estimator of yours, likewise"
    )
    for name in ("reward", "group-reward", "filter", "buffer-filter", "source", "tool", "rollout", "sink"):
        parser.addoption(
            f"--{name}", action="append", default=[], metavar="MODULE:NAME", help=f"a {name} of yours, likewise"
        )
    for name, about in (("bridge", "a model bridge"), ("environment", "an environment of multi_turn")):
        parser.addoption(
            f"--{name}", action="append", default=[], metavar="MODULE:CLASS", help=f"{about} of yours, likewise"
        )
    for name in ("hook-before-log-probs", "hook-before-step"):
        parser.addoption(
            f"--{name}", action="append", default=[], metavar="MODULE:FUNCTION", help="a hook of yours, likewise"
        )
    parser.addoption(
        "--bridge-model",
        default="",
        metavar="DIR",
        help="a small model of the family of --bridge; default: the example's",
    )
    parser.addoption(
        "--bridge-log-probs", default="", metavar="JSON", help="its log-probs, where transformers has no such model"
    )
    parser.addoption(
        "--environment-row", default="{}", metavar="JSON", help="data row of --environment: prompt, label, metadata"
    )
    parser.addoption(
        "--environment-actions", default="[]", metavar="JSON", help="texts that end an episode with this row"
    )
    parser.addoption(
        "--environment-again",
        default="restart",
        choices=["restart", "replay"],
        help="replay: actions give the same again",
    )
    parser.addoption(
        "--function-options", default="{}", metavar="JSON", help="options of these functions of yours, a JSON map"
    )
    parser.addoption("--storm-seed", type=int, metavar="N", help="who is killed when, in the tests of tests/chaos")
    parser.addoption(
        "--storm-s",
        type=float,
        metavar="SECONDS",
        help="length of the storm beside a foreign actor, in place of ten minutes",
    )
    parser.addoption(
        "--sglang-python", metavar="PYTHON", help="interpreter that has SGLang: runs tests/sglang (make test-sglang)"
    )
    parser.addoption(
        "--openenv-python", metavar="PYTHON", help="interpreter that has openenv: runs tests/env (make test-env)"
    )
    parser.addoption(
        "--verifiers-python", metavar="PYTHON", help="interpreter that has verifiers: runs tests/env (make test-env)"
    )
    parser.addoption(
        "--gyms-python",
        metavar="PYTHON",
        help="interpreter that has gem-llm and skyrl-gym: runs tests/env (make test-env)",
    )
    for name, module in (("ray", "ray"), ("sky", "skypilot")):
        parser.addoption(
            f"--{name}-python", metavar="PYTHON", help=f"interpreter that has {module}: runs its tests of tests/deploy"
        )
    parser.addoption(
        "--image-store",
        metavar="DIR",
        help="storage of containers with our images: runs their tests",
    )
    parser.addoption(
        "--trackers", metavar="DIRECTORY", help="packages of MLflow and Trackio: runs tests/env (make test-env)"
    )
    parser.addoption(
        "--gpu-device", default="auto", choices=["auto", "cpu"], help="cpu: tests/gpu at tiny sizes without a GPU"
    )
    parser.addoption("--require", default="", help="comma-separated parts that must be there: nats, megatron")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-device") == "cpu" or not wants_gpus(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks torch for a device; children inherit it
    required = [name for name in config.getoption("--require").split(",") if name]
    if os.environ.get("CI"):
        required += ["nats", "megatron"]
    modules = {"nats": "nats", "megatron": "megatron.core"}
    for name in required:
        if name not in modules:
            raise pytest.UsageError(f"--require: want one of {sorted(modules)}, got {name!r}")
        if importlib.util.find_spec(modules[name]) is None:
            raise pytest.UsageError(f"--require={name}: {modules[name]} is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    if not wants_gpus(config.option.markexpr):  # a GPU is used in no process that was forked behind imports of torch
        config.add_cleanup(fork_workers(specs))


def wants_gpus(marks: str) -> bool:
    """Return whether the expression of ``-m`` chooses the tests that are marked ``gpu``."""
    return re.search(r"(?<!not )\bgpu\b", marks) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests, and with them torch and Megatron, without garbage collections: they free nothing, and take a
    fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put ``FIRST`` first, and the files that compute among those that wait, which are before the unit tests."""
    first = {name: number - len(FIRST) for number, name in enumerate(FIRST)}
    files = list(
        dict.fromkeys(item.path for item in items if _name(item) not in first and item.path.parent.name != "unit")
    )
    computing = [file for file in files if file.name.startswith(COMPUTING)]
    waiting = [file for file in files if file not in computing]
    # The first number of a file is its part of the way through its list.
    place = {file: number / len(each) for each in (computing, waiting) for number, file in enumerate(each)}
    items.sort(key=lambda item: first.get(_name(item), place.get(item.path, 2.0)))


def _name(item: pytest.Item) -> str:
    return "/".join(item.path.parts[-2:])


def pytest_report_header() -> str:
    return f"python {sys.version.split()[0]}, {os.cpu_count()} cores"
