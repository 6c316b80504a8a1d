"""Loss, gradient norm and every metric are the same for every split of a step: one table of layouts, one of
algorithms.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.algorithm_cases import CASES, TRIED
from tests.examples import THOROUGH
from tests.integration import megatron_layouts
from tests.integration.gradients import Gradients, differing, load
from tests.integration.megatron_layouts import ROWS, VOCAB, Layout
from tests.learner_steps import run_ranks
from tests.metric_names import missing, undocumented
from tests.same_metrics import OF_LAYOUT, TIMES, assert_same
from tests.tiny_models import write_tiny_model

WHOLE = "one row"
DEEP, TIED = "one row, 4 layers", "one row, tied embeddings"
HALF = "several rows in bfloat16"
LAYOUTS = {
    WHOLE: Layout(watched=True),
    "4 micro-batches": Layout(max_tokens=70, every=2, first=1),
    "unpacked": Layout(max_tokens=1, every=24, first=1),
    "data parallel 2": Layout(data_parallel=2, max_tokens=80, every=2),
    "tensor parallel 2, logits in chunks": Layout(tensor_parallel=2, max_tokens=120, chunk=10_000, every=20, first=1),
    "unpacked, every case": Layout(max_tokens=1),
    "4 micro-batches, every case": Layout(max_tokens=70),
    "data parallel 2, every case": Layout(data_parallel=2, max_tokens=60),
    "tensor parallel 2, logits in chunks, every case": Layout(tensor_parallel=2, max_tokens=120, chunk=10_000),
    DEEP: Layout(model="deep", every=14),
    "4 layers, several rows": Layout(model="deep", max_tokens=120, every=28),
    TIED: Layout(model="tied", every=14),
    "tp2 sp": Layout(tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=14),
    "pp2": Layout(pipeline_parallel=2, model="deep", max_tokens=120, every=14),
    "pp2 of one row": Layout(pipeline_parallel=2, model="deep", every=28),
    "pp2 vpp2": Layout(pipeline_parallel=2, virtual_pipeline=2, model="deep", max_tokens=120, every=14),
    "pp2, tied": Layout(pipeline_parallel=2, model="tied", max_tokens=120, every=28),
    "pp2 vpp2, tied": Layout(pipeline_parallel=2, virtual_pipeline=2, model="tied", max_tokens=120, every=28),
    "cp2": Layout(context_parallel=2, model="deep", max_tokens=120, every=28),
    "cp2 sharded optimizer": Layout(context_parallel=2, sharded=True, model="deep", max_tokens=120, every=28),
    "dp2 sharded optimizer": Layout(
        data_parallel=2, sharded=True, overlap=True, chunk=10_000, model="deep", max_tokens=60, every=28
    ),
    "tp2 sp, recompute": Layout(
        tensor_parallel=2, sequence_parallel=True, recompute="full", model="deep", max_tokens=120, every=28
    ),
    "pp2, recompute": Layout(pipeline_parallel=2, recompute="full", model="deep", max_tokens=120, every=28),
    "pp2 vpp2, recompute": Layout(
        pipeline_parallel=2, virtual_pipeline=2, recompute="full", model="deep", max_tokens=120, every=28
    ),
    "cp2, recompute": Layout(context_parallel=2, recompute="full", model="deep", max_tokens=120, every=28),
    HALF: Layout(dtype="bfloat16", model="deep", max_tokens=120, every=28),
    "bfloat16, pp2": Layout(
        dtype="bfloat16", pipeline_parallel=2, model="deep", max_tokens=120, every=28, reference=HALF
    ),
    "bfloat16, pp2 vpp2": Layout(
        dtype="bfloat16",
        pipeline_parallel=2,
        virtual_pipeline=2,
        model="deep",
        max_tokens=120,
        every=28,
        reference=HALF,
    ),
    "tp2 x pp2": Layout(
        tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=14
    ),
    "dp2 x tp2": Layout(
        data_parallel=2, tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=60, every=14
    ),
    "cp2 x tp2": Layout(
        context_parallel=2, tensor_parallel=2, sequence_parallel=True, model="deep", max_tokens=120, every=14
    ),
    "pp2 x dp2": Layout(
        pipeline_parallel=2,
        data_parallel=2,
        sharded=True,
        overlap=True,
        chunk=10_000,
        model="tied",
        max_tokens=60,
        every=14,
    ),
    "pp2 vpp2 x cp2": Layout(
        pipeline_parallel=2,
        virtual_pipeline=2,
        context_parallel=2,
        sharded=True,
        model="deep",
        max_tokens=120,
        every=14,
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "flat": {},
    "deep": {"num_hidden_layers": 4},
    "tied": {"num_hidden_layers": 4, "tied": True},
}
"""Models by name, and the layout of one rank with which the others are compared."""
OF_ONE = {"flat": WHOLE, "deep": DEEP, "tied": TIED}
REFERENCES = {*OF_ONE.values(), HALF}
SLOW = {name for name, layout in LAYOUTS.items() if layout.world == 4 or "every case" in name} | {
    "unpacked",
    "tensor parallel 2, logits in chunks",
    "pp2",
    "pp2 of one row",
    "pp2 vpp2",
    "pp2, tied",
    "cp2 sharded optimizer",
    "tp2 sp, recompute",
    "pp2, recompute",
    "pp2 vpp2, recompute",
    "cp2, recompute",
    "4 layers, several rows",
    "bfloat16, pp2",
    "bfloat16, pp2 vpp2",
}
"""Layouts of four processes, those with every case, and those that repeat parts of other layouts. Each case is divided
anyway: over two replicas, or into micro-batches.
"""

Results = dict[str, dict[str, Any]]


class Runs:
    """``runs(layout)``: each rank's results of every case. Each layout runs once."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        """``make``: makes a directory."""
        self._make, self._models, self._done = make, dict[str, Path](), dict[str, tuple[Path, list[Results]]]()

    def __call__(self, name: str) -> list[Results]:
        return self._run(name)[1]

    def gradients(self, name: str, rows: str) -> list[tuple[Gradients, dict[str, float]]]:
        """Return each rank's gradients and metrics in a step of one of ``ROWS``."""
        return [load(self._run(name)[0], rows, rank) for rank in range(LAYOUTS[name].world)]

    def _run(self, name: str) -> tuple[Path, list[Results]]:
        if name not in self._done:
            out, layout = self._make("layout"), LAYOUTS[name]
            if layout.model not in self._models:
                self._models[layout.model] = write_tiny_model(
                    self._make("model"), vocab_size=VOCAB, **MODELS[layout.model]
                )
            args = (self._models[layout.model], layout)
            self._done[name] = out, run_ranks(megatron_layouts.main, args, world=layout.world, out=out, timeout_s=600)
        return self._done[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp)


def _pairs() -> Iterator[Any]:
    for name, layout in LAYOUTS.items():
        for case in layout.cases if name not in REFERENCES else ():
            yield pytest.param(name, case, id=f"{case}-{name}", marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize(("layout", "case"), list(_pairs()))
def test_the_same_numbers(trained: Runs, layout: str, case: str) -> None:
    wanted = trained(LAYOUTS[layout].reference or OF_ONE[LAYOUTS[layout].model])[0][case]
    for rank in trained(layout):
        for step, other in zip(rank[case]["metrics"], wanted["metrics"], strict=True):
            assert_same(step, other)
        assert rank[case]["weights"] == pytest.approx(wanted["weights"], rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, layout in LAYOUTS.items()
        if name not in REFERENCES and layout.with_gradients
    ],
)
def test_the_same_gradients(trained: Runs, layout: str, rows: str) -> None:
    """The gradient of every weight, within 1e-5 of its largest element; also with each sequence in a row of its own."""
    [(wanted, metrics)] = trained.gradients(OF_ONE[LAYOUTS[layout].model], "as the layout packs them")
    for gradients, ours in trained.gradients(layout, rows):
        assert differing(gradients, wanted) == {}
        assert_same(ours, metrics)


NOT_COMPARED = {
    **dict.fromkeys(("train/step_seconds", "train/tokens_per_second", "train/tokens_per_second_per_device"), "times"),
    **dict.fromkeys(
        ("train/tflops", "train/mfu", "train/peak_memory_bytes"), "of rank 0 and its device: tests/gpu, test_flops"
    ),
    **dict.fromkeys(("train/wait_seconds", "train/wait_share"), "of the rank's process, which waits for batches"),
    "train/mtp_loss": "on FSDP2 alone: test_further_heads",
    "train/shared_tokens": "of the layout: test_shared_prompts",
    "train/routing_known": "of experts that an engine has chosen: test_routing_replay",
}
"""Metrics of docs/metrics.md that a step writes and no layout compares here, with the reason."""
NONE_HERE = {
    "train/skipped_minibatches": "test_megatron_rank, test_megatron_sharding",
    "train/unended_share": "counted where batches are made: test_batch",
}
"""Metrics that are 0 in all of these steps, and the tests in which they are not."""


def _names(results: Results) -> dict[str, bool]:
    """Return the metrics that some case of a layout has, and whether one of the values is not 0."""
    found: dict[str, bool] = {}
    for result in results.values():
        for step in result["metrics"]:
            found |= {
                name: found.get(name, False) or value != 0 for name, value in step.items() if name not in OF_LAYOUT
            }
    return found


def test_the_cases_have_every_metric_of_a_step(trained: Runs) -> None:
    found = _names(trained(WHOLE)[0])
    assert missing(found, ("train/", "offpolicy/", "custom/")) == NOT_COMPARED.keys() - TIMES
    assert not undocumented(found)
    assert {name for name, moves in found.items() if not moves} == NONE_HERE.keys()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in LAYOUTS
        if name not in REFERENCES
    ],
)
def test_a_layout_has_every_metric(trained: Runs, layout: str) -> None:
    """``test_the_same_numbers`` compares all metrics of the cases of a layout: among them is each that any case has on
    one rank.
    """
    wanted = _names(trained(WHOLE)[0])
    for rank in trained(layout):
        assert _names(rank) == wanted


def test_the_layouts_are_what_they_are_called(trained: Runs) -> None:
    def split(name: str) -> int:
        """Return the micro-batches of a step of one minibatch."""
        results = trained(name)[0]
        return next(results[case]["micro_batches"] for case in LAYOUTS[name].cases if CASES[case][1] == 1)

    assert split(WHOLE) == 1
    assert split("4 micro-batches") >= 4
    assert split("data parallel 2") > 1
    if THOROUGH:
        assert split("unpacked") == 24
        assert split("tensor parallel 2, logits in chunks") > 1


def test_a_step_uses_only_what_has_a_deterministic_kernel_on_cuda(trained: Runs) -> None:
    """The trainer's step and Megatron's. With logits in several chunks: test_megatron_trainer."""
    assert {
        case: result["raising_on_cuda"] for case, result in trained(WHOLE)[0].items() if result["raising_on_cuda"]
    } == {}


def test_the_algorithms_are_not_all_the_same(trained: Runs) -> None:
    """Each setting changes the second step's numbers: none of them is without effect."""
    results = trained(WHOLE)[0]
    norms: dict[float, list[str]] = {}
    for case in TRIED:
        second = results[case]["metrics"][1]
        norms.setdefault(round(second["train/grad_norm"], 9), []).append(case)
        assert all(math.isfinite(value) for value in second.values()), case
    same = sorted(sorted(cases) for cases in norms.values() if len(cases) > 1)
    assert same == [cases for cases in ([name for name in same if name in TRIED] for same in SAME) if len(cases) > 1]


SAME = [
    ["decoupled", "kpop", "tis"],
    ["dppo_tv", "ipo"],
    ["kl k1+", "kl k3", "kl k3+", "kl low_var_kl"],
    ["naive", "none"],
]
"""Cases that are one algorithm here: one optimizer step per version, ratios within the bounds."""
