"""The lab itself: machines reach each other, are cut off, deaf, lossy or slow, lose power and return, and leave nothing
behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.lab import TRAP, Lab, Machine, NoLab, Started, why_not
from tests.waits import poll

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SERVER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 7000), family=family) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].sendall(socket.gethostname().encode())
"""
CLIENT = """
import socket, sys, time
deadline = time.monotonic() + float(sys.argv[2])
while True:
    try:
        with socket.create_connection((sys.argv[1], 7000), timeout=0.5) as connection:
            print(connection.recv(100).decode())
            break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.05)
"""


@pytest.fixture(params=[False, True], ids=["ipv4", "ipv6"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path, "a", "b", is_ipv6=request.param) as made:
        yield made


def serving(machine: Machine) -> Started:
    """Start a server that answers with the name of its machine, and wait until it listens."""
    log = machine.disk / "server.log"
    log.write_text("")
    server = machine.start([sys.executable, "-c", SERVER, machine.address], log=log)
    poll(lambda: "listening" in server.log or server.poll() is not None)
    assert server.poll() is None, server.log
    return server


def answer(here: Machine, there: str, *, within_s: float = 0.0) -> str:
    """Return the answer of the server at a host; empty when it cannot be reached."""
    try:
        return here.run(sys.executable, "-I", "-S", "-c", CLIENT, there, str(within_s)).strip()
    except NoLab:
        return ""


def reached(here: Machine, there: str) -> str:
    """Return the answer of the server at a host, once it comes: after a trouble the kernel asks for the address again
    only every second.
    """
    return answer(here, there, within_s=60.0)


def test_links_are_cut_healed_and_dropped_in_one_direction(lab: Lab) -> None:
    a, b = lab["a"], lab["b"]
    serving(b)
    assert (reached(a, b.address), reached(a, "b")) == ("b", "b")
    b.cut()
    assert answer(a, b.address) == ""
    b.heal()
    assert reached(a, b.address) == "b"
    a.drop_from(b)
    assert answer(a, b.address) == ""
    a.receive_all()
    assert reached(a, b.address) == "b"
    b.lose(100)
    assert answer(a, b.address) == ""
    b.lose(0)
    assert reached(a, b.address) == "b"


def test_a_machine_that_vanishes_returns_with_its_disk_and_without_its_processes(lab: Lab) -> None:
    a, b = lab["a"], lab["b"]
    server = serving(b)
    b.vanish()
    assert server.wait() == -signal.SIGKILL
    assert answer(a, b.address) == ""
    b.boot()
    assert b.run("cat", str(lab.disk / "server.log")) == "listening\n"
    assert a.run("ls", "-A", str(lab.disk)) == ""
    serving(b)
    assert reached(a, b.address) == "b"


def test_the_trap_of_a_host_name_on_loopback(tmp_path: Path) -> None:
    with Lab(tmp_path, "a", "b", hosts=TRAP) as lab:
        assert lab["a"].run("getent", "hosts", "a").split()[0] == "127.0.1.1"
        assert answer(lab["a"], "b") == ""


def test_nothing_is_left_of_a_lab_whose_process_is_killed(tmp_path: Path) -> None:
    code = "import signal, sys\nfrom pathlib import Path\nfrom tests.net.lab import Lab\n"
    code += (
        "with Lab(Path(sys.argv[1]), 'a') as lab:\n    lab['a'].start(['sleep', '1000'], log=Path(sys.argv[1]) / "
        "'log')\n"
    )
    code += "    print(lab['a'].init, flush=True)\n    signal.pause()\n"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        init = int(child.stdout.readline())
        os.kill(init, 0)
        child.kill()
    poll(lambda: not Path(f"/proc/{init}").exists())
