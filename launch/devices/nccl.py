"""The NCCL version of a Python environment, from the package that torch's wheels bring; nothing is imported or started."""

import re
import shutil
import sys
from pathlib import Path

FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def nccl_of(program: str = sys.executable) -> str:
    """Return the version in the environment of a Python interpreter, such as ``2.29.7``; empty = not known (none, or several)."""
    found = shutil.which(program)
    if found is None:
        return ""
    root = Path(found).parent.parent
    names = {path.name for folder in FOLDERS for path in root.glob(f"{folder}/nvidia_nccl_cu*-*.dist-info")}
    versions = {match[1] for name in names if (match := re.fullmatch(r"nvidia_nccl_cu\d+-(\d[\d.]*)\.dist-info", name))}
    return versions.pop() if len(versions) == 1 else ""
