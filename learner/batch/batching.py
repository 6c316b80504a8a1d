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
from tidemill.learner.buffer.sample_index import NO_TEACHER, SampleIndex, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlace:
    """A sample that a rank packs, and where it stands in the step."""

    seq: int
    number: int
    """Index of the sample in the step."""
    first_sequence: int
    first_turn: int
    masked: bool
    """True if a filter has masked it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Samples of a step that a data-parallel rank packs, and the numbers by which it aligns them."""

    step: int
    version_steps: dict[int, int]
    oldest_step: int | None
    places: list[SamplePlace]
    micro_batches: list[list[int]]
    """Sequences of each row of this rank, by their number in the step."""
    teacher_top_k: int
    """As ``_teacher_top_k``."""
    pad_to: int
    routed: RoutedShape | None


def build_batches(
    plan: Plan,
    samples: Sequence[Sample],
    *,
    indices: Sequence[SampleIndex] | None = None,
    state: bytes = b"",
    recorded: bool = False,
    pad_to: int = 1,
    eos_ids: frozenset[int] = frozenset(),
    token_limits: Mapping[int, int] | None = None,
    routed: RoutedShape | None = None,
) -> tuple[StepBatch, ...]:
    """Return the batch of every data-parallel rank for a plan and its samples (in the order of ``plan.seqs``).

    ``indices``: of these samples, where they are known. ``pad_to``: every row's length becomes a multiple of it
    (sequence and context parallelism divide rows into equal parts). ``eos_ids``: tokens that end a response, for
    ``unended_N``; empty = not known. ``token_limits``: maximum number of sampled tokens of an episode, by task; other
    tasks have ``max_new_tokens``. ``routed``: sizes of the model's routing, if the experts in the samples are replayed.
    """
    if indices is None:
        indices = [index_of(int(seq), sample, routed=routed) for seq, sample in zip(plan.seqs, samples, strict=True)]
    columns = columns_of(
        plan, indices, state=state, recorded=recorded, eos_ids=eos_ids, token_limits=token_limits, routed=routed
    )
    shares = shares_of(plan, indices, pad_to=pad_to, routed=routed)
    aligned: dict[int, MicroBatch] = {}
    for share in shares:
        for place in share.places:
            if place.first_sequence not in aligned:
                aligned |= align(share, place, samples[place.number])
    return tuple(
        replace(columns, dp_rank=rank, micro_batches=pack_share(share, aligned)) for rank, share in enumerate(shares)
    )


def columns_of(
    plan: Plan,
    indices: Sequence[SampleIndex],
    *,
    state: bytes = b"",
    recorded: bool = False,
    eos_ids: frozenset[int] = frozenset(),
    token_limits: Mapping[int, int] | None = None,
    routed: RoutedShape | None = None,
) -> StepBatch:
    """Return the batch of a step without rows, as it is for every rank; the arguments as for ``build_batches``."""
    _check_samples(plan, indices)
    rows = _rows(plan, indices, eos_ids)
    rows |= _trained(plan, indices)
    part_names, rows["parts_NK"] = _parts(indices)
    limits = token_limits or {}
    num_sequences = sum(len(sample.sizes) for sample in indices)
    targets = sum(sample.num_tokens for sample in indices) - num_sequences
    known = sum(sample.known_experts for sample in indices)
    return StepBatch(
        step=plan.step,
        dp_rank=0,
        recorded=recorded,
        micro_batches=(),
        num_tokens=int(rows["trainable_N"].sum()),
        num_minibatches=plan.num_minibatches,
        max_new_tokens=max(limits.get(sample.task, sample.sampling.max_new_tokens) for sample in indices),
        num_sequences=num_sequences,
        teacher_top_k=max(_teacher_top_k(indices), 0),
        part_names=part_names,
        routing=(0, 0) if routed is None else (len(routed.layers), routed.top_k),
        routing_known=0.0 if routed is None else known / max(1, targets),
        metadata=(),  # of another frame (``feed_messages.py``)
        state=state,
        **rows,
    )


def shares_of(
    plan: Plan, indices: Sequence[SampleIndex], *, pad_to: int = 1, routed: RoutedShape | None = None
) -> list[Share]:
    """Return what each data-parallel rank packs."""
    sizes = [len(sample.sizes) for sample in indices]
    sample_M = np.repeat(np.arange(len(indices)), sizes)
    first_sequences = (np.cumsum(sizes) - sizes).tolist()
    turns = [1 if sample.episode is None else sample.episode.num_turns for sample in indices]
    first_turns = (np.cumsum(turns) - turns).tolist()
    masked = frozenset[int]() if plan.masked is None else frozenset(plan.masked.tolist())
    shares = []
    for rank in range(plan.data_parallel):
        micro_batches: list[list[int]] = [[] for _ in range(plan.num_micro_batches)]
        sequences = np.flatnonzero(plan.ranks == rank)
        for sequence, number in zip(sequences.tolist(), plan.micro_batches[sequences].tolist(), strict=True):
            micro_batches[number].append(sequence)
        places = [
            SamplePlace(
                seq=indices[number].seq,
                number=number,
                first_sequence=first_sequences[number],
                first_turn=first_turns[number],
                masked=indices[number].seq in masked,
            )
            for number in np.unique(sample_M[sequences]).tolist()
        ]
        shares.append(
            Share(
                step=plan.step,
                version_steps=dict(plan.version_steps),
                oldest_step=plan.oldest_step,
                places=places,
                micro_batches=micro_batches,
                teacher_top_k=_teacher_top_k(indices),
                pad_to=pad_to,
                routed=routed,
            )
        )
    return shares


def kept_spans(plan: Plan, indices: Sequence[SampleIndex]) -> NDArray[np.int64]:
    """Return (sample, lag, tokens) of every span with trainable tokens that no filter and no gate masks, [S x 3]."""
    masked = frozenset[int]() if plan.masked is None else frozenset(plan.masked.tolist())
    oldest, newest = plan.oldest_step, plan.step - 1
    lags = {version: newest - step for version, step in plan.version_steps.items() if oldest is None or step >= oldest}
    spans = [
        (number, lags[version], count)
        for number, sample in enumerate(indices)
        if sample.seq not in masked
        for version, count in sample.by_version
        if count and version in lags
    ]
    return np.array(spans, np.int64).reshape(-1, 3)


def _rows(plan: Plan, samples: Sequence[SampleIndex], eos_ids: frozenset[int]) -> dict[str, Array]:
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
        "sampled_N": np.array([sum([count for _, count in sample.by_version]) for sample in samples], np.int32),
    }


def _parts(samples: Sequence[SampleIndex]) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Return the names of all parts of the rewards, in order, and their values, [N x K]; ``score`` is none of them."""
    names = tuple(sorted({name for sample in samples for name in sample.parts} - {"score"}))
    with np.errstate(over="ignore"):  # as for the rewards
        return names, np.array([sample.parts.get(name, np.nan) for sample in samples for name in names], np.float32)


def _unended(sample: SampleIndex, eos_ids: frozenset[int]) -> bool:
    if not eos_ids or sample.sampling.stop or sample.status is not Status.COMPLETED:
        return False
    return sample.last_token not in eos_ids and sample.last_token not in sample.sampling.stop_token_ids


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


def _check_samples(plan: Plan, samples: Sequence[SampleIndex]) -> None:
    """Assert that these are the samples of the plan."""
    assert len(samples) == len(plan.seqs), f"plan {plan.step}: {len(plan.seqs)} sequences, {len(samples)} samples"
    rows = np.ones(len(samples), np.int32) if plan.rows is None else plan.rows
    sizes = [len(sample.sizes) for sample in samples]
    assert rows.tolist() == sizes, f"plan {plan.step}: rows {rows.tolist()}, sequences of its samples {sizes}"


def _turn_of(sample: Sample) -> NDArray[np.int32]:
    """Return the turn of each response token, [R]; -1 for a token that no turn has sampled."""
    if sample.turns is None:
        return np.zeros(sample.response_length, np.int32)
    of_R = np.full(sample.response_length, -1, np.int32)
    for number, (at, tokens) in enumerate(zip(sample.turns.at.tolist(), sample.turns.tokens.tolist(), strict=True)):
        of_R[at : at + tokens] = number
    return of_R


def align(share: Share, place: SamplePlace, sample: Sample) -> dict[int, MicroBatch]:
    """Return every sequence of a sample as a row of its own, by its number in the step."""
    rows: list[MicroBatch] = []
    lags_R = trainable_lags(sample, share.version_steps, share.step, share.oldest_step)
    if place.masked:
        lags_R = np.full_like(lags_R, -1)
    of_R = _turn_of(sample)
    turn_R = np.where((lags_R >= 0) & (of_R >= 0), of_R + place.first_turn, -1)
    start = response_start = 0
    for size in sample.sizes:
        region = slice(response_start, response_start + size.response_length)
        tokens = sample.tokens[start : start + size.num_tokens]
        log_probs = sample.rollout_log_probs[region]
        numbers = (place.number, place.first_sequence + len(rows))
        row = _align(tokens, lags_R[region], turn_R[region], log_probs, place=numbers)
        if share.teacher_top_k >= 0:
            row = replace(row, **_taught(sample, region, row.loss_mask_T, share.teacher_top_k))
        rows.append(row)
        start, response_start = start + size.num_tokens, region.stop
    if share.routed is not None:
        rows = _with_experts(rows, sample, share.routed)
    return dict(enumerate(rows, place.first_sequence))


def pack_share(share: Share, aligned: Mapping[int, MicroBatch]) -> tuple[MicroBatch, ...]:
    """Return the rows of a rank. ``aligned``: all of its sequences, by their number in the step."""
    experts = 0 if share.routed is None else len(share.routed.layers) * share.routed.top_k
    return tuple(
        concatenate([aligned[number] for number in numbers], share.pad_to, share.teacher_top_k, experts)
        for numbers in share.micro_batches
    )


def _teacher_top_k(samples: Sequence[SampleIndex]) -> int:
    """Return K if a teacher has listed K tokens at each position of every sample of a policy; -1 = not everywhere."""
    scored = [sample for sample in samples if not sample.demonstration]
    if not scored or any(sample.teacher_top_k == NO_TEACHER for sample in scored):
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


def _with_experts(rows: Sequence[MicroBatch], sample: Sample, routed: RoutedShape) -> list[MicroBatch]:
    """Return the sequences of a sample with the experts of their tokens; -1 where the sample does not have them."""
    indices = np.full((len(sample.tokens), len(routed.layers), routed.top_k), -1, np.int16)
    experts = sample.routed_experts
    # Samples of recorded plans are not checked again: with other sizes they were recorded for another setting.
    if experts is not None and experts.shape == indices.shape:
        known_L = ~unknown_rows(experts)
        indices[known_L] = experts[known_L]
    parts = np.split(indices, np.cumsum([size.num_tokens for size in sample.sizes])[:-1])
    return [replace(row, experts=part.reshape(-1)) for row, part in zip(rows, parts, strict=True)]


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


def _trained(plan: Plan, samples: Sequence[SampleIndex]) -> dict[str, Array]:
    """Return the columns of the trainable tokens, of the minibatches and of the turns."""
    counts = np.array([len(sample.sizes) for sample in samples])
    first_M = np.cumsum(counts) - counts  # a sample's sequences are in one minibatch, because whole groups are
    spans = kept_spans(plan, samples)
    trainable_N = np.bincount(spans[:, 0], spans[:, 2], len(samples)).astype(np.int32)
    turns_N = [1 if sample.episode is None else sample.episode.num_turns for sample in samples]
    rewards_C, tokens_C = np.zeros(sum(turns_N), np.float32), np.zeros(sum(turns_N), np.int32)
    for first, sample, trainable in zip(np.cumsum(turns_N) - turns_N, samples, trainable_N, strict=True):
        if (episode := sample.episode) is None:
            tokens_C[first] = trainable
            continue
        for turn, reward in episode.rewards:
            rewards_C[first + turn] = reward
        for turn, version, count in episode.by_turn if trainable else ():
            if plan.oldest_step is None or plan.version_steps[version] >= plan.oldest_step:
                tokens_C[first + turn] += count
    return {
        "trainable_N": trainable_N,
        "minibatches_N": plan.micro_batches[first_M] // (plan.num_micro_batches // plan.num_minibatches),
        "turn_samples_C": np.repeat(np.arange(len(samples), dtype=np.int32), turns_N),
        "turn_rewards_C": rewards_C,
        "turn_tokens_C": tokens_C,
    }


def _padding(length: int, top_k: int, experts: int) -> MicroBatch:
    lengths = dict.fromkeys(TOKEN_DTYPES, length) | dict.fromkeys(TEACHER_ARRAYS, length * max(top_k, 0))
    lengths |= {"teacher_log_probs_T": length * (top_k >= 0), "experts": length * experts}
    arrays = {name: np.zeros(lengths[name], dtype) for name, dtype in TOKEN_DTYPES.items()}
    for name in ("sample_T", "sequence_T", "turn_T", "lag_T", "experts"):
        arrays[name].fill(-1)
    arrays["position_ids_T"], arrays["cu_seqlens"] = np.arange(length), np.array([0, length], np.int32)
    return MicroBatch(**arrays)


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
