"""The devices of this machine, read from a fake nvidia-smi: every form of CUDA_VISIBLE_DEVICES, MIG, and answers that
make no sense.
"""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_kit import MIB, environment, fake_nvidia_smi, row, uuid_of
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus import exit_codes
from tidemill.launch.devices import visible
from tidemill.launch.devices.shapes import DevicesUnreadable
from tidemill.launch.devices.visible import this_node

LISTING = f"""GPU 0: NVIDIA H100 80GB HBM3 (UUID: {uuid_of(0)})
  MIG 3g.40gb     Device  0: (UUID: MIG-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 1g.10gb     Device  1: (UUID: MIG-22222222-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: {uuid_of(1)})"""


def found(path: str, value: str | None = None) -> list[str]:
    return [device.name for device in this_node(environment(path, value)).devices]


def test_devices_have_their_uuid_and_memory(tmp_path: Path) -> None:
    node = this_node(environment(fake_nvidia_smi(tmp_path, 2)))
    assert [(device.index, device.uuid, device.memory_bytes) for device in node.devices] == [
        (i, uuid_of(i), MIB << 20) for i in range(2)
    ]
    assert (node.host, node.hidden_by, node.shm_bytes > 0) == (socket.gethostname(), "", True)


def test_without_nvidia_smi_there_are_no_devices(tmp_path: Path) -> None:
    assert this_node({"PATH": str(tmp_path)}).devices == ()


@pytest.mark.parametrize("code", visible.NO_DEVICES)
def test_without_a_driver_or_a_device_there_are_no_devices(tmp_path: Path, code: int) -> None:
    assert found(fake_nvidia_smi(tmp_path, script=f"echo No devices were found; exit {code}")) == []


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2", ["2"]),
        ("3, 1", ["3", "1"]),
        (uuid_of(2), ["2"]),
        ("GPU-00000001,0", ["1", "0"]),
        ("1,-1,2", ["1"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("none", []),
    ],
)
def test_the_variable_hides_devices(tmp_path: Path, value: str | None, names: list[str]) -> None:
    node = this_node(environment(fake_nvidia_smi(tmp_path, 4), value))
    assert [device.name for device in node.devices] == names
    assert node.hidden_by == ("CUDA_VISIBLE_DEVICES" if names and len(names) < 4 else "")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (
            "4",
            (
                r"CUDA_VISIBLE_DEVICES: want devices of this machine: 0 \(GPU-0.*got '4', which names none; fix "
                r"the variable"
            ),
        ),
        ("GPU-0000", "got 'GPU-0000', which names several"),
        ("GPU-77", "got 'GPU-77', which names none"),
        ("card0", "got 'card0', which names none"),
        ("1,1", "want every device once, got '1'"),
        (f"1,{uuid_of(1)}", "want every device once"),
    ],
)
def test_a_variable_that_names_no_device_is_refused(tmp_path: Path, value: str, complaint: str) -> None:
    with pytest.raises(DevicesUnreadable, match=complaint) as caught:
        found(fake_nvidia_smi(tmp_path, 4), value)
    assert caught.value.exit_code == exit_codes.CONFIG


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["1", "0:0", "0:1"]),
        ("0", ["0:0", "0:1"]),
        ("MIG-22222222-aaaa-bbbb-cccc-000000000000", ["0:1"]),
        ("MIG-1,1", ["0:0", "1"]),
    ],
)
def test_a_gpu_that_is_split_gives_its_slices(tmp_path: Path, value: str | None, names: list[str]) -> None:
    answer = f"[ \"$1\" = -L ] && cat <<'END' && exit\n{LISTING}\nEND\nprintf '{row(0, mig='Enabled')}\\n{row(1)}\\n'"
    assert found(fake_nvidia_smi(tmp_path, script=answer), value) == names


DETAILS = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:07:00.0">
    <mig_devices>
      <mig_device><index>0</index><fb_memory_usage><total>40448 MiB</total></fb_memory_usage></mig_device>
      <mig_device><index>1</index><fb_memory_usage><total>N/A</total></fb_memory_usage></mig_device>
    </mig_devices>
    <fb_memory_usage><total>81559 MiB</total></fb_memory_usage><uuid>{uuid_of(0)}</uuid>
  </gpu>
  <gpu id="00000000:0F:00.0"><mig_devices>None</mig_devices><uuid>{uuid_of(1)}</uuid></gpu>
</nvidia_smi_log>"""


@pytest.mark.parametrize(
    ("answer", "sizes"),
    [
        (f"cat <<'END'\n{DETAILS}\nEND", [40448 << 20, 0]),
        (f"cat <<'END'\n{DETAILS.replace(uuid_of(0), uuid_of(7))}\nEND", [0, 0]),
        ("echo '<nvidia_smi_log><gpu>'", [0, 0]),
        ("exit 3", [0, 0]),
    ],
    ids=["a size and none", "of another GPU", "cut off", "an error"],
)
def test_a_slice_has_the_memory_that_nvidia_smi_reports(tmp_path: Path, answer: str, sizes: list[int]) -> None:
    """From the XML; where it has none, the memory is not known."""
    script = f"""case "$1" in
-L) cat <<'END'\n{LISTING}\nEND\n;;
-q) {answer}\n;;
*) printf '{row(0, mig="Enabled")}\\n{row(1)}\\n';;
esac"""
    node = this_node(environment(fake_nvidia_smi(tmp_path, script=script)))
    assert [device.memory_bytes for device in node.devices] == [MIB << 20, *sizes]


def test_values_that_a_gpu_does_not_have(tmp_path: Path) -> None:
    (device,) = this_node(
        environment(fake_nvidia_smi(tmp_path, script=f"echo '{row(0, mig='[N/A]', memory='[N/A]')}'"))
    ).devices
    assert device.memory_bytes == 0 and device.slice == -1


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo hello", "want lines of index, UUID, memory in MiB and MIG mode, got 'hello'"),
        (f"echo '{row(0)}, 5'", "want lines of index"),
        ("echo '0, 1234, 5 MiB, Disabled'", "want lines of index"),
        ("head -c 300 /dev/zero", "want lines of index"),
        (
            "echo Unable to determine the device handle; exit 15",
            "want exit code 0, got 15: 'Unable to determine the device handle'",
        ),
    ],
)
def test_an_answer_without_sense_is_refused(tmp_path: Path, script: str, complaint: str) -> None:
    with pytest.raises(DevicesUnreadable, match=complaint) as caught:
        found(fake_nvidia_smi(tmp_path, script=script))
    assert "hide the devices (CUDA_VISIBLE_DEVICES=)" in str(caught.value)


def test_an_answer_that_does_not_come_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "ANSWER_S", 0.2)
    with refusal(DevicesUnreadable, got="none"):
        found(fake_nvidia_smi(tmp_path, script="exec sleep 600"))


def test_a_program_that_cannot_run_is_refused(tmp_path: Path) -> None:
    path = fake_nvidia_smi(tmp_path, 1)
    (tmp_path / "nvidia-smi").write_text("#!/no/such/interpreter\n")
    with refusal(DevicesUnreadable, where=re.compile("^nvidia-smi "), got=re.compile(os.strerror(errno.ENOENT))):
        found(path)


def test_hidden_devices_are_not_asked_for(tmp_path: Path) -> None:
    """With all devices hidden a broken driver does not matter."""
    assert found(fake_nvidia_smi(tmp_path, script="exit 15"), "") == []


def test_reading_them_loads_no_torch() -> None:
    code = (
        "import sys, tidemill.launch.devices.visible, tidemill.launch.devices.placement; "
        "assert not {'torch', 'numpy', 'nats'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
