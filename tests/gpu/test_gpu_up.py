"""`tidemill up` on the device, as a user starts it: defaults, bfloat16, one GPU in turns, handles, and a killed
engine.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.forked import EXECUTED
from tests.whole.running import Up, assert_books_balance, kill, live, until_step, up

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fork_server")]

ON_CUDA = {
    "defaults": (),
    "float32": ("learner.dtype=float32", "engine.dtype=float32"),
    "bfloat16": ("learner.dtype=bfloat16", "engine.dtype=bfloat16"),
    "handles": ("weights.transport=handles", "weights.verify=always"),
    "handles in the GPU's memory": ("weights.transport=handles", "weights.staging=cuda", "weights.verify=always"),
    "colocated": ("learner.colocated=true", "weights.transport=handles"),
}
"""Settings of whole runs. The learner's device and the engine's are ``auto`` by default."""
CUDA_ONLY = {"handles in the GPU's memory", "float32"}
"""On CPUs ``auto`` is float32."""


@pytest.fixture(autouse=True)
def executed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        monkeypatch.setenv(EXECUTED, "1")


def on_device(run: Up, device: torch.device) -> None:
    """Assert that the engine ran on the device under test, and that the run is whole."""
    log = (run.directory / "logs" / "engine-0.log").read_text()
    assert f"device={device.type}" in log, log[-2000:]
    assert_books_balance(run.summary, max_lag=2)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("defaults", "bfloat16") else []) for name in ON_CUDA],
)
def test_a_whole_run(name: str, device: torch.device, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name in CUDA_ONLY:
        request.getfixturevalue("cuda")
    with up(tmp_path, *ON_CUDA[name]) as run:
        assert run.wait() == 0, run.log[-4000:]
    on_device(run, device)
    summary = run.summary
    assert (summary["steps"], summary["samples_trained"], summary["restarts"]) == (6, 6 * 8 * 4, {}), summary
    for step in run.metrics[1:]:
        assert step["train/grad_norm"] > 0
        if "verify=always" in "".join(ON_CUDA[name]):
            assert step.get("push/engines_verified", 1) == step.get("push/engines", 1)
        # ``auto`` is bfloat16 on CUDA, where the same weights give log-probs that differ by 0.001 in the mean.
        exact = name == "float32" or (device.type == "cpu" and name != "bfloat16")
        limit = 1e-3 if exact else 1e-2
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < limit, "the engine serves other weights than it says"
    if "handles" in "".join(ON_CUDA[name]):
        assert "no handles for this engine" not in (run.directory / "logs" / "learner.log").read_text()


async def test_a_killed_engine_comes_back(device: torch.device, tmp_path: Path) -> None:
    with up(tmp_path, "learner.steps=20", "bus.lease_s=3") as run:
        async with run.bus() as bus:
            await until_step(bus, 4)
            kill((await live(bus, "engine")).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    on_device(run, device)
    assert run.summary["steps"] == 20 and run.summary["restarts"], run.summary
