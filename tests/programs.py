"""Programs of the system that tests run, and the Debian packages that have them.

    python3 -m tests.programs              name the packages that are missing; exit code 1 if there are any
    python3 -m tests.programs --install    install them (root, apt-get)

Imports nothing but the standard library: ``.ci/run`` calls it before there is an environment.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "openssl": "openssl",
    "make": "make",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "systemd-analyze": "systemd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "mpirun.mpich": "mpich",
    "mpirun.openmpi": "openmpi-bin",
}
"""Debian package of each program."""
INSTALL_S = 600.0


def missing(programs: Iterable[str] = PACKAGES) -> list[str]:
    """Return the packages of the given programs that are not there, sorted."""
    return sorted({PACKAGES[program] for program in programs if shutil.which(program) is None})


def install(packages: Iterable[str]) -> None:
    """Install Debian packages. Raises subprocess.CalledProcessError, and OSError without apt-get."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", "--quiet", *words], check=True, env=environment, stdin=subprocess.DEVNULL, timeout=INSTALL_S
        )


def main(arguments: list[str]) -> int:
    """Install or name what is missing. Returns the exit code."""
    packages = missing()
    failure = ""
    if packages and "--install" in arguments:
        try:
            install(packages)
        except (OSError, subprocess.SubprocessError) as error:
            failure = f" ({error})"
        packages = missing()
    if packages:
        print(
            f"the tests want these Debian packages: {' '.join(packages)}{failure}; as root: apt-get install "
            f"{' '.join(packages)}"
        )
    return 1 if packages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
