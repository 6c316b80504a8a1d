"""A real SGLang server on this machine's CPU, for tests: how it is started where there are no kernels for it."""

from pathlib import Path
from typing import Any

from actors.config import EngineConfig, SglangConfig

STAND_IN = Path(__file__).parent / "stand_in"
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_IN)}
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "max_total_tokens": 16384,
    "mem_fraction_static": 0.1,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "log_level": "warning",
    "random_seed": 1,
}


def config(python: str, *, url: str = "", log: str = "", pause: str = "in_place") -> EngineConfig:
    """Of an engine whose server runs on CPU, in fp32."""
    sglang = SglangConfig(python=python, arguments=ARGUMENTS, environment=ENVIRONMENT, url=url, log=log, pause=pause)
    return EngineConfig(kind="sglang", max_running=16, sglang=sglang)
