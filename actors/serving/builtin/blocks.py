"""Blocks of keys and values: their number, the sequences that use them, and the blocks that a new prompt begins with.
Knows no tensor.

    untouched -> used (a sequence refers to it) -> idle (found again by its tokens) -> used | evicted, oldest first
                                                -> free (no other sequence may use its contents)

A full block is found by the digest of all tokens up to its end, as in vLLM's automatic prefix caching, and only until
the next weights: keys and values belong to the weights that computed them.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.shape import ModelShape

BLOCK = 16
"""Tokens of a block."""
MEMORY_SHARE = 4
"""The blocks have at most one part in so many of the memory, unless ``engine.kv_tokens`` is set."""
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Memory limit of a container; ``max`` = none."""


def host_memory() -> int:
    """Return the bytes of this machine's memory, or of the container's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(GROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def blocks_of(num_tokens: int) -> int:
    """Return the number of blocks of so many tokens."""
    return -(-num_tokens // BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Bytes of what is kept of rows, and the length that the model allows them."""

    token_bytes: int
    """Keys and values of a token in all layers."""
    state_bytes: int = 0
    """States of a row in all layers that have some, whatever its length."""
    max_positions: int

    @classmethod
    def of(cls, shape: ModelShape, item_bytes: int) -> "RowSizes":
        """Return the sizes of a model of the decoder."""
        token_items = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        return cls(token_bytes=token_items * item_bytes, max_positions=shape.max_positions)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.token_bytes * BLOCK

    def states_bytes(self, max_running: int) -> int:
        """Return the bytes of the states of all rows: there are two copies while rows join or leave."""
        return 2 * max_running * self.state_bytes


def budget(sizes: RowSizes, *, max_running: int, max_context: int, kv_tokens: int, memory_bytes: int) -> int:
    """Return the number of blocks of an engine: of ``kv_tokens``; 0 = of the longest context of each row, in at most a
    quarter of ``memory_bytes`` (0 = not known), less the states of the rows. Raises UnsupportedModel for more states
    than that.
    """
    share = memory_bytes // MEMORY_SHARE
    if memory_bytes and sizes.state_bytes and sizes.states_bytes(max_running) >= share:
        most = (share - 1) // (2 * sizes.state_bytes)
        reason = f"want <= {most}: each row has {sizes.state_bytes:,} bytes of states, twice, in {share:,} bytes"
        raise UnsupportedModel("engine.max_running", f"{reason}; got {max_running}")
    if kv_tokens:
        return max(1, kv_tokens // BLOCK)
    every = max_running * blocks_of(max_context or sizes.max_positions)
    if not memory_bytes or not sizes.token_bytes:
        return every
    return max(1, min(every, (share - sizes.states_bytes(max_running)) // sizes.block_bytes))


@dataclass(slots=True, eq=False, weakref_slot=True)
class BlockTable:
    """The blocks of a running sequence, in the order of its tokens."""

    blocks: list[int]
    generation: int
    """Weights that compute its keys and values: the pool's generation when the sequence was admitted."""
    registered: int
    """First blocks that are in the index of the pool, or whose tokens were there already."""


class BlockPool:
    """References to blocks, and the index of full blocks by digest. Used by the decoding thread."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.generation = 0
        """Number of changes of the weights."""
        self.evicted = 0
        """Blocks of known tokens that were taken for others."""
        self.clear()

    def clear(self) -> None:
        """Forget all blocks, those in use as well."""
        self.touched = 0
        """Number of blocks that were ever in use; memory from there on has not been written."""
        self._free: list[int] = []
        self._references: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._experts: dict[int, bytes] = {}
        """Experts of a registered block's tokens, where a sequence has captured them."""

    @property
    def available(self) -> int:
        """Number of blocks that no sequence refers to."""
        return self.num_blocks - len(self._references)

    @property
    def num_idle(self) -> int:
        """Number of blocks that no sequence refers to, and that can be found by their tokens."""
        return len(self._idle)

    def admit(self, digests: Sequence[bytes], num_tokens: int, *, spare: int, experts: bool) -> BlockTable | None:
        """Return a table for so many tokens, which begins with the known blocks of these digests; None unless ``spare``
        more blocks are available. ``experts``: take only blocks whose experts are known.
        """
        known: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None or (experts and block not in self._experts):
                break
            known.append(block)
        self._refer(known)
        missing = blocks_of(num_tokens) - len(known)
        if missing + spare > self.available:
            self.release(known)
            return None
        return BlockTable(known + [self._take() for _ in range(missing)], self.generation, len(known))

    def fork(self, table: BlockTable, num_tokens: int, *, spare: int) -> BlockTable | None:
        """Return a table that shares the full blocks of so many first tokens, with a block of its own behind them; None
        unless ``spare`` more blocks are available.
        """
        shared, missing = table.blocks[: num_tokens // BLOCK], int(num_tokens % BLOCK > 0)
        if missing + spare > self.available:
            return None
        self._refer(shared)
        return BlockTable(shared + [self._take() for _ in range(missing)], table.generation, len(shared))

    def extend(self, table: BlockTable) -> bool:
        """Append a block. Returns False when there is none."""
        if self.available:
            table.blocks.append(self._take())
            return True
        return False

    def register(self, table: BlockTable, digests: Sequence[bytes], experts: bytes | None = None) -> None:
        """Make the full blocks of a table known by ``digests``, with the experts of all of their tokens."""
        if table.generation != self.generation:
            return
        for place in range(table.registered, len(digests)):
            block, digest = table.blocks[place], digests[place]
            if self._by_digest.setdefault(digest, block) == block:
                self._digests[block] = digest
            if experts is not None:
                size = len(experts) // len(digests)
                self._experts[self._by_digest[digest]] = experts[place * size : (place + 1) * size]
        table.registered = max(table.registered, len(digests))

    def experts_of(self, table: BlockTable, num_blocks: int) -> bytes:
        """Return the experts of the tokens of the first blocks, which were admitted with ``experts``."""
        return b"".join(self._experts[block] for block in table.blocks[:num_blocks])

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a reference to each block. Blocks that can be found are kept, the last ones are evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block in self._digests:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def discard(self, table: BlockTable) -> list[int]:
        """Forget the tokens of a table whose keys and values are wrong. Returns the blocks that no other one has."""
        for block in table.blocks:
            self._forget(block)
        table.generation = -1
        return [block for block in table.blocks if self._references[block] == 1]

    def forget(self) -> None:
        """Forget the tokens of all blocks, as there are other weights. Sequences keep their blocks."""
        self.generation += 1
        self._free += self._idle
        self._idle.clear()
        self._by_digest.clear()
        self._digests.clear()
        self._experts.clear()

    def _refer(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        elif self.touched < self.num_blocks:
            block, self.touched = self.touched, self.touched + 1
        else:
            block, _ = self._idle.popitem(last=False)
            self.evicted += 1
            self._forget(block)
        self._references[block] += 1
        return block

    def _forget(self, block: int) -> None:
        if (digest := self._digests.pop(block, None)) is not None:
            del self._by_digest[digest]
        self._experts.pop(block, None)
