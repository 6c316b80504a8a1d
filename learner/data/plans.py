"""Plans as a whole: their hash chain, a digest of everything trained so far by which two histories can be compared, and their size."""

import hashlib

import msgpack
import numpy as np

from tidemill.bus.wire.messages import Plan

GENESIS = "0" * 64
"""Value of the chain before the first plan."""
_RECORD_BYTES = 1024
"""Scalars, digests, field names and headers of arrays; a plan has less than 600 bytes of them."""
_VERSION_BYTES = 18
"""One entry of ``version_steps``, two integers of msgpack at their longest."""


def plan_bytes(*, groups: int, samples: int, sequences: int, versions: int = 1, masked: int = 0) -> int:
    """Return an upper bound of the bytes of a plan as it is stored, which exceeds them by less than 1 kB and 17 bytes a version."""
    rows = 4 * samples if sequences > samples else 0
    return _RECORD_BYTES + 12 * groups + 8 * samples + rows + 8 * sequences + _VERSION_BYTES * versions + 8 * masked


def settle_bytes(*, groups: int, samples: int) -> int:
    """Return an upper bound of the bytes of a Settle as it is stored."""
    return _RECORD_BYTES + 8 * groups + 8 * samples


def chain_of(previous: str, plan: Plan) -> str:
    """Return the SHA-256 (hex) of the previous chain and the plan's content, without its epoch and its own ``chain``.

    Each column is little-endian and length-prefixed, so no two different plans have the same bytes.
    """
    digest = hashlib.sha256(bytes.fromhex(previous))
    for part in _columns(plan):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _columns(plan: Plan) -> list[bytes]:
    scalars = (
        plan.step,
        sorted((int(version), int(step)) for version, step in plan.version_steps.items()),
        plan.oldest_step,
        plan.data_parallel,
        plan.num_micro_batches,
        plan.num_minibatches,
        plan.config_digest,
    )
    columns = [(plan.tasks, "<i8"), (plan.seqs, "<i8"), (plan.group_sizes, "<i4"), (plan.ranks, "<i4"), (plan.micro_batches, "<i4")]
    # Only where a sample has several sequences, so that chains of runs without such samples are those of earlier releases.
    if plan.rows is not None and (plan.rows != 1).any():
        columns.append((plan.rows, "<i4"))
    if plan.masked is not None:
        # Its number of columns alone would not tell it from ``rows``.
        columns += [(np.zeros(0), "<i4"), (plan.masked, "<i8")]
    return [msgpack.packb(scalars), *(np.ascontiguousarray(column, dtype).tobytes() for column, dtype in columns)]
