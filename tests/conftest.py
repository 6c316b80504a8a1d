"""Rules for every test: async tests without a plugin, no leaked task, no blocked loop, real parts required in CI."""

import asyncio
import gc
import importlib.util
import inspect
import logging
import os
import re
import sys
from asyncio import constants
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.bus_fixtures"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads of torch, here and in children that do not set it: tests run beside each other, and threads that wait for a core waste it."""
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
"""Nothing is compiled on CPUs, and Megatron's decorators import the compiler unless it is off: two of nine seconds of a start."""
constants.DEBUG_STACK_DEPTH = 1
"""Frames that asyncio's debug mode keeps of every callback; its ten make each step of a loop cost three times as much."""

settings.register_profile("tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

BLOCKED_S = 20.0
"""A step of the loop longer than this fails the test; the time in which the thread could have run and had no core is not counted. Generous:
a first import of transformers' models, which a test may do in a step, takes 10 s of a busy core."""

LIMIT_S = {"unit": 120.0, "contract": 120.0}
"""Seconds that an async test in one of these folders may take."""

PROCESSES_LIMIT_S = 400.0
"""Seconds that any other test may take: these start processes, whole runs among them, and have waits of 300 s of their own."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    args = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner(debug=True) as runner:
        runner.run(_guarded(pyfuncitem.obj, args, LIMIT_S.get(pyfuncitem.path.parent.name, PROCESSES_LIMIT_S)))
    return True


async def _guarded(test: Callable[..., Coroutine[Any, Any, None]], args: dict[str, Any], limit_s: float) -> None:
    """Run one async test; afterwards no task may be left running and no step may have blocked the loop."""
    blocked: list[str] = []
    waited_s = _waited_for_a_core_s()
    asyncio.get_running_loop().slow_callback_duration = BLOCKED_S
    handler = logging.Handler()
    handler.emit = lambda record: blocked.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: _step_s(record) - (_waited_for_a_core_s() - waited_s) > BLOCKED_S)
    logging.getLogger("asyncio").addHandler(handler)
    try:
        async with asyncio.timeout(limit_s) as limit:
            await test(**args)
        assert not limit.expired(), f"it took more than {limit_s:g} s, and has swallowed the cancellation"
        await asyncio.sleep(0)
    finally:
        logging.getLogger("asyncio").removeHandler(handler)
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leaked, f"tasks left running: {leaked}"
    assert not blocked, f"the event loop was blocked: {blocked}"


def _step_s(record: logging.LogRecord) -> float:
    """Return the seconds of the step that asyncio reports as slow; 0 for any other report."""
    found = re.search(r"took ([0-9.]+) seconds", record.getMessage())
    return float(found[1]) if found else 0.0


def _waited_for_a_core_s() -> float:
    """Return the seconds for which this thread was runnable and did not run. Source: Linux, Documentation/scheduler/sched-stats.rst."""
    file = Path("/proc/thread-self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loss", action="append", default=[], metavar="MODULE:FUNCTION", help="a loss of yours, for the contract tests")
    parser.addoption("--advantage", action="append", default=[], metavar="MODULE:FUNCTION", help="an estimator of yours, likewise")
    parser.addoption("--storm-seed", type=int, metavar="N", help="who is killed when, in the tests of tests/chaos")
    parser.addoption("--sglang-python", metavar="PYTHON", help="interpreter that has SGLang: runs tests/sglang (make test-sglang)")
    parser.addoption("--gpu-device", default="auto", choices=["auto", "cpu"], help="cpu: tests/gpu at tiny sizes without a GPU")
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


def wants_gpus(marks: str) -> bool:
    """Return whether the expression of ``-m`` chooses the tests that are marked ``gpu``."""
    return re.search(r"(?<!not )\bgpu\b", marks) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests, and with them torch and Megatron, without garbage collections: they free nothing, and take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    return f"python {sys.version.split()[0]}, {os.cpu_count()} cores"
