"""Training steps made of real Samples and a real Plan, and one or two real ranks that train them."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.forked import Forked
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.messages import Plan, Sample, Sampling, Span, Status
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.batch.batch import MicroBatch, StepBatch
from tidemill.learner.batch.batching import align, build_batches, pack_share
from tidemill.learner.buffer.assignment import assign
from tidemill.learner.buffer.sample_index import SampleIndex, index_of
from tidemill.learner.feed.feed_messages import decode_batch, share_in, step_frames, unpack


def make_samples(
    *,
    vocab: int,
    groups: int = 4,
    group_size: int = 4,
    step: int = 3,
    seed: int = 0,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | None = None,
) -> list[Sample]:
    """Return random samples with two spans, of lags 1 and 0 when step ``step`` trains them (version v is the weights of
    step v).

    ``temperature``: of all, or of the groups in turn. ``top_k``: tokens that their teacher listed at each position;
    None = they have no teacher.
    """
    generator = np.random.default_rng((seed, step))
    temperatures = [temperature] if isinstance(temperature, float) else temperature
    samples = []
    for task in range(1, groups + 1):
        prompt = generator.integers(3, vocab, int(generator.integers(2, 7)))
        for index in range(group_size):
            length = int(generator.integers(2, 13))
            tokens = np.concatenate([prompt, generator.integers(3, vocab, length)]).astype(np.int32)
            old = int(generator.integers(1, length))
            samples.append(
                Sample(
                    run="r",
                    task=task,
                    index=index,
                    group_size=group_size,
                    attempt="a",
                    prompt="p",
                    tokens=tokens,
                    response_length=length,
                    response="x",
                    rollout_log_probs=(-np.log(vocab) + generator.normal(0, 0.3, length))
                    .clip(max=0)
                    .astype(np.float32),
                    loss_mask=np.ones(length, np.uint8),
                    spans=(
                        Span(version=max(0, step - 2), num_tokens=old),
                        Span(version=step - 1, num_tokens=length - old),
                    ),
                    reward={
                        "score": (score := float(generator.integers(0, 3))),
                        "right": score,
                        "even": float(index % 2 == 0),
                    },
                    status=Status.COMPLETED,
                    sampling=Sampling(temperature=temperatures[task % len(temperatures)], max_new_tokens=12),
                )
            )
    return samples if top_k is None else [_taught(sample, vocab, top_k, seed=seed) for sample in samples]


def _taught(sample: Sample, vocab: int, top_k: int, *, seed: int) -> Sample:
    """Return the sample with the scores of a random teacher."""
    generator = np.random.default_rng((seed, sample.task, sample.index))
    length = sample.response_length
    log_probs = -np.log(vocab) + generator.normal(0, 0.5, length)
    ids = np.stack([generator.choice(vocab, top_k, replace=False) for _ in range(length)])
    top = np.log(generator.dirichlet(np.ones(top_k + 1), length)[:, :top_k])
    listed = (
        {"teacher_top_ids": ids.astype(np.int32).ravel(), "teacher_top_log_probs": top.astype(np.float32).ravel()}
        if top_k
        else {}
    )
    return replace(sample, teacher_log_probs=log_probs.clip(max=0).astype(np.float32), **listed)


def make_batches(
    samples: list[Sample],
    *,
    step: int = 3,
    data_parallel: int = 1,
    max_tokens: int = 1 << 20,
    minibatches: int = 1,
    recorded: bool = False,
    state: bytes = b"",
    pad_to: int = 1,
    routed: RoutedShape | None = None,
) -> tuple[StepBatch, ...]:
    """Return the batch of every data-parallel rank."""
    tasks = sorted({sample.task for sample in samples})
    sizes = [sum(sample.task == task for sample in samples) for task in tasks]
    in_group = [sum(len(sample.sizes) for sample in samples if sample.task == task) for task in tasks]
    rows = np.array([len(sample.sizes) for sample in samples], np.int32)
    lengths = [size.num_tokens for sample in samples for size in sample.sizes]
    placed = assign(
        lengths, data_parallel=data_parallel, max_tokens=max_tokens, minibatches=minibatches, group_sizes=in_group
    )
    plan = Plan(
        epoch=1,
        step=step,
        tasks=np.array(tasks, np.int64),
        seqs=np.arange(len(samples), dtype=np.int64),
        group_sizes=np.array(sizes, np.int32),
        ranks=placed.ranks,
        micro_batches=placed.micro_batches,
        version_steps={version: version for version in range(step)},
        oldest_step=None,
        data_parallel=data_parallel,
        num_micro_batches=placed.num_micro_batches,
        num_minibatches=placed.num_minibatches,
        config_digest="",
        chain="",
        rows=rows if (rows > 1).any() else None,
    )
    return build_batches(plan, samples, recorded=recorded, state=state, pad_to=pad_to, routed=routed)


def with_long_prompts(samples: list[Sample], *, vocab: int) -> list[Sample]:
    """Return the samples behind 20 tokens that all share, and 30 that their group shares."""
    generator = np.random.default_rng(0)
    begin = generator.integers(3, vocab, 20)
    own = {task: generator.integers(3, vocab, 30) for task in sorted({sample.task for sample in samples})}
    return [
        replace(sample, tokens=np.concatenate([begin, own[sample.task], sample.tokens]).astype(np.int32))
        for sample in samples
    ]


def with_random_experts(
    samples: list[Sample], routed: RoutedShape, *, unknown_share: float = 0.2, seed: int = 0
) -> list[Sample]:
    """Return the samples with random experts for their tokens; some rows, and the last one of each, are unknown."""
    generator, found = np.random.default_rng(seed), []
    for sample in samples:
        size = (len(sample.tokens), len(routed.layers), routed.num_experts)
        experts = generator.random(size).argsort(axis=-1)[..., : routed.top_k].astype(routed.dtype)
        unknown = generator.random(len(experts)) < unknown_share
        unknown[-1] = True
        experts[unknown] = np.iinfo(routed.dtype).max
        found.append(replace(sample, routed_experts=experts))
    return found


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank for torch.distributed."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_ranks(
    main: Callable[..., None], arguments: tuple[Any, ...], *, world: int, out: Path, timeout_s: float = 600.0
) -> list[dict[str, Any]]:
    """Run ``main(*arguments, out)`` in ``world`` processes; each writes ``out/rank-<r>.json``; return the content of
    these files.
    """
    deadline = time.monotonic() + timeout_s
    with KeptPort() as port:
        children = [
            Forked(main, (*arguments, out), rank_environment(rank, world, port.number), out / f"rank-{rank}.log")
            for rank in range(world)
        ]
        try:
            for child in children:
                assert child.wait(deadline - time.monotonic()) == 0, child.output.read_text()
        finally:
            for child in children:
                child.kill()
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def packed_by_ranks(
    plan: Plan, samples: Sequence[Sample], *, pad_to: int = 1, routed: RoutedShape | None = None
) -> list[StepBatch]:
    """Return the batches that ranks pack of the frames of a feeder that has no tokens, and of the samples."""
    indices = []
    for seq, sample in zip(plan.seqs, samples, strict=True):
        index = index_of(int(seq), sample, routed=routed)
        index.sample = None
        indices.append(msgspec.msgpack.decode(msgspec.msgpack.encode(index), type=SampleIndex))
    _, frames_of_ranks = step_frames(plan, indices, {}, ports=[1, 2], pad_to=pad_to, routed=routed)
    by_seq = dict(zip(plan.seqs.tolist(), samples, strict=True))
    batches = []
    for frames in frames_of_ranks:
        header, *others = [bytes(frame) for frame in frames]
        fields = unpack(header, where="test")
        share = share_in(fields, others)
        assert share is not None
        aligned: dict[int, MicroBatch] = {}
        for place in share.places:
            aligned |= align(share, place, by_seq[place.seq])
        batches.append(replace(decode_batch(fields, others), micro_batches=pack_share(share, aligned)))
    return batches
