"""The sandbox of programs: the rights of a program, every way to harm that was thought of, and nothing left of any."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import THOROUGH
from tests.refusals import refusal
from tidemill.bus.system.limits import ProcessLimits, children_of
from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.code import code
from tidemill.rewards.errors import RewardFailed, UnknownReward
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import bind
from tidemill.rewards.sandbox import Bounds, ProgramOutcome, run
from tidemill.rewards.scorers import opened

BOUNDS = Bounds(seconds=60.0, memory_mb=512)
BRIEF = Bounds(seconds=1.0, memory_mb=512)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = children_of({os.getpid()})
    yield
    assert children_of({os.getpid()}) <= before


@pytest.mark.parametrize(
    ("program", "stdin", "output"),
    [
        ("print(int(input()) * 2)", "21\n", "42\n"),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc\n"),
        (
            (
                "import math, heapq, itertools, collections, re, json, random, datetime, functools, bisect, "
                "decimal\nprint(1)"
            ),
            "",
            "1\n",
        ),
        ("import numpy as np\nprint(int(np.eye(3).sum()))", "", "3\n"),
        (
            "import threading\nx = []\nt = threading.Thread(target=lambda: x.append(1))\nt.start(); t.join(); print(x)",
            "",
            "[1]\n",
        ),
        ("def f(n): return n and 1 + f(n - 1)\nprint(f(20_000))", "", "20000\n"),
        ("print(7 ** 20_000 > 0, len(str(7 ** 20_000)))", "", "True 16902\n"),
        ("print('é\\u4e2d')", "", "é中\n"),
        ("import sys\nsys.exit()", "", ""),
        ("if __name__ == '__main__': print('main')", "", "main\n"),
        ("import os; a, b = os.pipe(); os.set_inheritable(a, True); print(os.fdopen(os.dup(0)).read())", "x", "x\n"),
    ],
)
def test_programs_that_compute(program: str, stdin: str, output: str) -> None:
    assert run(program, BOUNDS, stdin=stdin) == ProgramOutcome(output=output, passed=True)


def test_calls_and_tests() -> None:
    assert run("def f(a, b): return a + b", BOUNDS, call=("f", [1, 2])).value == 3
    assert run("class Solution:\n def f(self, a): return (a, {1})", BOUNDS, call=("f", ["x"])).value == ["x", [1]]
    assert run("def f(a): return a", BOUNDS, tests="assert f(3) == 3").passed
    assert run("def f(a): return a", BOUNDS, tests="assert f(3) == 4").reason == "AssertionError: "
    assert run("def f(a): return a", BOUNDS, call=("g", [1])).reason.startswith("KeyError")


FORGED = {
    "unconfined": b'{"unconfined": 1}',
    "brackets": b"[" * 30_000,
    "maps": b'{"a":' * 30_000,
    "nearly too deep": b'{"value":' + b"[" * 900 + b"]" * 900 + b"}",
    "error that is no text": b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}",
    "text that is no text": b'{"error": "a", "text": {"b": 1}}',
    "half a surrogate pair": b'{"error": "\\ud800", "text": "\\ud800"}',
    "ended": b'{"ended": true}',
    "passed": b'{"passed": true}',
    "value": b'{"value": 0}',
    "all": b'{"passed": "", "ended": true, "value": 0, "error": 0}',
    "digits": b"9" * 5_000,
    "value of many digits": b'{"value": ' + b"9" * 4_000 + b"}",
    "infinite": b'{"value": 1e999}',
    "no number": b'{"value": NaN}',
    "the first byte again": b"+",
    "nothing": b"",
    "no UTF-8": b"\xff\xfe\x00",
}
ENDS = [
    "os._exit(0)",
    "os._exit(1)",
    "os.kill(os.getpid(), 9)",
    "os.kill(os.getpid(), 40)",
    "os.closerange(3, 64)",
    "pass",
]
"""Ends of a program that has written its own result; signal 40 has no name."""


@pytest.mark.parametrize("place", range(len(FORGED)), ids=list(FORGED))
def test_a_forged_result_is_worth_nothing_and_never_fails_its_sample(place: int) -> None:
    """Two ends of a program for each result in ``make test``, together all of them."""
    result = [*FORGED.values()][place]
    labels = ["assert False", {"inputs": ["1"], "outputs": ["2"]}, {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}]
    for number, end in enumerate(ENDS):
        if not THOROUGH and (number - place) % 3:
            continue
        write = f"import os\nfor fd in range(3, 64):\n  try: os.write(fd, {result!r})\n  except OSError: pass\n"
        response = f"```python\n{write}{end}\n```"
        request = RewardRequest(
            prompt="", response=response, label=labels[number % len(labels)], status=Status.COMPLETED
        )
        assert code(request)["score"] == 0.0, end


def test_a_program_that_never_ends_has_a_score_though_many_tests_are_run() -> None:
    response = "```python\nimport time\nx = input()\ntime.sleep(1000 * (x != '1'))\nprint(x)\n```"
    label = {"inputs": list("123456"), "outputs": list("123456")}
    request = RewardRequest(prompt="", response=response, label=label, status=Status.COMPLETED)
    begin = time.monotonic()
    assert code(request, seconds=60.0, total_seconds=10.0, share=True) == {"score": 1 / 6, "passed": 1.0, "tests": 6.0}
    assert time.monotonic() - begin < 60.0


def test_an_interpreter_that_does_not_begin_is_no_fault_of_the_response() -> None:
    with refusal(RewardFailed, reward="code", reason=re.compile(r"\bexit code 1$")):
        run("print(1)", BOUNDS, python="/bin/false")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("x = [", "SyntaxError"),
        ("import sys; sys.exit(3)", "exit code"),
        ("import os; os._exit(0)", "it ended itself"),
        ("import os; os.abort()", "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("x = bytearray(10 * 2**30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytes(2**20))", "MemoryError"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nsys.stderr.write('x' * 2**24)\nraise KeyError", "KeyError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "PermissionError"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1')", "URLError"),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import multiprocessing as m\np = m.get_context('fork').Process(target=print); p.start()", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "PermissionError"),
        ("open('/tmp/tidemill-sandbox', 'w')", "PermissionError"),
        ("import os; os.open('/tmp', os.O_TMPFILE | os.O_WRONLY)", "PermissionError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        ("open('/proc/1/environ').read()", "PermissionError"),
        ("import os; os.mkdir('/tmp/tidemill-sandbox')", "PermissionError"),
        ("import os; os.rename('/tmp', '/tmp2')", "PermissionError"),
        ("import os; os.chmod('/tmp', 0)", "PermissionError"),
        ("import os; os.symlink('/', '/tmp/tidemill-sandbox')", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.kill(-1, 9)", "PermissionError"),
        ("import signal, os; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)", "PermissionError"),
        ("import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
        ("import fcntl; fcntl.fcntl(0, 10, 9)", "PermissionError"),  # F_SETSIG
        ("import fcntl; fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)", "PermissionError"),
        ("import os; os.setsid()", "PermissionError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError"),
        ("import resource as r, os; r.prlimit(os.getppid(), r.RLIMIT_CPU, (0, 0))", "PermissionError"),
        ("import os; os.nice(-5)", "PermissionError"),
        (
            "import os; os.unshare(os.CLONE_NEWUSER)" if hasattr(os, "unshare") else "import os; os.chroot('/')",
            "PermissionError",
        ),
        (
            "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nassert libc.ptrace(16, 1, 0, 0) == 0",
            "AssertionError",
        ),
        (
            (
                "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall(425, 8, 0) >= 0"
            ),  # io_uring_setup
            "AssertionError",
        ),
        (
            "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall(435, 0, 0) >= 0  # clone3",
            "AssertionError",
        ),
        ("import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSTI, b'x')", "OSError"),
    ],
)
def test_what_a_program_may_not_do(program: str, reason: str) -> None:
    outcome = run(program, BOUNDS)
    assert not outcome.passed
    assert outcome.reason.startswith(reason), outcome.reason
    assert not Path("/tmp/tidemill-sandbox").exists()


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "input()\nimport time; time.sleep(1000)",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        (
            "import threading as t, time\nwhile True:\n try: t.Thread(target=time.sleep, args=(99,)).start()\n "
            "except Exception: pass"
        ),
        "import signal, time\nfor n in (2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "x = 9 ** 9 ** 9",
        "import re; re.fullmatch('(a+)+b', 'a' * 60)",
    ],
)
def test_what_never_ends_is_ended(program: str) -> None:
    assert run(program, BRIEF, stdin="x").reason in ("time", "SIGXCPU", "SIGKILL")


def test_an_open_descriptor_is_not_inherited(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)), secret.open():
        found = run("import os\nfor n in range(64):\n try: os.fstat(n); print(n)\n except OSError: pass", BOUNDS)
    assert len(found.output.split()) <= 4, "standard ones, and that of the result"
    listed = run("import os\nfor n in range(3, 64):\n try: print(os.read(n, 10))\n except OSError: pass", BOUNDS)
    assert "secret" not in listed.output


def test_credentials_are_not_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_PASSWORD", "secret")
    assert "NATS" not in run("import os; print(dict(os.environ))", BOUNDS).output


def test_programs_run_beside_each_other() -> None:
    found: list[ProgramOutcome] = []
    threads = [threading.Thread(target=lambda: found.append(run("print(sum(range(10**6)))", BOUNDS))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.output for one in found] == ["499999500000\n"] * 8


def test_a_machine_without_a_sandbox_is_refused_before_the_first_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with refusal(UnknownReward, name="code", reason=re.compile("riscv64")):
        bind("code")
    with refusal(RewardFailed, reward="code", reason=re.compile("riscv64"), outside=True):
        run("print(1)", BOUNDS)


async def test_the_reward_in_an_actor_s_children_leaves_nothing_running() -> None:
    label = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]}
    async with opened("code", {"seconds": 20.0}, ProcessLimits(timeout_s=60.0, workers=2)) as score:
        for program, want in (("print(int(input()) + 1)", 1.0), ("print(2)", 0.0), ("import os\nos.fork()", 0.0)):
            response = f"I would write\n```python\n{program}\n```\nand that is it."
            found = await score(RewardRequest(prompt="p", response=response, label=label, status=Status.COMPLETED))
            assert isinstance(found, dict)
            assert (found["score"], found["tests"]) == (want, 2.0)
    async with opened("code", {"seconds": 30.0}, ProcessLimits(timeout_s=0.5, workers=1)) as score:
        with pytest.raises(TimeoutError):
            await score(
                RewardRequest(
                    prompt="p", response="```python\nwhile True: pass\n```", label=label, status=Status.COMPLETED
                )
            )


async def test_an_actor_with_many_open_files_has_its_children_too() -> None:
    """A process inherits its socket under the number that it has in the actor, and ``select.select`` takes numbers up
    to 1023 only.
    """
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        async with opened("code", {"seconds": 60.0}, ProcessLimits(timeout_s=120.0, workers=1)) as score:
            label = {"inputs": ["1\n"], "outputs": ["2\n"]}
            response = "```python\nprint(int(input()) + 1)\n```"
            assert await score(RewardRequest(prompt="p", response=response, label=label, status=Status.COMPLETED)) == {
                "score": 1.0,
                "passed": 1.0,
                "tests": 1.0,
            }
    finally:
        for file in files:
            os.close(file)
