"""Use of processor, memory and accelerators in live rows and in Prometheus; the driver is a module of the test."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.waits import poll
from tidemill.bus.system import usage
from tidemill.bus.system.usage import UseMeter, device_use, open_nvml, tree_use
from tidemill.bus.wire.rows import Capabilities, DeviceUse, LiveRow, MachineUse, row_of
from tidemill.launch.metrics.prometheus import MOST_MEMBERS, RunState
from tidemill.launch.page.lanes import DOWN, Lane, Segment, fleet_facts, process_of

GPU, SLICE = "GPU-5a", "MIG-7c"
DRIVER = """
class NVMLError(Exception): pass
class Numbers:
    def __init__(self, **numbers): self.__dict__.update(numbers)
def nvmlInit():
    if BROKEN: raise NVMLError("Driver Not Loaded")
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid not in ("GPU-5a", "MIG-7c"): raise NVMLError("Not Found")
    return uuid
def nvmlDeviceGetMemoryInfo(handle): return Numbers(total=80 << 30, used=61 << 30, free=19 << 30)
def nvmlDeviceGetUtilizationRates(handle):
    if handle.startswith("MIG"): raise NVMLError("Not Supported")
    return Numbers(gpu=87, memory=40)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes the module ``pynvml`` there is; ``broken``: it finds no driver."""

    def make(*, broken: bool = False) -> None:
        (tmp_path / "pynvml.py").write_text(f"BROKEN = {broken}\n{DRIVER}")
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield make
    sys.modules.pop("pynvml", None)


def test_what_the_driver_knows_of_a_device_and_of_a_slice(driver: Any) -> None:
    driver()
    nvml = open_nvml()
    whole = {"device": GPU, "memory_used_bytes": 61 << 30, "memory_bytes": 80 << 30, "utilisation": 0.87}
    assert device_use(nvml, GPU) == whole
    assert device_use(nvml, SLICE) == {"device": SLICE, "memory_used_bytes": 61 << 30, "memory_bytes": 80 << 30}
    assert device_use(nvml, "GPU-none") == {"device": "GPU-none"}


def test_without_the_package_or_a_driver_there_are_no_devices_and_no_thread_goes_on(driver: Any) -> None:
    if importlib.util.find_spec("pynvml") is None:
        assert open_nvml() is None
    driver(broken=True)
    assert open_nvml() is None
    meter = UseMeter()
    assert meter.read([GPU])["devices"] == []
    poll(lambda: not any(thread.name == "device use" for thread in threading.enumerate()))


def test_another_package_of_the_name_ends_no_thread(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.01)
    driver()
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    meter = UseMeter()
    try:
        poll(lambda: meter.read([GPU])["devices"] == [{"device": GPU}])
    finally:
        meter.end()


def test_a_heartbeat_does_not_wait_for_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "TREE_EVERY_S", 0.0)
    meter, go_on = UseMeter(), threading.Event()
    monkeypatch.setattr(usage, "tree_use", lambda children: (go_on.wait() and 1e9, 7))
    before = meter.read([])
    assert meter.read([]) == before
    go_on.set()
    poll(lambda: meter.read([])["memory_bytes"] == 7)


def test_a_row_has_the_use_of_its_process_and_its_devices(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.01)
    monkeypatch.setattr(usage, "TREE_EVERY_S", 0.3)
    driver()
    meter = UseMeter()
    try:
        poll(lambda: meter.read([GPU])["devices"])
        poll(lambda: sum(range(100_000)) and 0.1 < meter.read([GPU])["cpu_share"] < 20)
        use = meter.read([GPU])
    finally:
        meter.end()
    assert use["devices"] == [
        {"device": GPU, "memory_used_bytes": 61 << 30, "memory_bytes": 80 << 30, "utilisation": 0.87}
    ]
    assert 1 << 20 < use["memory_bytes"] < 1 << 40
    row = row_of(LiveRow, {"role": "engine", "id": "e", "host": "h", "pid": 1, "phase": "serving", "use": use})
    assert row.use.devices[0].utilisation == 0.87
    assert meter.read([])["devices"] == [], "a process that computes on none"


def test_children_count_unless_they_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "TREE_EVERY_S", 0.3)
    busy = "import sys; data = bytearray(1 << 26); sys.stdout.write('up\\n'); sys.stdout.flush()\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        alone, tree = UseMeter(children=False), UseMeter()
        poll(lambda: tree.read([])["cpu_share"] > 0)
        assert tree.read([])["memory_bytes"] > alone.read([])["memory_bytes"] + (1 << 26)
        before = tree_use(children=True)[0]
        poll(lambda: tree_use(children=True)[0] > before + 0.1)
    finally:
        child.kill()
        child.communicate()
    assert tree_use(children=True)[0] > before, "its time stays when it has ended"


@pytest.mark.parametrize(("name", "shown"), [(b"e.log", True), (b"e\xff.log", False)])
def test_the_log_of_a_process_is_named_unless_its_name_fits_no_row(tmp_path: Path, name: bytes, shown: bool) -> None:
    code = "from tidemill.bus.system.usage import log_file; print(ascii(log_file()))"
    with open(os.fsencode(tmp_path) + b"/" + name, "wb") as log:
        printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, check=True).stdout
    assert printed.decode().strip() == repr(f"{tmp_path}/e.log" if shown else "")


def test_a_row_of_an_earlier_release_has_no_use() -> None:
    row = row_of(LiveRow, {"role": "engine", "id": "e", "host": "h", "pid": 1, "phase": "serving"})
    assert row.use == MachineUse() and row.log == ""
    series = RunState(run="r", rows=[(row, 0.0)]).series().samples
    assert "process/up" in series and not [name for name in series if "cpu" in name or "memory" in name]


def row_with(devices: tuple[DeviceUse, ...]) -> LiveRow:
    use = MachineUse(cpu_share=1.25, memory_bytes=300, devices=devices)
    owned = Capabilities(devices=(GPU, "GPU-6b"), device_memory_bytes=80 << 30)
    return LiveRow(role="engine", id="e", host="h", pid=1, phase="serving", use=use, capabilities=owned, log="/r/e.log")


def test_prometheus_has_the_use_by_process_and_device() -> None:
    used = DeviceUse(device=GPU, utilisation=0.87, memory_used_bytes=61 << 30, memory_bytes=80 << 30)
    part = DeviceUse(device=SLICE, memory_used_bytes=5, memory_bytes=9)
    series = RunState(run="r", rows=[(row_with((used, part)), 0.0)]).series().samples
    place = {"role": "engine", "id": "e", "host": "h"}
    assert series["process/cpu_share"] == [(place, 1.25)]
    assert series["process/memory_bytes"] == [(place, 300.0)]
    assert series["process/device_utilisation"] == [({**place, "device": GPU}, 0.87)]
    sizes = [({**place, "device": GPU}, float(61 << 30)), ({**place, "device": SLICE}, 5.0)]
    assert series["process/device_memory_used_bytes"] == sizes
    hostile = tuple(DeviceUse(device=f"{number}\n", utilisation=0.5) for number in range(2 * MOST_MEMBERS))
    series = RunState(run="r", rows=[(row_with(hostile), 0.0)]).series().samples
    assert len(series["process/device_utilisation"]) == MOST_MEMBERS
    assert all("\n" not in labels["device"] for labels, _ in series["process/device_utilisation"])


def lane_of(name: str, *devices: DeviceUse, silent_s: float = 0.0) -> Lane:
    return Lane(replace(row_with(devices), id=name), silent_s)


def test_facts_of_the_fleet_leave_out_the_dead_and_keep_the_numbers_of_a_shared_device() -> None:
    """Two processes on two GPUs, of which one has no numbers; one silent process, and one whose row is gone."""
    numbers = DeviceUse(device=GPU, utilisation=0.87), DeviceUse(device="GPU-6b", utilisation=0.13)
    gone, silent = lane_of("gone", numbers[0]), lane_of("silent", numbers[1], silent_s=60.0)
    gone.segments.append(Segment(DOWN, 0, 1.0, "is gone"))
    queue = dict.fromkeys(("waiting", "leased", "stream_messages", "stream_bytes", "bus_bytes"), 0)
    queue |= {"full": "", "checkpoints_free_bytes": 0}
    for alive in ([lane_of("a", *numbers), lane_of("b")], [lane_of("b"), lane_of("a", *numbers)]):
        facts = {fact["name"]: fact for fact in fleet_facts(queue, [*alive, gone, silent])}
        assert (facts["GPUs in use"]["value"], facts["GPUs in use"]["note"]) == (0.5, "of 2")
        assert facts["CPU in use"]["value"] == 2.5
    facts = {fact["name"]: fact for fact in fleet_facts(queue, [gone, silent])}
    assert (facts["GPUs in use"]["value"], facts["CPU in use"]["value"]) == (None, None)


def test_the_page_has_every_device_of_a_process_with_or_without_its_use() -> None:
    process = process_of(Lane(row_with((DeviceUse(device=GPU, utilisation=0.87, memory_used_bytes=1),))), ())
    assert (process["cpu_share"], process["memory_bytes"], process["log"]) == (1.25, 300, "/r/e.log")
    assert [(device["device"], device["utilisation"]) for device in process["devices"]] == [
        (GPU, 0.87),
        ("GPU-6b", None),
    ]
    assert msgspec.json.encode(process)
