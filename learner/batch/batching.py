"""The training batches of a step, made from a plan and its samples: token sequences are aligned, packed into rows and
divided over ranks.

Shape letters: as in ``batch.py``; L = tokens of one sample, R = tokens of its response. Knows numpy, no torch, no bus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.messages import Plan, Sample, Status
from tidemill.bus.wire.routed_experts import RoutedShape, unknown_rows
from tidemill.learner.batch.batch import TEACHER_ARRAYS, TOKEN_DTYPES, Array, MicroBatch, StepBatch


def build_batches(
    plan: Plan,
    samples: Sequence[Sample],
    *,
    recorded: bool = False,
    state: bytes = b"",
    pad_to: int = 1,
    eos_ids: frozenset[int] = frozenset(),
    token_limits: Mapping[int, int] | None = None,
    routed: RoutedShape | None = None,
) -> tuple[StepBatch, ...]:
    """Return the batch of every data-parallel rank for a plan and its samples (in the order of ``plan.seqs``).

    ``pad_to``: every row's length becomes a multiple of it (sequence and context parallelism divide rows into equal
    parts). ``eos_ids``: tokens that end a response, for ``unended_N``; empty = not known. ``token_limits``: maximum
    number of sampled tokens of an episode, by task; other tasks have ``max_new_tokens``. ``routed``: sizes of the
    model's routing, if the experts in the samples are replayed.
    """
    _check_samples(plan, samples)
    turns = [_turns(sample) for sample in samples]
    aligned = _aligned(plan, samples, turns)
    if routed is not None:
        aligned = with_experts(aligned, samples, routed)
    rows = _rows(plan, samples, eos_ids)
    rows |= _trained(plan, samples, aligned, turns)
    part_names, rows["parts_NK"] = _parts(samples)
    limits = token_limits or {}
    num_tokens = int(rows["trainable_N"].sum())
    return tuple(
        StepBatch(
            step=plan.step,
            dp_rank=rank,
            recorded=recorded,
            micro_batches=_pack_rank(plan, aligned, rank, pad_to),
            num_tokens=num_tokens,
            num_minibatches=plan.num_minibatches,
            max_new_tokens=max(limits.get(sample.task, sample.sampling.max_new_tokens) for sample in samples),
            num_sequences=len(aligned),
            teacher_top_k=max(_teacher_top_k(samples), 0),
            part_names=part_names,
            routing=(0, 0) if routed is None else (len(routed.layers), routed.top_k),
            routing_known=0.0 if routed is None else known_share(aligned, len(routed.layers) * routed.top_k),
            metadata=(),  # of another frame (``frames.py``)
            state=state,
            **rows,
        )
        for rank in range(plan.data_parallel)
    )


def _rows(plan: Plan, samples: Sequence[Sample], eos_ids: frozenset[int]) -> dict[str, Array]:
    """Return the columns that hold a value for each sample."""
    # Rewards of old recorded plans are not bounded; the ranks skip a step with infinity.
    with np.errstate(over="ignore"):
        rewards_N = np.array([sample.score for sample in samples], np.float32)
    return {
        "temperatures_N": np.array([sample.sampling.temperature for sample in samples], np.float64),
        "rewards_N": rewards_N,
        "groups_N": np.repeat(plan.tasks, plan.group_sizes).astype(np.int64),
        "response_lengths_N": np.array([sample.response_length for sample in samples], np.int32),
        "truncated_N": np.array([sample.status == Status.TRUNCATED for sample in samples], np.bool_),
        "unended_N": np.array([_unended(sample, eos_ids) for sample in samples], np.bool_),
        "demonstration_N": np.array([sample.demonstration for sample in samples], np.bool_),
        "sampled_N": np.array([np.count_nonzero(sample.loss_mask) for sample in samples], np.int32),
    }


def _parts(samples: Sequence[Sample]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the names of all parts of the rewards, in order, and their values, [N x K]; ``score`` is none of them."""
    rewards = [sample.reward if isinstance(sample.reward, dict) else {} for sample in samples]
    names = tuple(sorted({name for reward in rewards for name in reward} - {"score"}))
    with np.errstate(over="ignore"):  # as for the rewards
        return names, np.array([reward.get(name, np.nan) for reward in rewards for name in names], np.float32)


def _unended(sample: Sample, eos_ids: frozenset[int]) -> bool:
    if not eos_ids or sample.sampling.stop or sample.status is not Status.COMPLETED:
        return False
    return int(sample.tokens[-1]) not in eos_ids and int(sample.tokens[-1]) not in sample.sampling.stop_token_ids


def trainable_lags(
    sample: Sample, version_steps: Mapping[int, int], step: int, oldest_step: int | None
) -> NDArray[np.int32]:
    """Return the lag of every response token in step ``step``, [R]; -1 where a mask or the gate excludes it."""
    steps_R = np.repeat(
        np.array([version_steps[span.version] for span in sample.spans], np.int64),
        [span.num_tokens for span in sample.spans],
    )
    trainable_R = sample.loss_mask.astype(np.bool_)
    if oldest_step is not None:
        trainable_R &= steps_R >= oldest_step
    lags_R = step - 1 - steps_R
    assert not (trainable_R & (lags_R < 0)).any(), (
        f"step {step}: task {sample.task} index {sample.index} has tokens of a later step"
    )
    return np.where(trainable_R, lags_R, -1).astype(np.int32)


def _check_samples(plan: Plan, samples: Sequence[Sample]) -> None:
    """Assert that these are the samples of the plan."""
    assert len(samples) == len(plan.seqs), f"plan {plan.step}: {len(plan.seqs)} sequences, {len(samples)} samples"
    rows = np.ones(len(samples), np.int32) if plan.rows is None else plan.rows
    sizes = [len(sample.sizes) for sample in samples]
    assert rows.tolist() == sizes, f"plan {plan.step}: rows {rows.tolist()}, sequences of its samples {sizes}"


@dataclass(frozen=True, slots=True, eq=False)
class _SampleTurns:
    """The turns of one sample."""

    of_R: NDArray[np.int32]
    """Turn of each response token; -1 for a token that no turn has sampled."""
    rewards_C: NDArray[np.float32]


def _turns(sample: Sample) -> _SampleTurns:
    """Return the turns of a sample: one if it reports none."""
    if sample.turns is None:
        return _SampleTurns(np.zeros(sample.response_length, np.int32), np.zeros(1, np.float32))
    of_R = np.full(sample.response_length, -1, np.int32)
    for number, (at, tokens) in enumerate(zip(sample.turns.at.tolist(), sample.turns.tokens.tolist(), strict=True)):
        of_R[at : at + tokens] = number
    rewards_C = np.zeros(len(sample.turns.at), np.float32)
    for number, reward in sample.turns.rewards:
        rewards_C[number] = reward
    return _SampleTurns(of_R, rewards_C)


def _aligned(plan: Plan, samples: Sequence[Sample], turns: Sequence[_SampleTurns]) -> list[MicroBatch]:
    """Return every sequence of every sample as a row of its own, [M]."""
    rows: list[MicroBatch] = []
    first_turn, top_k = 0, _teacher_top_k(samples)
    left_out = set[int]() if plan.masked is None else set(np.flatnonzero(np.isin(plan.seqs, plan.masked)).tolist())
    for number, (sample, its) in enumerate(zip(samples, turns, strict=True)):
        lags_R = trainable_lags(sample, plan.version_steps, plan.step, plan.oldest_step)
        if number in left_out:
            lags_R = np.full_like(lags_R, -1)
        turn_R = np.where((lags_R >= 0) & (its.of_R >= 0), its.of_R + first_turn, -1)
        start = response_start = 0
        for size in sample.sizes:
            region = slice(response_start, response_start + size.response_length)
            tokens = sample.tokens[start : start + size.num_tokens]
            log_probs = sample.rollout_log_probs[region]
            row = _align(tokens, lags_R[region], turn_R[region], log_probs, place=(number, len(rows)))
            rows.append(row if top_k < 0 else replace(row, **_taught(sample, region, row.loss_mask_T, top_k)))
            start, response_start = start + size.num_tokens, region.stop
        first_turn += len(its.rewards_C)
    return rows


def _teacher_top_k(samples: Sequence[Sample]) -> int:
    """Return K if a teacher has listed K tokens at each position of every sample of a policy; -1 = not everywhere."""
    scored = [sample for sample in samples if not sample.demonstration]
    if not scored or any(sample.teacher_log_probs is None for sample in scored):
        return -1
    counts = {sample.teacher_top_k for sample in scored if sample.response_length}
    return counts.pop() if len(counts) == 1 else 0


def _taught(sample: Sample, region: slice, mask_T: NDArray[np.bool_], top_k: int) -> dict[str, Array]:
    """Return the teacher's scores of a sequence with response ``region``, target-aligned; 0 where not trainable."""
    start, length = len(mask_T) - (region.stop - region.start) - 1, len(mask_T)
    taught_T, ids_TK = np.zeros(length, np.float32), np.zeros((length, top_k), np.int32)
    log_probs_TK = np.zeros((length, top_k), np.float32)
    if sample.teacher_log_probs is not None:  # a demonstration has none
        taught_T[start:-1] = sample.teacher_log_probs[region]
    if top_k and sample.teacher_top_ids is not None and sample.teacher_top_log_probs is not None:
        ids_TK[start:-1] = sample.teacher_top_ids.reshape(-1, top_k)[region]
        log_probs_TK[start:-1] = sample.teacher_top_log_probs.reshape(-1, top_k)[region]
    return {
        "teacher_log_probs_T": np.where(mask_T, taught_T, np.float32(0)),
        "teacher_top_ids_TK": np.where(mask_T[:, None], ids_TK, 0).astype(np.int32).ravel(),
        "teacher_top_log_probs_TK": np.where(mask_T[:, None], log_probs_TK, np.float32(0)).ravel(),
    }


def with_experts(aligned: Sequence[MicroBatch], samples: Sequence[Sample], routed: RoutedShape) -> list[MicroBatch]:
    """Return the sequences of the samples with the experts of their tokens; -1 where a sample does not have them."""
    parts: list[NDArray[np.int16]] = []
    for sample in samples:
        indices = np.full((len(sample.tokens), len(routed.layers), routed.top_k), -1, np.int16)
        experts = sample.routed_experts
        # Samples of recorded plans are not checked again: with other sizes they were recorded for another setting.
        if experts is not None and experts.shape == indices.shape:
            known_L = ~unknown_rows(experts)
            indices[known_L] = experts[known_L]
        parts += np.split(indices, np.cumsum([size.num_tokens for size in sample.sizes])[:-1])
    return [replace(row, experts=part.reshape(-1)) for row, part in zip(aligned, parts, strict=True)]


def known_share(aligned: Sequence[MicroBatch], per_token: int) -> float:
    """Return the share of the tokens before a target that have known experts; 0 without such tokens."""
    num_known = sum(int((row.experts[: (len(row.tokens_T) - 1) * per_token : per_token] >= 0).sum()) for row in aligned)
    return num_known / max(1, sum(len(row.tokens_T) - 1 for row in aligned))


def _align(
    tokens: NDArray[np.int32],
    lags_R: NDArray[np.int32],
    turn_R: NDArray[np.int32],
    log_probs_R: NDArray[np.float32],
    *,
    place: tuple[int, int],
) -> MicroBatch:
    """Return one sequence as a row of its own. ``place``: its sample and its number in the step."""
    # The first target of the response stands at the last token of the context.
    length, start = len(tokens), len(tokens) - len(lags_R) - 1
    assert start >= 0, f"sample {place[0]} of the step: no token before the response"
    targets = np.zeros(length, np.int64)
    targets[:-1] = tokens[1:]
    lags, turn_T = np.full(length, -1, np.int32), np.full(length, -1, np.int32)
    lags[start:-1], turn_T[start:-1] = lags_R, turn_R
    log_probs = np.zeros(length, np.float32)
    log_probs[start:-1] = log_probs_R
    return MicroBatch(
        tokens_T=tokens.astype(np.int64),
        targets_T=targets,
        position_ids_T=np.arange(length, dtype=np.int64),
        cu_seqlens=np.array([0, length], np.int32),
        sample_T=np.full(length, place[0], np.int32),
        sequence_T=np.full(length, place[1], np.int32),
        turn_T=turn_T,
        loss_mask_T=lags >= 0,
        rollout_log_probs_T=np.where(lags >= 0, log_probs, np.float32(0)),
        lag_T=lags,
    )


def _trained(
    plan: Plan, samples: Sequence[Sample], aligned: Sequence[MicroBatch], turns: Sequence[_SampleTurns]
) -> dict[str, Array]:
    """Return the columns of the trainable tokens, of the minibatches and of the turns."""
    counts = np.array([len(sample.sizes) for sample in samples])
    first_M = np.cumsum(counts) - counts  # a sample's sequences are in one minibatch, because whole groups are
    turns_N = [len(its.rewards_C) for its in turns]
    turn_T = np.concatenate([part.turn_T[part.turn_T >= 0] for part in aligned])
    return {
        "trainable_N": np.add.reduceat([part.loss_mask_T.sum() for part in aligned], first_M).astype(np.int32),
        "minibatches_N": plan.micro_batches[first_M] // (plan.num_micro_batches // plan.num_minibatches),
        "turn_samples_C": np.repeat(np.arange(len(samples), dtype=np.int32), turns_N),
        "turn_rewards_C": np.concatenate([its.rewards_C for its in turns]),
        "turn_tokens_C": np.bincount(turn_T, minlength=sum(turns_N)).astype(np.int32),
    }


def _padding(length: int, top_k: int, experts: int) -> MicroBatch:
    lengths = dict.fromkeys(TOKEN_DTYPES, length) | dict.fromkeys(TEACHER_ARRAYS, length * max(top_k, 0))
    lengths |= {"teacher_log_probs_T": length * (top_k >= 0), "experts": length * experts}
    arrays = {name: np.zeros(lengths[name], dtype) for name, dtype in TOKEN_DTYPES.items()}
    for name in ("sample_T", "sequence_T", "turn_T", "lag_T", "experts"):
        arrays[name].fill(-1)
    arrays["position_ids_T"], arrays["cu_seqlens"] = np.arange(length), np.array([0, length], np.int32)
    return MicroBatch(**arrays)


def _pack_rank(plan: Plan, aligned: Sequence[MicroBatch], rank: int, pad_to: int) -> tuple[MicroBatch, ...]:
    bins: list[list[MicroBatch]] = [[] for _ in range(plan.num_micro_batches)]
    for row in np.flatnonzero(plan.ranks == rank):
        bins[int(plan.micro_batches[row])].append(aligned[int(row)])
    top_k = (
        len(aligned[0].teacher_top_ids_TK) // len(aligned[0].tokens_T) if len(aligned[0].teacher_log_probs_T) else -1
    )
    experts = len(aligned[0].experts) // len(aligned[0].tokens_T)
    return tuple(concatenate(parts, pad_to, top_k, experts) for parts in bins)


def concatenate(parts: Sequence[MicroBatch], pad_to: int, top_k: int, experts: int) -> MicroBatch:
    """Return sequences as one row. ``top_k``: listed by a teacher, -1 = no teacher; ``experts``: of each token."""
    length = sum(len(part.tokens_T) for part in parts)
    # An empty micro-batch gets a row of padding, because all ranks take part in the collectives of every micro-batch.
    missing = -length % pad_to if parts else pad_to
    padded = [*parts, _padding(missing, top_k, experts)] if missing else list(parts)
    arrays = {
        name: np.concatenate([getattr(part, name) for part in padded]) for name in TOKEN_DTYPES if name != "cu_seqlens"
    }
    lengths = [len(part.tokens_T) for part in padded]
    return MicroBatch(cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), **arrays)
