"""One step from tokens to rows to micro-batches to ranks, by its recorded plan and the samples that it names.

A micro-batch is one row: its sequences one after the other, padded to a multiple. Ranks may leave out samples without
effect and pack the others again, which no record has: the page shows the rows of the plan.
"""

import asyncio
from collections import Counter

import numpy as np

from tidemill.bus.errors import BusError, WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Plan, Sample
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.samples import SampleAnswers
from tidemill.launch.page.texts import fact
from tidemill.launch.samples.search import opened

MAX_SAMPLES = 1024  # Samples of a step whose payloads are read; of more, the lengths of responses in headers count
_AT_ONCE = 8
SLOW = 1.15  # Part of the median time of a step from which on a step counts as slow
WAITING = "waiting for samples"
_TIMES = {
    WAITING: "train/wait_seconds",
    "training": "train/step_seconds",
    "waiting for a push": "push/wait_seconds",
}
_PUSH = {"push before it, beside training": "push/seconds"}
_SIZES = {
    "engines of that push": "push/engines",
    "tokens of the rows": "data/packed_tokens",
    "trainable tokens": "train/tokens",
}
WORDS = "rows of the plan; ranks may leave out samples without effect and pack the others again"


async def batch_of(reader: RunReader, samples: SampleAnswers, step: int) -> JsonObject:
    """Return the batch of a step. Raises ValueError for a step without a plan in the stream."""
    plan = await _plan(reader, step)
    pieces = await _pieces(reader, samples, plan)
    ranks = [_rank(plan, pieces, rank, _multiple(reader)) for rank in range(plan.data_parallel)]
    tokens, padding = (sum(rank[name] for rank in ranks) for name in ("tokens", "padding"))
    longest = max((rank["tokens"] + rank["padding"] for rank in ranks), default=0)
    metrics = reader.metrics.at(step)
    fill = tokens / (longest * len(ranks)) if longest else None
    padding_share = padding / (tokens + padding) if tokens else None
    slowest = max(ranks, key=lambda rank: int(rank["tokens"]))["rank"] if len(ranks) > 1 else None
    pace, groups = pace_of(reader, step), _groups(plan, pieces)
    shared = metrics.get("train/shared_tokens")
    waits = "waits included" if slowest is None else f"slowest: rank {slowest}"
    facts = [
        fact("filled", fill, "share", "of the rows' tokens"),
        fact("padding", padding_share, "share"),
        fact("samples", len(plan.seqs), "count", f"{len(groups):,} groups"),
        fact("shared prompts", shared, "count", "tokens computed once"),
        fact("time", pace["seconds"], "s", waits, status="warn" if pace["slow"] else "none"),
    ]
    return {
        "step": step,
        "facts": facts,
        "steps": [min(reader.plan_seqs), max(reader.plan_seqs)],
        "ranks": ranks,
        "samples": len(plan.seqs),
        "tokens": tokens,
        "fill": fill,
        "padding": padding_share,
        "shared_tokens": shared,
        **pace,
        "slowest_rank": slowest,
        "oldest_step": plan.oldest_step,
        "version_steps": {str(version): of for version, of in sorted(plan.version_steps.items())},
        "groups": groups,
        "exact": False,
        "words": WORDS,
    }


def pace_of(reader: RunReader, step: int) -> JsonObject:
    """Return times and sizes of a step beside the median step, and what made it slow, in words."""
    metrics = reader.metrics.at(step)

    def rows(names: dict[str, str], unit: str) -> list[JsonObject]:
        known = {words: name for words, name in names.items() if name in metrics}
        usual = {words: float(np.nanmedian(reader.metrics.values(name))) for words, name in known.items()}
        return [
            {"name": words, "unit": unit, "value": metrics[name], "usual": usual[words]}
            for words, name in known.items()
        ]

    times, push = rows(_TIMES, "s"), rows(_PUSH, "s")
    total, usual = (sum(row[name] for row in times) for name in ("value", "usual"))
    words = "about as long as the median step"
    slow = total > SLOW * usual
    if slow:
        slowest = max(times, key=lambda row: row["value"] - row["usual"])
        words = f"slow: {slowest['name']} took {slowest['value']:.3g} s, in the median step {slowest['usual']:.3g} s"
        words += _push_words(metrics, push) if slowest["name"] == WAITING else ""
    pace = [*times, *push, *rows(_SIZES, "")]
    return {"seconds": total if times else None, "pace": pace, "pace_words": words if times else "", "slow": slow}


def _push_words(metrics: dict[str, float | None], push: list[JsonObject]) -> str:
    """Return what a slow push before the step has to do with its wait for samples; empty for a push like others."""
    if not push or push[0]["value"] <= SLOW * push[0]["usual"]:
        return ""
    version, engines = (metrics.get(f"push/{name}") or 0 for name in ("version", "engines"))
    return f"; the push of version {version:.0f} took {push[0]['value']:.3g} s, engines with it: {engines:.0f}"


async def _plan(reader: RunReader, step: int) -> Plan:
    if (plan := await reader.plan(step)) is not None:
        return plan
    known = reader.plan_seqs
    steps = f"{min(known)} to {max(known)}" if known else "none yet"
    raise ValueError(f"step: want one whose plan is kept ({steps}), got {step}")


async def _pieces(reader: RunReader, samples: SampleAnswers, plan: Plan) -> list[list[JsonObject]]:
    """Return the sequences of each sample of the plan, in its order."""
    limit = asyncio.Semaphore(_AT_ONCE)
    places = [(task, index) for task, size in zip(plan.tasks, plan.group_sizes, strict=True) for index in range(size)]
    masked = set() if plan.masked is None else set(plan.masked.tolist())
    counts = np.ones(len(plan.seqs), np.int32) if plan.rows is None else plan.rows
    reads = len(plan.seqs) <= MAX_SAMPLES

    async def of(seq: int, place: tuple[int, int], count: int) -> list[JsonObject]:
        base = {"seq": seq, "task": int(place[0]), "index": int(place[1]), "masked": seq in masked}
        unknown: JsonObject = {"prompt_tokens": None, "response_tokens": None, "versions": [], "reward": None}
        try:
            async with limit:
                sample = opened(await samples.read(seq)) if reads else None
        except (BusError, ValueError):
            sample = None
        if sample is None or isinstance(sample, WireError):
            return [base | unknown] * count
        return [base | sequence for sequence in _sequences(sample)][:count] or [base | unknown] * count

    columns = zip(plan.seqs.tolist(), places, counts.tolist(), strict=True)
    return list(await asyncio.gather(*[of(*column) for column in columns]))


def _sequences(sample: Sample) -> list[JsonObject]:
    versions: Counter[int] = Counter()
    for span in sample.spans:
        versions[span.version] += span.num_tokens
    return [
        {
            "prompt_tokens": size.num_tokens - size.response_length,
            "response_tokens": size.response_length,
            "versions": sorted(map(list, versions.items())),
            "reward": sample.score,
        }
        for size in sample.sizes
    ]


def _rank(plan: Plan, pieces: list[list[JsonObject]], rank: int, multiple: int) -> JsonObject:
    sequences = [piece for of_sample in pieces for piece in of_sample]
    rows: list[list[JsonObject]] = [[] for _ in range(plan.num_micro_batches)]
    for place in np.flatnonzero(plan.ranks == rank):
        if place < len(sequences):
            rows[int(plan.micro_batches[place])].append(sequences[int(place)])
    micro_batches = [_row(number, row, multiple) for number, row in enumerate(rows)]
    total = {name: sum(row[name] for row in micro_batches) for name in ("tokens", "padding")}
    return {"rank": rank, **total, "micro_batches": micro_batches}


def _row(number: int, row: list[JsonObject], multiple: int) -> JsonObject:
    tokens = sum((piece["prompt_tokens"] or 0) + (piece["response_tokens"] or 0) for piece in row)
    seen: set[int] = set()
    pieces = []
    for piece in row:
        pieces.append({**piece, "shared": piece["task"] in seen})  # its prompt stands in this row already
        seen.add(piece["task"])
    padding = -tokens % multiple if row else multiple
    line = {"tokens": tokens, "padding": padding, "pieces": pieces}
    return {"number": number, "tokens": tokens, "padding": padding, "rows": [line]}


def _groups(plan: Plan, pieces: list[list[JsonObject]]) -> list[JsonObject]:
    groups, start = [], 0
    for task, size in zip(plan.tasks.tolist(), plan.group_sizes.tolist(), strict=True):
        rewards = [of_sample[0]["reward"] for of_sample in pieces[start : start + size] if of_sample]
        known = [reward for reward in rewards if reward is not None]
        mean = sum(known) / len(known) if known else None
        groups.append({"task": task, "samples": size, "reward_mean": mean, "zero": len(set(known)) == 1})
        start += size
    return groups


def _multiple(reader: RunReader) -> int:
    """Return the number that divides the tokens of every row (``learner.row_multiple``)."""
    names = ("learner.tensor_parallel", "learner.context_parallel")
    tensor, context = (reader.settings.get(name, int, 1) for name in names)
    return max(1, int(tensor * context))
