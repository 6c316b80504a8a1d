"""Keys, values and states of a model of the library transformers, for rows that join and leave at any token. Knows no
sequence and no weights.

Attention layers keep a token's keys and values (and the keys of an indexer, for sparse attention) in its block, as the
decoder does. A step gathers them for all rows, padded on the left: the masks that the model makes itself (windows,
chunks, sinks) then hold as for a left-padded batch of ``generate``, and no kind of mask is written here. Layers with
states of a fixed size (convolutions, linear attention, state spaces) have them by row.

Windows limit the attention, not the memory: keys and values behind a window are kept.

Shape letters: P = blocks, S = P * BLOCK places of tokens, N = rows, L = positions (padded), K = key/value heads, D =
head size, U = prompts of a prefill, T = tokens per prompt (padded on the right), R = rows of a prefill.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from tidemill.actors.errors import UnsupportedModel
from tidemill.actors.serving.builtin.blocks import BLOCK, BlockTable, RowSizes

PARTS = ("keys", "values", "indexer_keys")
"""Tensors of a layer that have a token axis."""
PROBE_TOKENS = 2
KINDS = {
    DynamicLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    DummyLayer,
}
"""Layers of a cache that can be kept by row."""


def prefill_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache of a model that keeps all keys and values. Raises UnsupportedModel for a kind of layer that
    cannot be kept by row.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_whole(layer) for layer in cache.layers]
    for layer in cache.layers:
        if type(layer) not in KINDS:
            raise UnsupportedModel(
                f"model_type {config.model_type}",
                f"want layers whose cache can be kept by row ({', '.join(sorted(kind.__name__ for kind in KINDS))}), "
                f"got {type(layer).__name__}",
            )
    return cache


def _whole(layer: Any) -> Any:
    """Return a layer that keeps all keys and values in the place of one with a window, which drops them."""
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return layer


def _parts(layer: Any) -> dict[str, Tensor]:
    """Return the tensors of a layer after a prefill that have a token axis, each [U, T, ...]."""
    tensors = {name: tensor for name in PARTS if (tensor := getattr(layer, name, None)) is not None}
    return {name: tensor if name == "indexer_keys" else tensor.transpose(1, 2) for name, tensor in tensors.items()}


def _states(layers: Sequence[Any]) -> Iterator[tuple[dict[int, Tensor | None], int]]:
    """Yield where the states of layers are: a mapping and its key."""
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for states in (layer.conv_states, layer.recurrent_states):
                yield from ((states, number) for number in range(layer.number_of_states))


@torch.inference_mode()
def probe(model: PreTrainedModel) -> DynamicCache:
    """Return the cache of a prefill of two tokens, which has the sizes of everything that is kept. Raises
    UnsupportedModel as ``prefill_cache``, and for a model that does not run so.
    """
    cache = prefill_cache(model.config.get_text_config(decoder=True))
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    try:
        model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise UnsupportedModel(f"model_type {model.config.model_type}", f"a prefill fails: {error!r}") from error
    if not any(kept_bytes(cache)):
        want = "want a model that keeps what it has read in transformers' cache, got one that leaves it empty"
        raise UnsupportedModel(f"model_type {model.config.model_type}", f"{want}; use SGLang, if it has the family")
    return cache


def row_sizes(probed: DynamicCache, max_positions: int) -> RowSizes:
    """Return the sizes of rows of the model that ``probed`` is of."""
    token_bytes, state_bytes = kept_bytes(probed)
    return RowSizes(token_bytes=token_bytes, state_bytes=state_bytes, max_positions=max_positions)


def kept_bytes(probed: DynamicCache) -> tuple[int, int]:
    """Return the bytes that a cache keeps of each token, and the bytes of the states of a row."""
    parts = [part[0, 0] for layer in probed.layers for part in _parts(layer).values()]
    states = [state[0] for states, number in _states(probed.layers) if (state := states[number]) is not None]
    of_token, of_states = (sum(item.numel() * item.element_size() for item in items) for items in (parts, states))
    return of_token, of_states


class Step:
    """Places of the tokens of one decoding step."""

    length: int
    """Positions of the longest row, the new token's included."""
    new_N: Tensor
    """Place of each row's new token."""
    seen_NL: Tensor
    """Places of each row's tokens, padded on the left with its first one."""


class PagedLayer(CacheLayerMixin):
    """Keys and values of a layer's tokens in blocks."""

    is_sliding = False

    def __init__(self, step: Step, parts: dict[str, Tensor]) -> None:
        """``parts``: name of PARTS -> [S, ...]."""
        super().__init__()
        self._step, self.parts = step, parts
        self.is_initialized = True

    def _add(self, name: str, new_N: Tensor) -> Tensor:
        """Store a part of the new tokens. Returns the values of all tokens of the rows, [N, L, ...]."""
        store = self.parts[name]
        store.index_copy_(0, self._step.new_N, new_N)
        seen_NL = self._step.seen_NL
        # By rows: on a CPU six times as fast as an index of two axes.
        return store.index_select(0, seen_NL.flatten()).unflatten(0, seen_NL.shape)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values of one new token per row, [N, K, 1, D]. Returns all keys and values, [N, K, L, D]."""
        keys_NLKD, values_NLKD = self._add("keys", key_states[:, :, 0]), self._add("values", value_states[:, :, 0])
        return keys_NLKD.transpose(1, 2), values_NLKD.transpose(1, 2)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take the indexer's keys of one new token per row, [N, 1, D]. Returns the keys of all tokens, [N, L, D]."""
        return self._add("indexer_keys", indexer_key_states[:, 0])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is there before the first token."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions, and the first one."""
        return self._step.length, 0

    def get_seq_length(self) -> int:
        """Return the number of positions before the new token."""
        return self._step.length - 1

    def get_max_length(self) -> int:
        """Return -1: the number of blocks limits the length."""
        return -1


class PagedStateLayer(LinearAttentionLayer, PagedLayer):
    """A layer with states by row, and with keys and values in blocks."""

    def __init__(self, step: Step, parts: dict[str, Tensor], number_of_states: int) -> None:
        PagedLayer.__init__(self, step, parts)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class RowCache(Cache):
    """Blocks of tokens and states of rows, as transformers' cache of one decoding step."""

    def __init__(self, probed: DynamicCache, *, num_blocks: int) -> None:
        """``probed``: cache of a prefill of two tokens, which has the sizes of everything that is kept."""
        self.num_blocks = num_blocks
        self.step = Step()
        self._probed = probed
        self._tables: list[BlockTable] = []
        self._states: WeakKeyDictionary[BlockTable, list[Tensor]] = WeakKeyDictionary()
        """States of a row that is not decoded yet, or that leaves the batch."""
        super().__init__(layers=[])
        self.reset_memory()

    # -- memory

    @property
    def has_states(self) -> bool:
        """True if some layers have states by row, which no padding may reach."""
        return any(states[number] is not None for states, number in _states(self._probed.layers))

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        stores = [store for layer in self.layers if isinstance(layer, PagedLayer) for store in layer.parts.values()]
        return sum(store.untyped_storage().nbytes() for store in stores)

    def reset_memory(self) -> None:
        """Forget everything. On the CPU a block that was never used takes no memory."""
        self.free_memory()
        self.layers = [self._empty(layer) for layer in self._probed.layers]

    def free_memory(self) -> None:
        """Free all memory; ``reset_memory`` comes before the next use."""
        self.layers, self._tables = [], []
        self._states.clear()

    def _empty(self, probed: Any) -> Any:
        parts = {
            name: part.new_empty((self.num_blocks * BLOCK, *part.shape[2:])) for name, part in _parts(probed).items()
        }
        if isinstance(probed, LinearAttentionCacheLayerMixin):
            number = probed.number_of_states
            return PagedStateLayer(self.step, parts, number) if parts else LinearAttentionLayer(number)
        return PagedLayer(self.step, parts) if parts else DummyLayer()

    def touch(self, num_blocks: int) -> None:
        """Do nothing: only places that were written are gathered."""

    def wipe(self, blocks: Sequence[int]) -> None:
        """Do nothing, as ``touch``."""

    # -- rows

    def load(self, cache: DynamicCache, num_tokens: int, tables: Sequence[BlockTable]) -> None:
        """Fill an empty cache of a prefill with the first tokens of its prompts, which are in their blocks."""
        if not num_tokens:
            return
        places_U = torch.from_numpy(_places(tables)[:, :num_tokens].copy()).to(self._device)
        for layer, target in zip(self.layers, cache.layers, strict=True):
            parts = {
                name: store.index_select(0, places_U.flatten()).unflatten(0, places_U.shape)
                for name, store in (layer.parts if isinstance(layer, PagedLayer) else {}).items()
            }
            if "keys" in parts:
                target.update(parts["keys"].transpose(1, 2), parts["values"].transpose(1, 2))
            if "indexer_keys" in parts:
                target.update_indexer(parts["indexer_keys"])

    def store(
        self,
        filled: DynamicCache,
        lengths_U: Sequence[int],
        tables: Sequence[BlockTable],
        prompt_of_R: Sequence[int],
        *,
        num_cached: int,
    ) -> None:
        """Keep the tokens of a prefill in the blocks of its rows, but for the first ``num_cached``, which are there.
        Rows of a prompt share its full blocks: the first one fills them.
        """
        longest, first_rows = max(lengths_U), [prompt_of_R.index(prompt) for prompt in range(len(lengths_U))]
        sources, places = [], []
        for row, (table, prompt) in enumerate(zip(tables, prompt_of_R, strict=True)):
            length = lengths_U[prompt]
            tokens = np.arange(num_cached if row == first_rows[prompt] else length - length % BLOCK, length)
            sources.append(prompt * longest + tokens)
            places.append(_places([table])[0, tokens])
        device = self._device
        sources_S, places_S = (torch.from_numpy(np.concatenate(numbers)).to(device) for numbers in (sources, places))
        for layer, source in zip(self.layers, filled.layers, strict=True):
            for name, part_UT in _parts(source).items():
                layer.parts[name].index_copy_(0, places_S, part_UT.flatten(0, 1)[sources_S])
        states = [states[number] for states, number in _states(filled.layers)]
        for table, prompt in zip(tables, prompt_of_R, strict=True):
            self._states[table] = [state[prompt] for state in states if state is not None]

    def set_rows(self, tables: Sequence[BlockTable]) -> None:
        """Set the rows of the next steps, whose tokens are stored."""
        if list(tables) != self._tables:
            self._exchange_states(tables)
        self._tables = list(tables)
        self._places_NL = torch.from_numpy(_places(tables)).to(self._device)

    def _exchange_states(self, tables: Sequence[BlockTable]) -> None:
        """Put the states of the rows into the layers. The states of earlier rows are kept with their tables."""
        slots = [(states, number) for states, number in _states(self.layers)]
        batched = [states[number] for states, number in slots]
        for row, table in enumerate(self._tables):
            self._states[table] = [state[row] for state in batched if state is not None]
        if not tables or not self.has_states:
            return
        kept = iter(zip(*(self._states.pop(table) for table in tables), strict=True))
        present = [states[number] is not None for states, number in _states(self._probed.layers)]
        for (states, number), is_present in zip(slots, present, strict=True):
            states[number] = torch.stack(next(kept)) if is_present else None
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                _begin(layer)

    def begin_step(self, positions_N: NDArray[np.int64]) -> Tensor | None:
        """Set the places of the new tokens. Returns the mask of padding, [N, L] bool; None without any."""
        step, device = self.step, self._device
        at_N1 = torch.from_numpy(positions_N).to(device)[:, None]
        step.length = int(positions_N.max()) + 1
        tokens_NL = torch.arange(step.length, device=device) - (step.length - 1 - at_N1)
        step.seen_NL = self._places_NL.gather(1, tokens_NL.clamp_min(0))
        step.new_N = self._places_NL.gather(1, at_N1)[:, 0]
        return tokens_NL >= 0 if int(positions_N.min()) + 1 < step.length else None

    @property
    def _device(self) -> torch.device:
        tensors = [part for layer in self._probed.layers for part in _parts(layer).values()]
        tensors += [state for states, number in _states(self._probed.layers) if (state := states[number]) is not None]
        return tensors[0].device


def _begin(layer: LinearAttentionLayer) -> None:
    """Mark the states of a layer as computed from earlier tokens."""
    for number in range(layer.number_of_states):
        conv, recurrent = layer.conv_states[number], layer.recurrent_states[number]
        layer.is_conv_states_initialized[number] = conv is not None
        layer.is_recurrent_states_initialized[number] = recurrent is not None
        layer.has_previous_state[number] = True
        if conv is not None:
            layer.conv_kernel_size[number] = conv.shape[-1]
            layer.dtype, layer.device = conv.dtype, conv.device


def _places(tables: Sequence[BlockTable]) -> NDArray[np.int64]:
    """Return the places of all tokens that rows have blocks for, [N, blocks * BLOCK]; padding has any place."""
    longest = max((len(table.blocks) for table in tables), default=0)
    blocks = np.array([table.blocks + [0] * (longest - len(table.blocks)) for table in tables], np.int64)
    places = blocks.reshape(len(tables), longest, 1) * BLOCK + np.arange(BLOCK)
    return np.ascontiguousarray(places.reshape(len(tables), longest * BLOCK))
