"""Body of one rank of a world of two: trains mixtures of experts with the experts that samples have, and looks at every
router.

Run by the test. The layouts take turns in the processes, because starting those is most of the cost.
"""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.examples import rarely
from tests.integration.expert_ranks import DEEP, LAYOUTS, MODELS, VOCAB, Way, learner
from tests.integration.expert_ranks import WAYS as EXPERT_WAYS
from tests.learner_steps import make_batches, make_samples, with_random_experts
from tests.megatron_world import joined
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.backends.megatron.layers.experts import Mixture
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.debug.collector import Collector
from tidemill.learner.layout import parallel
from tidemill.learner.trainer.backups import OtherModels
from tidemill.learner.trainer.trainer import Trainer

GIVEN = Mixture(replay=True, given=True)
WAYS = {
    "given": Way(mixture=GIVEN, minibatches=3, lr=1e-2),
    "given, full": Way(mixture=GIVEN, minibatches=3, lr=1e-2, recompute="full"),
    "given, one by one, full": Way(mixture=GIVEN, own_rows=True, recompute="full"),
    "unknown": Way(mixture=GIVEN, minibatches=3, lr=1e-2),
    "moved": Way(minibatches=3, lr=1e-2),
    "given, balanced": Way(mixture=replace(GIVEN, aux_loss_coef=0.1), own_rows=True),
    "given, biased": Way(mixture=replace(GIVEN, bias_update_rate=0.01)),
}
USED = {family: MODELS[family] for family in ("qwen3_moe", "glm4_moe", DEEP)}
ONE = [
    *(("qwen3_moe", way) for way in WAYS if way not in ("given, biased", "given, one by one, full")),
    *((DEEP, way) for way in ("given", "given, one by one, full")),
    *(("glm4_moe", way) for way in ("given", "given, biased")),
]
"""Runs of one process."""
RUNS = [
    ("qwen3_moe", "CP2 EP2", "given"),
    ("qwen3_moe", "TP2", "given, full"),
    (DEEP, "PP2 VP2", "given, one by one, full"),
    ("glm4_moe", "EP2", "given, biased"),
    *rarely(
        [
            *(("qwen3_moe", layout, "given") for layout in ("EP2", "CP2", "TP2 EP2")),
            ("qwen3_moe", "PP2", "given, full"),
            (DEEP, "PP2", "given"),
            (DEEP, "PP2 VP2", "given"),
            ("glm4_moe", "TP2", "given"),
            *(("qwen3_moe", layout, "given, balanced") for layout in ("EP2", "CP2")),
        ]
    ),
]
"""(model, layout, way)"""
STEP = 3


class RouterCalls:
    """The tokens that a model's routers have sent to experts in one step, beside those that its rows were given."""

    def __init__(self, policy: MegatronPolicy, shape: RoutedShape) -> None:
        self._here, self._shape = policy.parallel, shape
        self._calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Layer -> the experts of each pass, and those that the router alone would choose by its logits, [T, K] in
        order of the ids.
        """
        for chunk in policy.chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    layer.mlp.router.register_forward_hook(partial(self._note, layer.layer_number - 1))

    def _note(self, layer: int, router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]) -> None:
        chosen_TK = outputs[1].nonzero()[:, 1].view(-1, router.topk)
        own_TK = router.gating(inputs[0].detach()).flatten(0, -2).topk(router.topk).indices.sort(-1).values
        self._calls.setdefault(layer, []).append((chosen_TK, own_TK))

    def found(self, batch: StepBatch) -> list[dict[str, int]]:
        """Return for each of this rank's layers and rows: passes with exactly the given experts, its known tokens, and
        of the other tokens in these passes those with the router's own experts, and all of them.
        """
        found = []
        for layer, calls in sorted(self._calls.items()):
            for row in batch.micro_batches:
                given_TK = (
                    torch.from_numpy(row.experts).view(-1, *batch.routing)[:, self._shape.layers.index(layer)].long()
                )
                given_TK = given_TK.chunk(self._here.cp_size)[self._here.cp_rank].chunk(self._here.tp_size)[
                    self._here.tp_rank
                ]
                known_T = given_TK[:, 0] >= 0
                wanted_TK = given_TK.sort(-1).values
                same = [
                    call
                    for call in calls
                    if len(call[0]) == len(wanted_TK) and bool((call[0] == wanted_TK)[known_T].all())
                ]
                own = sum(int((chosen_TK == own_TK)[~known_T].all(1).sum()) for chosen_TK, own_TK in same)
                found.append(
                    {
                        "passes": len(same),
                        "known": int(known_T.sum()),
                        "own": own,
                        "others": len(same) * int((~known_T).sum()),
                    }
                )
        return found


def train(model_dir: Path, here: parallel.Parallel, way: str) -> dict[str, Any]:
    """Train one step. Returns its metrics, ``rows`` of ``RouterCalls``, the movement of each router's bias of the first
    expert less that of the last, and whether every router's weight has moved.
    """
    shape = RoutedShape.of(json.loads((model_dir / "config.json").read_text()))
    assert shape is not None
    made, chosen = learner(model_dir, here, WAYS[way]), WAYS[way]
    calls = RouterCalls(made.policy, shape)
    share = {"unknown": 1.0, "given, biased": 0.0}.get(way, 0.2)
    # One by one they are an odd number of rows: the interleaved schedule of two stages adds one of padding.
    groups = {"groups": 3, "group_size": 3} if chosen.own_rows else {"groups": 6}
    samples = with_random_experts(make_samples(vocab=VOCAB, step=STEP, **groups), shape, unknown_share=share)
    if way == "given, biased":  # all tokens go to the first experts
        for sample in samples:
            assert sample.routed_experts is not None
            sample.routed_experts[:-1] = range(shape.top_k)
    batches = make_batches(
        samples,
        step=STEP,
        data_parallel=here.dp_size,
        max_tokens=1 if chosen.own_rows else 90,
        minibatches=chosen.minibatches,
        pad_to=here.tp_size * here.cp_size,
        routed=shape if chosen.mixture.given else None,
    )
    assert here.pp_size == 1 or not chosen.own_rows or len(batches[here.dp_rank].micro_batches) % 2 == 1
    routers = [parameter for name, parameter in made.policy.named_weights() if name.endswith("router.weight")]
    biases, before = (
        [bias.clone() for bias in made.policy.moving_biases()],
        [router.detach().clone() for router in routers],
    )
    metrics = made.trainer.train(batches[here.dp_rank])
    return {
        "metrics": metrics,
        "rows": calls.found(batches[here.dp_rank]) if chosen.mixture.given else [],
        "biases_moved": [
            float((now - was)[0]) - float((now - was)[-1])
            for now, was in zip(made.policy.moving_biases(), biases, strict=True)
        ],
        "routers_moved": all(not torch.equal(now.detach(), was) for now, was in zip(routers, before, strict=True)),
    }


def main(model_dirs: dict[str, Path], out: Path) -> None:
    results: dict[str, Any] = {}
    for layout in dict.fromkeys(layout for _, layout, _ in RUNS):
        with joined(**LAYOUTS[layout]) as here:
            for family, of, way in RUNS:
                if of == layout:
                    results[f"{family} {layout} {way}"] = train(model_dirs[family], here, way)
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))


# ---- where the tokens went, in dumps of debug.save_train

DUMPED = {"TP2 EP2": "qwen3_moe", "CP2 EP2": "qwen3_moe", "PP2": "qwen3_moe", "PP2 VP2": DEEP}
"""Layouts of two ranks with one replica, so that a file has every sequence, and the model of each."""


def dumped(model_dir: Path, here: parallel.Parallel, way: str, path: str) -> StepBatch:
    """Train one step with a dump at ``path``; return this rank's batch."""
    shape = RoutedShape.of(json.loads((model_dir / "config.json").read_text()))
    assert shape is not None
    chosen = WAYS.get(way) or EXPERT_WAYS[way]
    made = learner(model_dir, here, chosen)
    collector = Collector(path, here)
    trainer = Trainer(
        made.policy,
        made.optimizer,
        algorithm_of(entropy={"coef": 0.01}),
        max_lag=2,
        others=OtherModels(),
        collector=collector,
    )
    samples = with_random_experts(make_samples(vocab=VOCAB, step=STEP, groups=6), shape, unknown_share=0.2)
    batches = make_batches(
        samples,
        step=STEP,
        data_parallel=here.dp_size,
        max_tokens=90,
        minibatches=chosen.minibatches,
        pad_to=here.tp_size * here.cp_size,
        routed=shape if chosen.mixture.given else None,
    )
    trainer.train(batches[here.dp_rank])
    return batches[here.dp_rank]


def dump_in_layouts(model_dirs: dict[str, Path], out: Path) -> None:
    for layout, family in DUMPED.items():
        with joined(**LAYOUTS[layout]) as here:
            dumped(model_dirs[family], here, "given", f"{out}/{layout} {{step}} {{rank}}.safetensors")
    (out / f"rank-{os.environ['RANK']}.json").write_text("{}")
