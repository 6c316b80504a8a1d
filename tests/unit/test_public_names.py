"""The names for users' code, which stay where they are from release to release."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = {
    "tidemill.actors": ["EngineConfig", "NONCE_HEADER"],
    "tidemill.bus": ["Capabilities", "Sample", "Task", "nonce", "score_of"],
    "tidemill.launch": ["StepMetrics"],
    "tidemill.learner": [
        *(
            "AlgorithmConfig",
            "BeforeLogProbs",
            "BeforeStep",
            "Decision",
            "Denominators",
            "Family",
            "FilterBuffer",
            "FilterGroup",
            "LocalLayers",
        ),
        *("PolicyLoss", "Tokens", "first_output", "log_ratio", "read_train", "sequence_means", "spread"),
    ],
    "tidemill.rewards": ["GroupRequest", "RewardRequest"],
    "tidemill.weightstore": ["Bucket", "Payload", "Rendezvous", "TensorSpec", "WeightReceiver", "unflatten"],
}
PAGE = Path(__file__).resolve().parents[2] / "docs/extending.md"


@pytest.mark.parametrize("package", NAMES)
def test_public_names_are_listed_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(NAMES[package])
    for name in NAMES[package]:
        assert getattr(module, name) is not None
        assert f"`{name}`" in PAGE.read_text(), f"{name} is missing on the page"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_importing_the_packages_loads_nothing_heavy() -> None:
    heavy = {"torch", "nats", "pydantic", "numpy"}
    code = f"import sys\nimport {', '.join(NAMES)}\nassert not {heavy} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
