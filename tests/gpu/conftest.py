"""The device of the GPU tests, one rank on it for the whole session, and reference values from a process without CUDA.

``--gpu-device cpu`` runs everything but CUDA's own behaviour on the CPU, at tiny sizes; tests that take ``cuda`` skip
there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.child import ROOT
from tests.megatron_world import one_rank
from tests.skips import inapplicable
from tidemill.learner.kernels.choices import CUDNN_CAPABILITY
from tidemill.learner.layout.parallel import Parallel

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables that cuBLAS and NCCL read when CUDA is initialised, as in a rank (learner/ranks/process.py), and the
loopback interface: the host name of the machine may not resolve.
"""

CHILD_S = 200.0
"""Time limit in seconds of a child process: it imports torch and Megatron, and trains a tiny model."""

FAILURES = "FAILURES_FILE"
"""Environment variable with the path of a file to which each failure is written at once: a lent machine may be gone
before pytest ends.
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Set ``ENVIRONMENT``, where it is not set, for the tests of this folder alone: pytest calls this for all of a
    process.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items() if item.path.parent == Path(__file__).parent else ():
            patch.setenv(name, os.environ.get(name, value))
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    place = os.environ.get(FAILURES)
    if place and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(
                f"==== {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext[-6000:]}\n"
            )


Child = Callable[..., Any]
"""``child(name, *arguments, see_gpu=False)`` runs a function of ``tests.gpu.child`` in a process and returns its
result.
"""


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test. Skips without CUDA, unless the CPU is asked for."""
    if request.config.getoption("--gpu-device") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device (--gpu-device cpu runs the logic on the CPU)")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """Device for tests of CUDA's own behaviour, which skip on the CPU."""
    if device.type != "cuda":
        inapplicable("of CUDA only")
    return device


@pytest.fixture(scope="session")
def hopper(cuda: torch.device) -> torch.device:
    """Device for tests of kernels that are chosen on Hopper alone."""
    if torch.cuda.get_device_capability() != CUDNN_CAPABILITY:
        inapplicable(f"of compute capability {CUDNN_CAPABILITY[0]}.{CUDNN_CAPABILITY[1]} only")
    return cuda


@pytest.fixture(scope="session")
def rank(device: torch.device) -> Iterator[Parallel]:
    """A world of one on the device. Kernels need not be deterministic, unless the test takes ``deterministic``."""
    with one_rank(device.type) as joined:
        torch.use_deterministic_algorithms(False)
        yield joined


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The kernels of a learner with ``learner.deterministic``."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Child:
    """Return ``Child``. The process sees the GPU only on request, so by default it computes reference values on the
    CPU.
    """

    def run(name: str, *arguments: Any, see_gpu: bool = False, **variables: str) -> Any:
        out = tmp_path_factory.mktemp("child") / "result.json"
        command = [sys.executable, "-m", "tests.gpu.child", name, str(out), json.dumps(arguments, default=str)]
        environment = os.environ | ({} if see_gpu else {"CUDA_VISIBLE_DEVICES": ""}) | variables
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_S, check=False
        )
        assert done.returncode == 0, (
            f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        return json.loads(out.read_text())

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.megatron_layouts import VOCAB
    from tests.tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


@pytest.fixture
def peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Return a function: the most bytes of the device that tensors have taken since the test began, besides those there
    before.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
