"""Loss, gradient norm and every metric are the same for every split of a step: one table of layouts, one of algorithms."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.algorithm_cases import CASES
from tests.integration import megatron_layouts
from tests.integration.megatron_layouts import VOCAB, Layout
from tests.learner_steps import run_ranks
from tests.same_metrics import assert_same
from tests.tiny_models import write_tiny_model

WHOLE = "one row"
DEEP, TIED = "one row, 4 layers", "one row, tied embeddings"
HALF = "several rows in bfloat16"
LAYOUTS = {
    WHOLE: Layout(watched=True),
    "4 micro-batches": Layout(max_tokens=70, every=2, first=1),
    "unpacked": Layout(max_tokens=1, every=8),
    "data parallel 2": Layout(data_parallel=2, max_tokens=80, every=2),
    "tensor parallel 2, logits in chunks": Layout(tensor_parallel=2, max_tokens=120, chunk=10_000, every=5),
    "unpacked, every case": Layout(max_tokens=1),
    "4 micro-batches, every case": Layout(max_tokens=70),
    "data parallel 2, every case": Layout(data_parallel=2, max_tokens=60),
    "tensor parallel 2, logits in chunks, every case": Layout(tensor_parallel=2, max_tokens=120, chunk=10_000),
    DEEP: Layout(model="deep", every=10),
    "4 layers, several rows": Layout(model="deep", max_tokens=120, every=10),
    TIED: Layout(model="tied", every=11),
    "tp2 sp": Layout(tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=10),
    "pp2": Layout(pipeline_parallel=2, model="deep", max_tokens=120, every=10),
    "pp2 of one row": Layout(pipeline_parallel=2, model="deep", every=20),
    "pp2 vpp2": Layout(pipeline_parallel=2, virtual_pipeline=2, model="deep", max_tokens=120, every=10),
    "pp2, tied": Layout(pipeline_parallel=2, model="tied", max_tokens=120, every=22),
    "pp2 vpp2, tied": Layout(pipeline_parallel=2, virtual_pipeline=2, model="tied", max_tokens=120, every=22),
    "cp2": Layout(context_parallel=2, model="deep", max_tokens=120, every=10),
    "cp2 sharded optimizer": Layout(context_parallel=2, sharded=True, model="deep", max_tokens=120, every=20),
    "dp2 sharded optimizer": Layout(data_parallel=2, sharded=True, model="deep", max_tokens=60, every=10),
    "tp2 sp, recompute": Layout(tensor_parallel=2, sequence_parallel=True, recompute="full", model="deep", max_tokens=120, every=20),
    "pp2, recompute": Layout(pipeline_parallel=2, recompute="full", model="deep", max_tokens=120, every=20),
    "pp2 vpp2, recompute": Layout(pipeline_parallel=2, virtual_pipeline=2, recompute="full", model="deep", max_tokens=120, every=20),
    "cp2, recompute": Layout(context_parallel=2, recompute="full", model="deep", max_tokens=120, every=20),
    HALF: Layout(dtype="bfloat16", model="deep", max_tokens=120, every=26),
    "bfloat16, pp2": Layout(dtype="bfloat16", pipeline_parallel=2, model="deep", max_tokens=120, every=26, reference=HALF),
    "bfloat16, pp2 vpp2": Layout(
        dtype="bfloat16", pipeline_parallel=2, virtual_pipeline=2, model="deep", max_tokens=120, every=26, reference=HALF
    ),
    "tp2 x pp2": Layout(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=10),
    "dp2 x tp2": Layout(data_parallel=2, tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=60, every=10),
    "cp2 x tp2": Layout(context_parallel=2, tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=10),
    "pp2 x dp2": Layout(pipeline_parallel=2, data_parallel=2, sharded=True, overlap=True, model="tied", max_tokens=60, every=11),
    "pp2 vpp2 x cp2": Layout(
        pipeline_parallel=2, virtual_pipeline=2, context_parallel=2, sharded=True, model="deep", max_tokens=120, every=10
    ),
}
MODELS: dict[str, dict[str, Any]] = {"flat": {}, "deep": {"num_hidden_layers": 4}, "tied": {"num_hidden_layers": 4, "tied": True}}
"""Models by name, and the layout of one rank with which the others are compared."""
OF_ONE = {"flat": WHOLE, "deep": DEEP, "tied": TIED}
REFERENCES = {*OF_ONE.values(), HALF}
SLOW = {name for name, layout in LAYOUTS.items() if layout.world == 4 or "every case" in name} | {
    "pp2 of one row",
    "pp2, tied",
    "cp2 sharded optimizer",
    "tp2 sp, recompute",
    "pp2, recompute",
    "bfloat16, pp2",
}
"""Layouts of four processes, those with every case, and those that repeat parts of other layouts. Each case is divided anyway: over two
replicas, or into micro-batches."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Results]]:
    """Return a function: ``trained(layout)`` gives each rank's results of every case; each layout runs once."""
    models: dict[str, Path] = {}
    done: dict[str, list[Results]] = {}

    def run(name: str) -> list[Results]:
        if name not in done:
            out = tmp_path_factory.mktemp("layout")
            layout = LAYOUTS[name]
            if layout.model not in models:
                models[layout.model] = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, **MODELS[layout.model])
            done[name] = run_ranks(megatron_layouts.main, (models[layout.model], layout), world=layout.world, out=out, timeout_s=600)
        return done[name]

    return run


def _pairs() -> Iterator[Any]:
    for name, layout in LAYOUTS.items():
        for case in layout.cases if name not in REFERENCES else ():
            yield pytest.param(name, case, id=f"{case}-{name}", marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize(("layout", "case"), list(_pairs()))
def test_the_same_numbers(trained: Callable[[str], list[Results]], layout: str, case: str) -> None:
    wanted = trained(LAYOUTS[layout].reference or OF_ONE[LAYOUTS[layout].model])[0][case]
    for rank in trained(layout):
        for step, other in zip(rank[case]["metrics"], wanted["metrics"], strict=True):
            assert_same(step, other)
        assert rank[case]["weights"] == pytest.approx(wanted["weights"], rel=1e-5, abs=2e-5)


def test_the_layouts_are_what_they_are_called(trained: Callable[[str], list[Results]]) -> None:
    def split(name: str) -> int:
        """Return the micro-batches of a step of one minibatch."""
        results = trained(name)[0]
        return next(results[case]["micro_batches"] for case in LAYOUTS[name].cases if CASES[case][1] == 1)

    assert split(WHOLE) == 1
    assert split("4 micro-batches") >= 4
    assert split("unpacked") == 24
    assert min(split("data parallel 2"), split("tensor parallel 2, logits in chunks")) > 1


def test_a_step_uses_only_what_has_a_deterministic_kernel_on_cuda(trained: Callable[[str], list[Results]]) -> None:
    """The trainer's step and Megatron's. With logits in several chunks: test_megatron_trainer."""
    assert {case: result["raising_on_cuda"] for case, result in trained(WHOLE)[0].items() if result["raising_on_cuda"]} == {}


def test_the_algorithms_are_not_all_the_same(trained: Callable[[str], list[Results]]) -> None:
    """Each setting changes the second step's numbers: none of them is without effect."""
    results = trained(WHOLE)[0]
    norms: dict[float, list[str]] = {}
    for case in CASES:
        second = results[case]["metrics"][1]
        norms.setdefault(round(second["train/grad_norm"], 9), []).append(case)
        assert all(math.isfinite(value) for value in second.values()), case
    same = sorted(sorted(cases) for cases in norms.values() if len(cases) > 1)
    assert same == SAME


SAME = [
    ["decoupled", "kpop", "tis"],
    ["dppo_kl", "dppo_tv", "ipo"],
    ["gmpo", "gspo"],
    ["kl k1+", "kl k3", "kl k3+", "kl low_var_kl"],
    ["naive", "none"],
]
"""Cases that are one algorithm here: one optimizer step per version, ratios within the bounds."""
