"""The state of an episode: its clock, its room for calls, its seeds and its transcript."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.episode_kit import task
from tidemill.actors.episodes.episode import Clock, Episode, Spent, bounded, messages_of
from tidemill.actors.episodes.recorder import TurnOutput, TurnRecorder
from tidemill.bus.wire.messages import Span
from tidemill.bus.wire.task_settings import Budget


def output(*tokens: int, id: str = "") -> TurnOutput:
    spans = (Span(version=0, num_tokens=len(tokens)),) if tokens else ()
    return TurnOutput(
        tokens=np.array(tokens, np.int32), log_probs=np.full(len(tokens), -0.5, np.float32), spans=spans, id=id
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


async def test_a_clock_stands_still_while_it_is_stopped() -> None:
    clock = Clock()
    with clock.stopped():
        at = clock.seconds
        reached = asyncio.create_task(clock.reaches(at + 0.05))
        with clock.stopped():
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.01)
        assert clock.seconds == at and not reached.done()
    await reached
    assert clock.seconds >= at + 0.05


async def test_a_clock_without_a_limit_never_ends() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await Clock().reaches(0)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(
    prompts=PROMPTS,
    asked=st.integers(1, 5),
    limit=st.integers(1, 30),
    name=st.sampled_from(["tokens", "context", "total_tokens", "turns"]),
)
def test_a_budget_is_kept_by_every_sequence_of_calls(
    prompts: list[list[int]], asked: int, limit: int, name: str
) -> None:
    """Exported samples stay within every limit, whatever is asked, one call after the other and two at once."""
    episode = Episode(task(budget=Budget(**{name: limit})), 0, "n")
    for place, prompt in enumerate(prompts):
        try:
            with episode.call(ids(*prompt), asked) as first:
                made = [(ids(*prompt), output(*[place % 3] * first.max_new_tokens))]
                try:
                    with episode.call(ids(*prompt), asked) as second:
                        made.append((ids(*prompt), output(*[place % 2] * second.max_new_tokens)))
                        for each in made:
                            episode.recorder.record(*each)
                        made = []
                except Spent:
                    pass
                for each in made:
                    episode.recorder.record(*each)
        except Spent:
            assert episode.spent == name
    if not len(episode.recorder):
        return
    found = episode.recorder.export()
    sizes = {
        "tokens": int(found.loss_mask.sum()),
        "context": max(size.num_tokens for size in found.sequences),
        "total_tokens": len(found.tokens),
        "turns": len(episode.recorder),
    }
    assert sizes[name] <= limit
    assert len(found.tokens) <= episode.recorder.total_tokens


@given(PROMPTS)
def test_growth_is_what_a_turn_adds(prompts: list[list[int]]) -> None:
    recorder = TurnRecorder()
    for place, prompt in enumerate(prompts):
        before, growth = recorder.total_tokens, recorder.growth(ids(*prompt))
        recorder.record(ids(*prompt), output(place % 3))
        assert recorder.total_tokens - before == growth + 1
    assert recorder.total_tokens == len(recorder.export().tokens)


def test_seeds_differ_by_prompt_and_repetition_and_not_by_order() -> None:
    def seeds(*prompts: tuple[int, ...]) -> dict[tuple[int, ...], list[int | None]]:
        episode = Episode(task(), 0, "n")
        found: dict[tuple[int, ...], list[int | None]] = {}
        for prompt in prompts:
            with episode.call(ids(*prompt), 4) as call:
                found.setdefault(prompt, []).append(call.seed)
        return found

    one = seeds((1,), (2,), (1,))
    assert one == seeds((2,), (1,), (1,))
    assert len({seed for each in one.values() for seed in each}) == 3
    with Episode(task(seed=None), 0, "n").call(ids(1), 4) as call:
        assert call.seed is None


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(150, 600))
def test_a_transcript_is_bounded_and_keeps_both_ends(lengths: list[int], most: int) -> None:
    messages = [{"role": "user", "content": "x" * length} for length in lengths]
    found = bounded(messages, most)
    if len(json.dumps(messages)) <= most:
        assert list(found) == messages
    kept = [message for message in found if message["role"] != "note"]
    assert sum(len(json.dumps(message)) for message in kept) <= most
    assert all(message in messages for message in kept)


def test_a_transcript_of_a_chat_and_of_a_prompt() -> None:
    assert messages_of(b'{"messages": [{"role": "user", "content": "a"}]}', "/v1/chat/completions", "b") == (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    )
    assert messages_of(b'{"prompt": "a"}', "/v1/completions", "b")[0] == {"role": "user", "content": "a"}
    assert messages_of(b'{"input_ids": [1]}', "/generate", "b") == ({"role": "assistant", "content": "b"},)
