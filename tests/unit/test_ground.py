"""Conventions of the project that `make check` cannot see: one root for all packages, light imports, the map of the
tree.
"""

import re
import subprocess
import sys
from pathlib import Path

from tests.tree import tree

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "weightstore", "rewards", "actors", "learner", "launch")


def test_tidemill_is_the_only_import_name() -> None:
    """The rooms are packages of ``tidemill``, from one checkout: a user's ``rewards.py`` or ``bus/`` hides none of
    them, and is hidden by none.
    """
    code = (
        "import importlib, importlib.util\n"
        f"print('\\n'.join(importlib.import_module('tidemill.' + name).__file__ for name in {PACKAGES!r}))\n"
        f"assert not [name for name in {PACKAGES!r} if importlib.util.find_spec(name)]"
    )
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    roots = {name: Path(line).parents[1] for name, line in zip(PACKAGES, output.split(), strict=True)}
    assert set(roots.values()) == {ROOT}, f"a package comes from elsewhere: {roots}"


def test_light_modules_load_nothing_heavy() -> None:
    """Importing a config, a port, bus or launch loads neither torch, Megatron, SGLang nor a NATS client."""
    light = [
        "tidemill.bus.config",
        "tidemill.weightstore.config",
        "tidemill.actors.config",
        "tidemill.learner.settings.config",
        "tidemill.launch.settings.run_config",
    ]
    light += [
        "tidemill.bus",
        "tidemill.bus.wire.messages",
        "tidemill.launch",
        "tidemill.launch.cli.main",
        "tidemill.actors.engines.port",
        "tidemill.weightstore.transport.port",
        "tidemill.rewards.port",
    ]
    code = (
        f"import importlib, sys\nfor n in {light!r}: importlib.import_module(n)\n"
        "heavy = {'torch', 'megatron', 'sglang', 'nats', 'transformers', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_tokenizer_of_a_feeder_loads_no_torch() -> None:
    code = (
        "import sys\nfrom tidemill.launch.run.feeder_process import without_torch\n"
        "with without_torch():\n    from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_printed_tree_has_a_role_for_every_file() -> None:
    """A file without a docstring would be a line that says nothing."""
    lines = [line for line in tree() if line.startswith("  ")]
    assert len(lines) > 100
    assert not [line for line in lines if len(line.split()) < 3]


def test_every_package_of_the_disk_is_installed() -> None:
    declared = re.search(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert declared
    names = set(re.findall(r'"([\w.]+)"', declared.group(1)))
    on_disk = {
        str(p.parent.relative_to(ROOT)).replace("/", ".")
        for name in PACKAGES
        for p in (ROOT / name).rglob("__init__.py")
    }
    assert names == {"tidemill", *(f"tidemill.{name}" for name in on_disk - {"launch.tidemill"})}
