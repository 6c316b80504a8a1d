"""The devices of this machine, read with nvidia-smi, as CUDA_VISIBLE_DEVICES leaves them. No CUDA is initialised.

A CUDA context of a parent would take memory of a device, and its children could not use CUDA after a fork. The numbers
are nvidia-smi's: those of the PCI bus, which are CUDA's own only with CUDA_DEVICE_ORDER=PCI_BUS_ID, or where all GPUs
are of one model; children get UUIDs. Where nvidia-smi is missing, or finds no driver, there are no devices.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; ``nvidia-smi --help`` ("RETURN VALUE").
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from tidemill.launch.devices.shapes import Device, DevicesUnreadable, Node

VARIABLE = "CUDA_VISIBLE_DEVICES"
PROGRAM = "nvidia-smi"
ANSWER_S = 30.0  # Seconds for nvidia-smi to answer; without a persistent driver it takes several on a large machine
KILL_S = 1.0  # Seconds for a killed nvidia-smi to end: one that hangs in the driver cannot, and is left behind
NO_DEVICES = (6, 9)  # Exit codes of nvidia-smi: no device was found; the driver is not loaded
QUERY = ("--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader")
DETAILS = ("-q", "-x")  # Arguments for everything, as XML
SHARED_MEMORY = Path("/dev/shm")
CURE = f"fix the driver, or hide the devices ({VARIABLE}=) to run on the CPU"
# Entries of CUDA_VISIBLE_DEVICES that end the list: a number below 0, as for CUDA, and the values of container runtimes
# and Slurm.
NONE = re.compile(r"-\d+|none|void|NoDevFiles|", re.IGNORECASE)

FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def this_node(environment: Mapping[str, str]) -> Node:
    """Return this machine with its visible devices. Raises DevicesUnreadable. Blocks while nvidia-smi runs."""
    visible_devices = devices(environment)
    visible = shown(visible_devices, environment.get(VARIABLE))
    hidden = VARIABLE if len(visible) < len(visible_devices) else ""
    return Node(host=socket.gethostname(), devices=visible, hidden_by=hidden, shm_bytes=_free_shared_memory())


def devices(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the machine's devices; none where CUDA_VISIBLE_DEVICES hides all. Raises DevicesUnreadable."""
    program = shutil.which(PROGRAM, path=environment.get("PATH"))
    first = environment.get(VARIABLE, "0").split(",")[0].strip()
    if program is None or NONE.fullmatch(first):
        return ()
    lines = _answer(program, *QUERY)
    rows = [_row(line) for line in lines]
    if not any(is_split for _, is_split in rows):
        return tuple(device for device, _ in rows)
    slices = _slices(_answer(program, "-L"), _slice_memory(program))
    split = {device.index for device, is_split in rows if is_split}
    unsplit = [device for device, _ in rows if device.index not in split]
    return (*unsplit, *(device for device in slices if device.index in split))


def shown(all_devices: Sequence[Device], variable: str | None) -> tuple[Device, ...]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names: by index, UUID or its beginning; None = all.

    The list ends at -1, as for CUDA. Raises DevicesUnreadable for a device that is not there, or is named twice.
    """
    if variable is None:
        return tuple(all_devices)
    visible: list[Device] = []
    for entry in (part.strip() for part in variable.split(",")):
        if NONE.fullmatch(entry):
            break
        named = [device for device in all_devices if _is(device, entry)]
        several = len({device.index for device in named}) > 1 or (len(named) > 1 and not entry.isdecimal())
        if not all_devices:
            break
        if not named or several:
            listed = ", ".join(f"{device.name} ({device.uuid})" for device in all_devices)
            got = f"{entry!r}, which names {'several' if several else 'none'}"
            want_text = f"devices of this machine: {listed}"
            raise DevicesUnreadable(VARIABLE, want_text, got, "fix the variable, or unset it")
        if any(device in visible for device in named):
            raise DevicesUnreadable(VARIABLE, "every device once", f"{entry!r}, which is named before", "name it once")
        visible += named
    return tuple(visible)


def _is(device: Device, entry: str) -> bool:
    """Return whether an entry names the device; the number of a GPU names all of its slices."""
    if entry.isdecimal():
        return device.index == int(entry)
    return re.match("GPU-|MIG-", entry) is not None and device.uuid.lower().startswith(entry.lower())


def _answer(program: str, *arguments: str) -> list[str]:
    """Return the lines that nvidia-smi writes; none where it finds no device. Raises DevicesUnreadable."""
    shown_command = " ".join((PROGRAM, *arguments))
    try:
        process = subprocess.Popen(
            [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise DevicesUnreadable(shown_command, "an answer", str(error), CURE) from None
    try:
        output, _ = process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_S)
        raise DevicesUnreadable(shown_command, f"an answer within {ANSWER_S:g} s", "none", CURE) from None
    text = output.decode(errors="replace").strip()
    if process.returncode in NO_DEVICES:
        return []
    if process.returncode:
        raise DevicesUnreadable(shown_command, "exit code 0", f"{process.returncode}: {text[-200:]!r}", CURE)
    return [line for line in text.splitlines() if line.strip()]


def _row(line: str) -> tuple[Device, bool]:
    """Return the GPU in a line of the query, and whether it is split into MIG slices. Raises DevicesUnreadable."""
    parts = [part.strip() for part in line.split(",")]
    match parts:
        case [index, uuid, memory, mig] if index.isdecimal() and re.fullmatch(r"GPU-[0-9A-Fa-f-]+", uuid):
            size = re.fullmatch(r"(\d+) MiB", memory)
            return Device(index=int(index), uuid=uuid, memory_bytes=int(size[1]) << 20 if size else 0), mig == "Enabled"
    want_text = "lines of index, UUID, memory in MiB and MIG mode"
    raise DevicesUnreadable(" ".join((PROGRAM, *QUERY)), want_text, repr(line[:200]), CURE)


def _slice_memory(program: str) -> dict[tuple[str, int], int]:
    """Return (UUID of the GPU, number of the slice) -> bytes of memory, from ``nvidia-smi -q -x``.

    The list of devices has no memory of slices, and the query of fields no slices. An answer that cannot be read is no
    error: the slices are there, and only their memory is not known.
    """
    memory: dict[tuple[str, int], int] = {}
    with suppress(DevicesUnreadable, ElementTree.ParseError):
        for gpu in ElementTree.fromstring("\n".join(_answer(program, *DETAILS))).iter("gpu"):
            for part in gpu.iter("mig_device"):
                number, total = part.findtext("index", "").strip(), part.findtext("fb_memory_usage/total", "")
                if number.isdecimal() and (size := re.fullmatch(r"\s*(\d+) MiB\s*", total)):
                    memory[gpu.findtext("uuid", "").strip(), int(number)] = int(size[1]) << 20
    return memory


def _slices(lines: Sequence[str], memory: Mapping[tuple[str, int], int]) -> list[Device]:
    """Return the MIG slices in the output of ``nvidia-smi -L``; ``memory``: as ``_slice_memory``."""
    slices: list[Device] = []
    index, uuid = -1, ""
    for line in lines:
        if gpu := re.match(r"GPU (\d+):(?:.*\(UUID: (GPU-[0-9A-Fa-f-]+)\))?", line):
            index, uuid = int(gpu[1]), gpu[2] or ""
        elif part := re.match(r"\s+MIG .*Device\s+(\d+): \(UUID: (MIG-[0-9A-Za-z/-]+)\)", line):
            number = int(part[1])
            slices.append(Device(index=index, slice=number, uuid=part[2], memory_bytes=memory.get((uuid, number), 0)))
    return slices


def _free_shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 where there is none."""
    try:
        disk = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def nccl_of(program: str = sys.executable) -> str:
    """Return the version in a Python interpreter's environment, such as ``2.29.7``; empty = not known."""
    program_path = shutil.which(program)
    if program_path is None:
        return ""
    root = Path(program_path).parent.parent
    names = {path.name for folder in FOLDERS for path in root.glob(f"{folder}/nvidia_nccl_cu*-*.dist-info")}
    versions = {match[1] for name in names if (match := re.fullmatch(r"nvidia_nccl_cu\d+-(\d[\d.]*)\.dist-info", name))}
    return versions.pop() if len(versions) == 1 else ""
