"""Use of processor, memory and accelerators by this process, for its live row. Initialises no CUDA.

The driver is asked in a thread of its own: a call that hangs in it must stop no heartbeat, and no exit of the process.
Without the package or a driver it ends, and is not started again. /proc is read in a thread, too: of a thousand
children that takes long.
"""

import importlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

EVERY_S = 1.0  # Interval of reads of the driver
TREE_EVERY_S = 5.0  # Interval of reads of /proc, over which processor time is averaged: an actor may have many children
KEPT_S = 10.0  # Seconds for which a read of the driver is shown
_PAGE_BYTES, _TICKS_PER_S = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


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
    with suppress(Exception):  # another package of this name raises what it likes
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        use |= {"memory_used_bytes": int(memory.used), "memory_bytes": int(memory.total)}
        use["utilisation"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return use


class UseMeter:
    """Use of the machine by this process, and by the processes below it unless these have rows of their own."""

    def __init__(self, *, children: bool = True) -> None:
        self._children, self._cpu_share = children, 0.0
        (self._cpu_s, self._memory_bytes), self._read_s = tree_use(children), time.monotonic()
        self._reading_tree = threading.Thread()
        self._uuids: tuple[str, ...] = ()
        self._devices, self._devices_s = list[dict[str, Any]](), float("-inf")
        self._reading: threading.Thread | None = None
        self._ended = threading.Event()

    def read(self, uuids: Sequence[str]) -> dict[str, Any]:
        """Return the use as a live row has it; ``uuids``: of the accelerators of this process. Does not block."""
        now_s = time.monotonic()
        if now_s >= self._read_s + TREE_EVERY_S and not self._reading_tree.is_alive():
            self._reading_tree = threading.Thread(target=self._read_tree, name="process use", daemon=True)
            self._reading_tree.start()
        self._uuids = tuple(uuids)
        if uuids and self._reading is None:
            self._reading = threading.Thread(target=self._read_for_ever, name="device use", daemon=True)
            self._reading.start()
        devices = self._devices if uuids and now_s < self._devices_s + KEPT_S else []
        return {"cpu_share": round(self._cpu_share, 4), "memory_bytes": self._memory_bytes, "devices": devices}

    def end(self) -> None:
        """End the thread, without waiting for it."""
        self._ended.set()

    def _read_tree(self) -> None:
        now_s = time.monotonic()
        cpu_s, self._memory_bytes = tree_use(self._children)
        self._cpu_share = max(0.0, cpu_s - self._cpu_s) / (now_s - self._read_s)
        self._cpu_s, self._read_s = cpu_s, now_s

    def _read_for_ever(self) -> None:
        nvml = open_nvml()
        while nvml is not None and not self._ended.wait(EVERY_S):
            self._devices = [device_use(nvml, uuid) for uuid in self._uuids]
            self._devices_s = time.monotonic()


def tree_use(children: bool) -> tuple[float, int]:
    """Return processor time and resident memory of this process, and of all below it with ``children``.

    The time of a child that has ended counts once its parent has waited for it. Memory that several share counts for
    each. Zeros where the system has no /proc.
    """
    cpu_s, memory_bytes, pids = 0.0, 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        with suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            times = fields[11:15] if children else fields[11:13]  # its own, and of children that were waited for
            cpu_s += sum(map(int, times)) / _TICKS_PER_S
            memory_bytes += int(fields[21]) * _PAGE_BYTES
        if children:
            pids += _children_of(pid)
    return cpu_s, memory_bytes


def _children_of(pid: int) -> list[int]:
    children = list[int]()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    return children


def log_file() -> str:
    """Return the file that this process writes its log to; empty if that is a terminal, a pipe or nothing, or a name
    that is no UTF-8, which no row can have.
    """
    try:
        path = os.readlink("/proc/self/fd/2")
        path.encode()
    except (OSError, UnicodeEncodeError):
        return ""
    return path if os.path.isfile(path) else ""
