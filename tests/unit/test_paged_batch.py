"""The batch of the built-in engine over blocks of keys and values: whatever joins, leaves, is preempted, shares a
beginning or sees other weights, each token has the log-prob of its sequence alone, with a cache of its own.
"""

from collections.abc import Sequence as Items

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin import decoder
from tidemill.actors.serving.builtin.batch import Batch
from tidemill.actors.serving.builtin.blocks import BLOCK, RowSizes, blocks_of, budget
from tidemill.actors.serving.builtin.runner import DecoderRunner
from tidemill.actors.serving.builtin.sampler import Sampler
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest, Sequence
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights

CONTEXT, VOCABULARY = 112, 61
NEAR = 2e-5
SHAPE = ModelShape.of(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
    },
    where="test",
)
MODEL = Model(eos_ids=frozenset(), max_context=CONTEXT, text=None)
TEXTS = np.random.default_rng(0).integers(0, VOCABULARY, (3, 80)).astype(np.int32)
TEXTS[1, :40], TEXTS[1, 48:] = TEXTS[0, :40], TEXTS[0, 48:]


def make_weights(seed: int) -> Weights:
    weights, random = Weights(SHAPE, dtype=torch.float32, device=torch.device("cpu")), torch.Generator()
    random.manual_seed(seed)
    for name, tensor in weights.named.items():
        tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3 + float("norm" in name))
    weights.finalize()
    return weights


WEIGHTS = [make_weights(seed) for seed in range(2)]


class Alone:
    """One sequence with keys and values of its own, as tensors that grow."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._table = decoder.RopeTable(WEIGHTS[0], CONTEXT)
        self._length = 0

    @torch.inference_mode()
    def scores(self, tokens: Items[int], weights: Weights) -> Tensor:
        """Compute more tokens. Returns the scores behind each, [T, V]."""
        first, self._length = self._length, self._length + len(tokens)
        angles = self._table.at(torch.arange(first, self._length)[None])
        x_1TE = decoder.forward(weights, torch.tensor([list(tokens)]), angles, self._attend)
        return decoder.logits(weights, x_1TE[0])

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer in self._layers:
            key, value = (torch.cat(pair, 1) for pair in zip(self._layers[layer], (key, value), strict=True))
        self._layers[layer] = key, value
        num_new, length, shared = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
        keys, values = (heads[0].repeat_interleave(shared, 1).transpose(0, 1) for heads in (key, value))
        scores = query[0].transpose(0, 1) @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
        seen = torch.ones(num_new, length, dtype=torch.bool).tril(length - num_new)
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)[None]


class Played:
    """A batch that is driven step by step, and the admissions of each sequence: (tokens it had, version)."""

    def __init__(self, num_blocks: int, *, max_running: int = 8, share_prefix: bool = True) -> None:
        runner = DecoderRunner(WEIGHTS[0], num_blocks=num_blocks)
        self.batch = Batch(runner, max_running=max_running, share_prefix=share_prefix, version=0)
        self.runner, self.pool = runner, self.batch.pool
        self.sequences: list[Sequence] = []
        self.admissions: dict[Sequence, list[tuple[int, int]]] = {}

    def submit(self, prompt: np.ndarray, *, max_new_tokens: int, count: int = 1) -> list[Sequence]:
        made = []
        for _ in range(count):
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0)
            seed = len(self.sequences)
            request = ResponseRequest(rid=str(seed), prompt=prompt, params=params, seed=seed)
            made.append(Sequence(request, model=MODEL, sink=lambda *_: None))
            self.sequences.append(made[-1])
        self.batch.waiting.extend(made)
        return made

    @torch.inference_mode()
    def step(self) -> None:
        waiting = {sequence: len(sequence.tokens) for sequence in self.batch.waiting}
        self.batch.admit()
        for sequence in waiting.keys() - set(self.batch.waiting):
            self.admissions.setdefault(sequence, []).append((waiting[sequence], self.batch.version))
        if self.batch.running:
            self.batch.decode()
        used = {block for sequence in self.batch.running if sequence.table for block in sequence.table.blocks}
        assert len(used) == self.pool.num_blocks - self.pool.available
        assert len(used) + self.pool.num_idle <= self.pool.touched <= self.pool.num_blocks

    def push(self) -> None:
        version = self.batch.version + 1
        self.runner.weights = WEIGHTS[version % 2]
        self.batch.flip(version)

    def finish(self) -> None:
        for _ in range(5000):
            if not self.batch.running and not self.batch.waiting:
                break
            self.step()
        assert all(sequence.finish is not None and sequence.error is None for sequence in self.sequences)
        assert self.pool.available == self.pool.num_blocks

    def check(self) -> None:
        """Compare every token with its sequence alone, under the same weights."""
        for sequence in self.sequences:
            assert bool(sequence.tokens) == bool(sequence.spans), "an aborted one may never have run"
            if not sequence.tokens:
                continue
            ends = [start for _, start in sequence.spans[1:]] + [len(sequence.tokens)]
            versions: list[int] = []
            for (version, _), end in zip(sequence.spans, ends, strict=True):
                versions += [version] * (end - len(versions))
            admissions = self.admissions.get(sequence, [])
            for (first, version), (end, _) in zip(admissions, [*admissions[1:], (len(versions), 0)], strict=True):
                alone, context = Alone(), sequence.context()
                rows = [alone.scores(context[: len(sequence.prompt) + first], WEIGHTS[version % 2])[-1:]]
                for at in range(first + 1, end):
                    rows.append(alone.scores([sequence.tokens[at - 1]], WEIGHTS[versions[at] % 2]))
                compare(sequence, torch.cat(rows)[: end - first], first)


def compare(sequence: Sequence, scores_TV: Tensor, first: int) -> None:
    tokens = sequence.tokens[first : first + len(scores_TV)]
    sampler = Sampler([sequence.params] * len(tokens), [sequence.seed] * len(tokens), torch.device("cpu"))
    drawn, log_probs = sampler.draw(scores_TV, np.arange(first, first + len(tokens)) + len(sequence.prompt))
    assert drawn.tolist() == tokens
    np.testing.assert_allclose(sequence.log_probs[first : first + len(tokens)], log_probs, atol=NEAR)


OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 80), st.integers(1, 4), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 20)),
    st.tuples(st.just("turn"), st.integers(0, 99), st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 99)),
    st.tuples(st.just("push")),
    st.tuples(st.just("retract")),
)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.integers(blocks_of(CONTEXT), 30), st.booleans(), st.lists(OPERATIONS, min_size=3, max_size=14))
def test_every_token_is_that_of_its_sequence_alone(
    num_blocks: int, share_prefix: bool, operations: list[tuple[object, ...]]
) -> None:
    """Joins, groups, turns behind turns, pushes in the middle, aborts, retractions, and preemption by a short pool."""
    played = Played(num_blocks, share_prefix=share_prefix)
    for name, *numbers in operations:
        first, *others = [*numbers, 0]
        assert isinstance(first, int)
        if name == "submit":
            length, count, max_new_tokens = others[:3]
            played.submit(TEXTS[first, :length], count=count, max_new_tokens=max_new_tokens)  # type: ignore[call-overload, arg-type]
        elif name == "step":
            for _ in range(first):
                played.step()
        elif name == "turn" and (ended := [each for each in played.sequences if each.finish is not None]):
            context = ended[first % len(ended)].context()
            prompt = np.concatenate([context, TEXTS[2, : others[0]]])[: CONTEXT - 1]  # type: ignore[misc]
            played.submit(prompt, max_new_tokens=12)
        elif name == "abort" and played.sequences:
            chosen = played.sequences[first % len(played.sequences)]
            played.batch.abort(lambda sequence, chosen=chosen: sequence is chosen, "Aborted")  # type: ignore[misc]
        elif name == "push":
            played.push()
        elif name == "retract":
            played.batch.retract(free=False)
    played.finish()
    played.check()


def test_the_prompt_of_a_group_is_computed_once_in_blocks_that_all_share() -> None:
    played = Played(40)
    played.submit(TEXTS[0, :70], count=8, max_new_tokens=20)
    played.step()
    assert played.batch.counters.prefill_tokens == 70
    assert played.pool.num_blocks - played.pool.available == 4 + 8, "four full blocks, and the last one of each"
    played.finish()
    played.check()
    assert played.batch.counters.preemptions == 0


def test_a_turn_computes_what_is_new_alone() -> None:
    played = Played(40)
    (first,) = played.submit(TEXTS[0, :30], max_new_tokens=20)
    played.finish()
    prompt = np.concatenate([first.context(), TEXTS[2, :10]])
    (second,) = played.submit(prompt, max_new_tokens=5)
    played.finish()
    played.check()
    # 49 tokens of the first one were computed, the last sampled one was not.
    assert second.cached_tokens == 48
    assert played.batch.counters.prefill_tokens == 30 + 60 - 48


def test_no_new_prompt_uses_blocks_of_older_weights() -> None:
    played = Played(40)
    (first,) = played.submit(TEXTS[0, :64], max_new_tokens=30)
    played.step()
    played.push()
    for _ in range(20):  # a block is full that the new weights have computed behind blocks of the old ones
        played.step()
    (later,) = played.submit(TEXTS[0, :64], max_new_tokens=3)
    played.finish()
    (turn,) = played.submit(first.context(), max_new_tokens=3)
    played.finish()
    played.check()
    assert (later.cached_tokens, turn.cached_tokens) == (0, 64), "of the later one, not of the first"


def test_a_block_is_found_behind_the_same_beginning_alone() -> None:
    played = Played(40)
    for text in (0, 1, 1):
        (last,) = played.submit(TEXTS[text, :70], max_new_tokens=3)
        played.finish()
    played.check()
    assert last.cached_tokens == 64


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    played = Played(blocks_of(CONTEXT))
    old, young = (played.submit(TEXTS[text, :30], max_new_tokens=70)[0] for text in (0, 2))
    while not played.batch.counters.preemptions:
        played.step()
    assert played.batch.running == [old] and list(played.batch.waiting) == [young]
    tokens, log_probs = list(young.tokens), list(young.log_probs)
    played.finish()
    played.check()
    assert young.tokens[: len(tokens)] == tokens and young.log_probs[: len(tokens)] == log_probs
    assert (old.retractions, young.retractions, len(young.tokens)) == (0, 1, 70)


def test_a_prompt_waits_for_blocks_and_idle_ones_are_evicted_oldest_first() -> None:
    played = Played(8)
    for text in (0, 2):
        played.submit(TEXTS[text, :48], max_new_tokens=1)
        played.finish()
    assert (played.pool.num_idle, played.pool.evicted) == (6, 0)
    first, second = (played.submit(TEXTS[2, :48], max_new_tokens=1, count=1)[0] for _ in range(2))
    played.finish()
    assert first.cached_tokens == second.cached_tokens - 16 == 32
    long, short = played.submit(TEXTS[1, :80], max_new_tokens=30)[0], played.submit(TEXTS[2, :33], max_new_tokens=2)[0]
    played.step()
    assert played.batch.running == [long] and list(played.batch.waiting) == [short]
    evicted = played.pool.evicted
    assert evicted > 0, "its five blocks are more than were free"
    played.finish()
    played.check()
    assert played.pool.evicted > evicted
    evicted = played.pool.evicted
    played.push()
    played.submit(TEXTS[0, :48], max_new_tokens=1)
    played.finish()
    assert played.pool.evicted == evicted, "blocks of earlier weights are forgotten, not evicted"


def test_blocks_with_numbers_that_are_not_finite_are_wiped() -> None:
    played, broken = Played(8), make_weights(0)
    broken.layers[1].qkv_QE.fill_(torch.nan)
    played.runner.weights = broken
    (failed,) = played.submit(TEXTS[0, :40], max_new_tokens=5)
    played.step()
    assert failed.error is not None and played.pool.num_idle == 0
    played.sequences.clear()
    played.push()
    played.submit(TEXTS[2, :3], max_new_tokens=5)
    played.finish()
    played.check()


def test_a_sequence_whose_numbers_are_not_finite_spoils_no_other_one() -> None:
    """It has the first block of the pool, and the other one is shorter behind a known beginning."""
    played, broken = Played(20), make_weights(0)
    text = TEXTS[0, :72]
    unknown = next(token for token in range(VOCABULARY) if token not in text)
    (name,) = (name for name in broken.named if "embed" in name)
    broken.named[name][unknown] = torch.nan
    played.runner.weights = broken
    (holder,) = played.submit(TEXTS[2, :5], max_new_tokens=10)
    played.step()
    assert holder.table is not None and holder.table.blocks == [0]
    played.submit(text[:33], max_new_tokens=1)
    played.step()
    played.batch.abort(lambda sequence: sequence is holder, "Aborted")
    (failed,) = played.submit(np.full(90, unknown, np.int32), max_new_tokens=5)
    (behind,) = played.submit(text, max_new_tokens=5)
    played.batch.admit()
    assert failed.error is not None and behind.error is None and behind.cached_tokens == 32
    played.sequences = [behind]
    played.finish()


def test_the_budget_is_all_rows_or_a_quarter_of_the_memory() -> None:
    size = RowSizes.of(SHAPE, 4).block_bytes
    assert size == 2 * 2 * 2 * 8 * BLOCK * 4

    def blocks(**changes: int) -> int:
        return budget(
            RowSizes.of(SHAPE, 4), **({"max_running": 6, "max_context": 0, "kv_tokens": 0, "memory_bytes": 0} | changes)
        )

    assert blocks() == 6 * blocks_of(CONTEXT)
    assert blocks(max_context=17) == 12
    assert blocks(memory_bytes=4 * 10 * size + 5) == 10
    assert blocks(memory_bytes=4 * 10 * size, kv_tokens=20 * BLOCK + 3) == 20


@pytest.mark.parametrize("lengths", [[1, 1, 1], [9, 4, 1], [40, 20, 19, 2]])
def test_chunks_have_rows_of_similar_length_and_a_bounded_size(lengths: list[int]) -> None:
    memory = DecoderRunner(WEIGHTS[0], num_blocks=100).memory
    memory.blocks_at_once = 60
    parts = list(memory.divide(lengths))
    assert [row for rows, _ in parts for row in range(rows.start, rows.stop)] == list(range(len(lengths)))
    for rows, longest in parts:
        assert longest == max(lengths[rows])
        assert len(lengths[rows]) * longest <= 60 or len(lengths[rows]) == 1
        assert longest <= 8 or longest <= 2 * min(lengths[rows])
