"""A fake nvidia-smi for tests: a script of that name in a directory for PATH, which answers as a machine with these
devices would.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

MIB = 81_559
"""Memory of a fake GPU, as nvidia-smi reports it for an H100."""


def uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-aaaa-bbbb-cccc-000000000000"


def row(index: int, *, mig: str = "Disabled", memory: str = f"{MIB} MiB") -> str:
    return f"{index}, {uuid_of(index)}, {memory}, {mig}"


def fake_nvidia_smi(directory: Path, gpus: int = 0, *, script: str = "", listing: str = "") -> str:
    """Write the program and return a PATH on which it comes first. ``script`` replaces its body; ``listing`` is the
    answer to ``-L``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    answer = "\n".join(row(index) for index in range(gpus))
    body = script or f"[ \"$1\" = -L ] && cat <<'END' && exit\n{listing}\nEND\ncat <<'END'\n{answer}\nEND\n"
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def environment(path: str, visible: str | None = None) -> Mapping[str, str]:
    return {"PATH": path} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
