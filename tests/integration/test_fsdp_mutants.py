"""The traps of packed rows and of fully_shard, most of them silent: each is put back into the source, and the named
tests must fail. ``make test-families`` runs them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FSDP = "tidemill.learner.backends.fsdp"
BLIND = ("self_test", "exact = difference <= tolerance", "exact = True")
"""A self-test that sees no leak: else the family would be computed in padded rows, which is right."""


class Trap(NamedTuple):
    """A fault, as (module, its text, the text in its place), and the tests that see it."""

    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


ALONE = "test_fsdp_families.py::test_a_row_is_what_each_sequence_is_alone"
GIVEN_BEHIND = ("policy", "places_T, experts_TK)", "places_T, experts_TK.roll(1, 0))")
ROUTED = "test_fsdp_families.py::test_routers_of_two_ranks_take_known_experts"
OF_EXPERTS = "test_fsdp_families.py::test_adapters_are_in_every_implementation_of_experts"
TRAPS = {
    "masks that a family makes without the positions of the row": Trap(
        (("opening", '{"attn_implementation": PACKED} if packed else {}', "{}"), BLIND), (f"{ALONE}[gpt_oss]",)
    ),
    "states that go on from one sequence into the next": Trap(
        (("attention", "in mixers_of(model, family):", "in ():"), BLIND),
        (f"{ALONE}[lfm2]", f"{ALONE}[granitemoehybrid]", f"{ALONE}[qwen3_5_moe]"),
    ),
    "a root that stays whole behind a pass without gradient": Trap(
        (
            (
                "policy",
                "in the meantime.\n            self.root.weights_changed()",
                "in the meantime.\n            pass",
            ),
        ),
        ("test_fsdp_training.py::test_a_pass_without_gradient_leaves_no_whole_weights_on_a_rank",),
    ),
    "weights that are written while the root is whole": Trap(
        (("model", "cast(FSDPModule, self).reshard()", "pass"),),
        ("test_fsdp_training.py::test_the_next_pass_sees_weights_that_were_written_behind_a_pass",),
    ),
    "buffers that no file has": Trap(
        (
            (
                "weights",
                "target in named_tensors(model):",
                "target in model.named_parameters():",
            ),
        ),
        (f"{ALONE}[qwen3, tied]", f"{ALONE}[gemma4]"),
    ),
    "logits without the scale and the cap of the family": Trap(
        (("policy", "scale=self.root.head.scale, cap=self.root.head.cap\n        )", ")"),),
        ("test_fsdp_training.py::test_log_probs_have_the_scale_and_the_cap_of_the_family",),
    ),
    "dropout by default": Trap(
        (("opening", "setattr(part, name, type(value)(0))", "pass"),),
        ("test_fsdp_model.py::test_dropout_of_a_family_is_left_out",),
    ),
    "names of experts in one tensor": Trap(
        (("weights", "kept | revert_weight_conversion(model, {", "kept | dict({"),),
        ("test_fsdp_model.py::test_experts_in_one_tensor_have_the_names_of_their_files", f"{ALONE}[qwen3_5_moe]"),
    ),
    "experts that are given to the tokens behind them in padded rows": Trap(
        (GIVEN_BEHIND,), (f"{ROUTED}[glm_moe_dsa]",)
    ),
    "experts that are recorded and given in other places of padded rows": Trap(
        (
            GIVEN_BEHIND,
            ("policy", "experts_NK[self._padded.places_T", "experts_NK[self._padded.places_T.roll(-1)"),
        ),
        (f"{ROUTED}[glm_moe_dsa]",),
    ),
    "means of gradients": Trap(
        (("model", "module.set_gradient_divide_factor(1.0)", "pass"),),
        ("test_fsdp_families.py::test_two_ranks_sum_the_gradients_of_their_rows[lfm2]",),
    ),
    "a tied head with a weight of its own": Trap(
        (("model", "model.transformer.tie_weights()", "pass"),), (f"{ALONE}[qwen3, tied]",)
    ),
    "a norm in float32": Trap(
        (("optimizer", "flat = values.reshape(-1)\n", "return torch.linalg.vector_norm(values).double().square()\n"),),
        ("../unit/test_fsdp_optimizer.py::test_squares_are_summed_exactly[5000000]",),
    ),
    "a self-test without gradients": Trap(
        (("self_test", ".abs().max()), *gaps)", ".abs().max()), 0.0)"),),
        ("test_fsdp_model.py::test_a_family_with_other_gradients_in_packed_rows_is_padded",),
    ),
    "adapters of experts in the place of a weight that is not transposed": Trap(
        (("lora", "left, right = right.mT, left.mT", "pass"),),
        (f"{OF_EXPERTS}[eager-gpt_oss]", f"{OF_EXPERTS}[grouped_mm-gpt_oss]"),
    ),
    "adapters of experts behind the parameters": Trap(
        (("lora", "self.__dict__.update(weights)", "pass"), ("lora", "del self.__dict__[name]", "pass")),
        (f"{OF_EXPERTS}[batched_mm-qwen3_moe]",),
    ),
    "gradients that stay between steps": Trap(
        (("optimizer", "finally:\n            self.zero_grad()", "finally:\n            pass"),),
        ("test_learner_memory.py::test_steps_with_releases_between_them_are_the_same_bits[float32-fsdp]",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_seen(name: str) -> None:
    changes: dict[str, list[tuple[str, str]]] = {}
    for module, old, new in TRAPS[name].changes:
        changes.setdefault(f"{FSDP}.{module}", []).append((old, new))
    nodes = [f"tests/integration/{test}" for test in TRAPS[name].tests]
    environment = {"PYTHONPATH": str(ROOT / "tests/mutated"), "MUTANT": json.dumps(changes), "THOROUGH": ""}
    # pytest would load self_test.py by itself, past the change, as a module of tests.
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-o", "python_files=test_*.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *nodes],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^FAILED tests/(\S.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    assert run.returncode == 1 and not re.search(r"\d+ (passed|errors?)\b", run.stdout), run.stdout[-3000:]
    assert failed, run.stdout[-3000:]
