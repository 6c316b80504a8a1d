"""Files that are written whole: the old one stays until the new one is complete, and a private one is never readable by
other users.
"""

import os
from pathlib import Path

import pytest

from tidemill.bus.system.files import write_whole


def test_a_file_is_replaced_and_its_directory_made(tmp_path: Path) -> None:
    file = tmp_path / "there" / "f"
    write_whole(file, "one")
    write_whole(file, "two")
    assert file.read_text() == "two"
    assert os.listdir(file.parent) == ["f"]


def test_what_cannot_be_written_leaves_the_old_one_and_is_written_over_next_time(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_whole(file, "one")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    assert file.read_text() == "one"
    write_whole(file, "two")
    assert file.read_text() == "two"


def test_a_private_file_is_readable_by_its_owner_only_whatever_was_there(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("of all")
    file.with_name(".f.new").write_text("left by a kill, for all to read")
    old = os.umask(0)
    try:
        write_whole(file, "of one", private=True)
        write_whole(tmp_path / "open", "of all")
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o666
