"""Rows of a pass over several sources: how many of each, and which. Pure functions of sizes, weights, seed and pass."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of one source among the rows of all sources, and their number in a pass."""

    first: int
    size: int
    weight: float
    name: str

    @property
    def whole(self) -> int:
        """Copies of every row in a pass."""
        return int(self.weight)

    @property
    def extra(self) -> int:
        """Rows that a pass has once more, in turn; < size."""
        return min(round((self.weight - self.whole) * self.size), self.size - 1)

    @property
    def in_pass(self) -> int:
        """Rows of this source in a pass."""
        return self.whole * self.size + self.extra

    @property
    def passes(self) -> int:
        """Passes after which every row has been in one, wherever they begin."""
        return 1 if self.whole else -(-self.size // self.extra) * 2


def order_of(shares: Sequence[Share], *, shuffle: bool, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the row numbers of one pass: sorted by the raw output of Philox with key (seed, epoch), which is stable.

    One source of weight 1 has the order of the releases that had one file only.
    """
    rows = np.concatenate([part for share in shares for part in _parts(share, shuffle=shuffle, seed=seed, epoch=epoch)])
    return rows[_sorted(len(rows), seed, epoch)] if shuffle else rows


def _parts(share: Share, *, shuffle: bool, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    rows = np.arange(share.first, share.first + share.size, dtype=np.int64)
    parts = [rows] * share.whole
    # The extra rows go round and round through the source: pass e has its places e * extra to (e + 1) * extra - 1.
    done, end = epoch * share.extra, (epoch + 1) * share.extra
    while done < end:
        cycle, begin = divmod(done, share.size)
        stop = min(share.size, begin + end - done)
        ordered = rows[_sorted(share.size, _seed_of(share.name, seed), cycle)] if shuffle else rows
        parts.append(ordered[begin:stop])
        done += stop - begin
    return parts


def _sorted(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    key = np.array([seed & (2**64 - 1), epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}.{name}".encode()).digest()[:8], "little")
