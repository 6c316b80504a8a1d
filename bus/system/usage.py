"""Use of processor, memory and accelerators by this process, for its live row. Initialises no CUDA.

The driver is asked in a thread of its own: a call that hangs in it must stop no heartbeat, and no exit of the process.
"""

import importlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

EVERY_S = 1.0  # Interval of reads of the driver, and the shortest time over which processor time is averaged
KEPT_S = 10.0  # Seconds for which a read of the driver is shown
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def open_nvml() -> Any:
    """Return the initialised module of the package ``nvidia-ml-py``; None without it, or without a driver. Blocks."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # another package of this name raises what it likes
        return None
    return nvml


def device_use(nvml: Any, uuid: str) -> dict[str, Any]:
    """Return use and memory of an accelerator, by all of its processes. Blocks.

    A number that the driver does not have is left out: of a MIG slice it knows the memory alone.
    Source: NVML API Reference, ``nvmlDeviceGetUtilizationRates``, ``nvmlDeviceGetMemoryInfo``.
    """
    use: dict[str, Any] = {"device": uuid}
    with suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        use |= {"memory_used_bytes": int(memory.used), "memory_bytes": int(memory.total)}
        use["utilisation"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return use


class UseMeter:
    """Use of the machine by this process since the read before."""

    def __init__(self) -> None:
        self._cpu_s, self._read_s, self._cpu_share = time.process_time(), time.monotonic(), 0.0
        self._uuids: tuple[str, ...] = ()
        self._devices, self._devices_s = list[dict[str, Any]](), float("-inf")
        self._reading: threading.Thread | None = None
        self._ended = threading.Event()

    def read(self, uuids: Sequence[str]) -> dict[str, Any]:
        """Return the use as a live row has it; ``uuids``: of the accelerators of this process. Does not block."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        if now_s >= self._read_s + EVERY_S / 2:
            self._cpu_share = (cpu_s - self._cpu_s) / (now_s - self._read_s)
            self._cpu_s, self._read_s = cpu_s, now_s
        self._uuids = tuple(uuids)
        if uuids and self._reading is None:
            self._reading = threading.Thread(target=self._read_for_ever, name="device use", daemon=True)
            self._reading.start()
        devices = self._devices if uuids and now_s < self._devices_s + KEPT_S else []
        return {"cpu_share": round(self._cpu_share, 4), "memory_bytes": resident_bytes(), "devices": devices}

    def end(self) -> None:
        """End the thread, without waiting for it."""
        self._ended.set()

    def _read_for_ever(self) -> None:
        nvml = open_nvml()
        while nvml is not None and not self._ended.wait(EVERY_S):
            self._devices = [device_use(nvml, uuid) for uuid in self._uuids]
            self._devices_s = time.monotonic()


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not list it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def log_file() -> str:
    """Return the file that this process writes its log to; empty if that is a terminal, a pipe or nothing."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
