"""Lines of metrics on a file system that has no room for a while: none is lost, none is cut off, none stands twice."""

import errno
import json
from pathlib import Path

import pytest

from tests.small_disk import small_disk
from tidemill.launch.run.growing_file import GrowingFile


def test_lines_wait_while_the_disk_is_full_and_stand_in_order_afterwards(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        file = GrowingFile(disk.root / "metrics.jsonl")
        disk.fill(leaving=6000)  # a page: some lines fit, and one would be cut off
        for step in range(100):
            file.append({"step": step, "text": "x" * 200})
            try:
                file.write()
            except OSError as error:
                assert error.errno == errno.ENOSPC
        assert 0 < file.num_waiting < 100
        written = file.file.read_text().splitlines()
        assert len(written) + file.num_waiting == 100 and all(json.loads(line) for line in written)
        disk.clear()
        file.write()
        assert file.num_waiting == 0
        assert [json.loads(line)["step"] for line in file.file.read_text().splitlines()] == list(range(100))


def test_a_directory_that_is_gone_and_comes_back_costs_no_line(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "run" / "metrics.jsonl")
    file.append({"step": 1})
    with pytest.raises(FileNotFoundError):
        file.write()
    (tmp_path / "run").mkdir()
    file.append({"step": 2})
    file.write()
    assert file.file.read_text() == '{"step": 1}\n{"step": 2}\n'
