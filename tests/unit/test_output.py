"""Standard output and error on a full disk, at the end of a pipe, and closed: commands end with their own exit
codes.
"""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import rarely
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.system.output import Unwritable, _File, lossy

ROOT = Path(__file__).resolve().parents[2]


def test_a_lossy_file_goes_on_when_it_can_be_written_again(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    descriptor = os.dup(full)
    output = lossy(descriptor)
    for _ in range(3):
        print("lost" * 10_000, file=output)
    os.dup2(file, descriptor)
    print("é\udc80", file=output)
    assert (tmp_path / "log").read_bytes() == "é\\udc80\n".encode()
    output.close()
    for number in (file, full, descriptor):
        os.close(number)


def test_a_strict_file_raises_once(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    file = _File(descriptor, lossy=False)
    with refusal(Unwritable, error=re.compile(os.strerror(errno.ENOSPC))):
        file.write(b"lost")
    assert file.write(b"lost") == 4, "Python's flush at exit succeeds"
    file.close()
    os.close(descriptor)


def test_libraries_may_print_into_a_closed_pipe_in_a_process_whose_output_is_a_log() -> None:
    """A learner in a pipeline that had ended was ended by a library's print, with code 1."""
    for is_log in (True, False):
        code = (
            "import sys; from tidemill.bus.system import output\n"
            f"output.guard_standard_files(is_log={is_log}); print('x' * 100_000, flush=True); sys.exit(75)"
        )
        reader, writer = os.pipe()
        os.close(reader)
        ended = subprocess.run([sys.executable, "-c", code], stdout=writer, cwd=ROOT, check=False, timeout=LIMIT_S)
        os.close(writer)
        assert ended.returncode == (75 if is_log else 1)


SHOW, HELP, BAD = "config --reference", "--help", "config /no/such.yaml"
FULL = "standard output cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("words", "redirections", "code", "complaint"),
    [
        (SHOW, "> /dev/full", 1, f"tidemill config: {FULL}"),
        (HELP, "> /dev/full", 1, FULL),
        (SHOW, "| head -c 10 > /dev/null", 0, ""),
        (SHOW, ">&-", 0, ""),
        (BAD, "> /dev/full", 78, "/no/such.yaml"),
        (BAD, "2> /dev/full", 78, ""),
        (BAD, ">&- 2>&-", 78, ""),
        *rarely([(SHOW, "> /dev/full 2> /dev/full", 1, ""), (BAD, "2>&-", 78, "")]),
    ],
)
def test_a_command_ends_with_its_exit_code_wherever_its_output_goes(
    words: str, redirections: str, code: int, complaint: str
) -> None:
    line = f"'{sys.executable}' -m tidemill {words} {redirections}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
