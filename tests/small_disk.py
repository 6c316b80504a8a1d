"""A small file system of its own, to be filled: a tmpfs, which only root can mount."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """The mounted file system. Fillers are files of their own, so that it can be freed again."""

    root: Path

    @property
    def free(self) -> int:
        """Free bytes."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def fill(self, *, leaving: int) -> None:
        """Make a file larger or smaller until at most ``leaving`` bytes are free, while others write, too."""
        with (self.root / "filler").open("ab") as file:
            file.truncate(max(0, file.tell() + min(0, self.free - leaving)))
            with suppress(OSError):  # filled by others meanwhile
                while (missing := self.free - leaving) > 0:
                    os.write(file.fileno(), bytes(min(missing, 1 << 20)))

    def fill_inodes(self) -> None:
        """Make empty files until there is no inode left."""
        count = os.statvfs(self.root).f_favail
        for number in range(count):
            (self.root / f"filler-{number}").touch()

    def clear(self) -> None:
        """Remove the fillers."""
        for file in self.root.glob("filler*"):
            file.unlink()


@contextmanager
def small_disk(root: Path, *, size_bytes: int, options: str = "") -> Iterator[SmallDisk]:
    """Mount one at ``root`` while entered. Skips the test where that is not allowed (an error under CI)."""
    root.mkdir(parents=True, exist_ok=True)
    extra = f",{options}" if options else ""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}{extra}", "tmpfs", str(root)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted, which root may: {done.stderr.strip()}")
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
