"""A page's numbers over a crash, its alarms, long texts of samples, and searches that let others run. No bus."""

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import data_kit
from tests.waits import turn
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire.messages import Done, Fence, Sample, Turns
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.launch.page.alarms import RunAlarms
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.batch import pace_of
from tidemill.launch.page.held import HeldSamples
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.sample_view import SampleView
from tidemill.launch.page.samples import AT_A_TIME, SampleAnswers, row_of
from tidemill.launch.page.texts import MAX_CHARACTERS, SHORT, ending
from tidemill.launch.run.run_facts import RunSettings
from tidemill.launch.samples.filters import Headline
from tidemill.launch.samples.text import Vocabulary

PAUSE_S = 12 * 3600.0
NO_BUS: Any = SimpleNamespace(jet=SimpleNamespace(run="r"), run="r", connected=True)


def reader_of(steps: int) -> RunReader:
    reader = RunReader(NO_BUS)
    reader.settings = RunSettings({"learner": {"steps": steps}, "up": {"gpu_hour_price": 2.0}})
    return reader


def begin(reader: RunReader, epoch: int, steps: range, now_s: float, step_s: float) -> float:
    """Add the records of a learner that takes these steps, and return the time of the last one."""
    reader.note_record(1, now_s, Fence(epoch=epoch))
    for step in steps:
        now_s += step_s
        reader.note_record(step, now_s, Done(epoch=epoch, step=step, metrics={"train/tokens": 500.0}))
    return now_s


def test_after_a_crash_pace_time_left_and_cost_are_of_the_time_that_the_run_ran() -> None:
    """60 steps of 1 s, a crash, 12 hours, steps 21 to 45 taken again with 2 s each."""
    reader = reader_of(100)
    answers = RunAnswers(reader)
    crashed_s = begin(reader, 1, range(1, 61), 1000.0, 1.0)
    before = answers.run()
    assert (before["left_s"], before["elapsed_s"]) == (pytest.approx(40.0), pytest.approx(60.0))
    begin(reader, 2, range(21, 46), crashed_s + PAUSE_S, 2.0)
    devices = Capabilities(devices=("GPU-1",))
    reader.rows = [(LiveRow(role="engine", id="e", host="h", pid=1, phase="serving", capabilities=devices), 0.0)]
    run = answers.run()
    assert run["left_s"] == pytest.approx(55 * 2.0)
    assert run["elapsed_s"] == pytest.approx(60.0 + 50.0), "without the time between the two starts"
    assert run["cost"]["money"] == pytest.approx(2.0 * 110 / 3600)
    overview = answers.overview()
    (trained,) = [fact for fact in overview["facts"] if fact["name"] == "trained"]
    assert trained["value"] == pytest.approx(250.0)


def test_two_outcomes_of_a_start_are_no_pace() -> None:
    reader = reader_of(100)
    begin(reader, 1, range(1, 61), 1000.0, 1.0)
    begin(reader, 2, range(21, 23), 2000.0, 1.0)
    assert RunAnswers(reader).run()["left_s"] is None


def test_a_step_that_waited_for_samples_names_the_slow_push_before_it() -> None:
    reader = reader_of(100)
    for step in range(1, 10):
        slow = step == 7
        values = {"train/wait_seconds": 80.0 if slow else 4.0, "train/step_seconds": 12.0, "push/version": step - 1.0}
        values |= {"push/seconds": 58.5 if slow else 2.0, "push/engines": 1.0 if slow else 2.0}
        reader.metrics.add(step, values, 0.0)
    pace = pace_of(reader, 7)
    assert pace["pace_words"] == (
        "slow: waiting for samples took 80 s, in the median step 4 s; the push of version 6 took 58.5 s, "
        "engines with it: 1"
    )
    assert pace["slow"] and not pace_of(reader, 8)["slow"]
    assert pace["seconds"] == 92.0, "a push goes on beside training"
    assert pace_of(reader, 8)["pace_words"] == "about as long as the median step"


def test_a_prompt_in_a_list_is_its_end() -> None:
    """Chat prompts begin alike: system prompt and examples."""
    prompt = "system: Follow every instruction.\n" * 20 + "user: Which word?"
    assert ending(prompt)[0] == "…" and ending(prompt).endswith("\nuser: Which word?") and len(ending(prompt)) == SHORT
    assert ending("short \u202e") == "short \\u202e"


def test_alarms_are_those_that_the_learner_has_counted() -> None:
    """The page does not know the data type of this run: a mismatch of 0.005 is an alarm in float32 alone."""
    mismatch = {"offpolicy/fresh_logprob_diff_abs": 0.005, "train/tokens": 1000.0}
    settings = RunSettings({"learner": {"dtype": "auto"}, "staleness": {"max_lag": 2}})
    alarms = RunAlarms()
    alarms.step(1, mismatch, 1.0, settings)
    assert not alarms.as_list()
    alarms.step(2, {**mismatch, "alarm/warnings": 1.0}, 2.0, settings)
    assert [(alarm["id"], alarm["since_step"]) for alarm in alarms.as_list()] == [("numerics", 2)]
    assert alarms.as_list()[0]["link"] == "#learning&q=offpolicy/fresh_logprob_diff_abs"
    off = RunSettings({"learner": {"algorithm": {"alarms": {"action": "off"}}}})
    alarms = RunAlarms()
    alarms.step(1, {"data/episode_lag_share_p95": 9.0}, 1.0, off)
    assert not alarms.as_list(), "the learner has none"


def line(seq: int, **changes: Any) -> Headline:
    values = {"seq": seq, "stored_s": 1.0, "kind": "train", "actor": "w", "task": seq, "index": 0, "reward": 0.0}
    return Headline(**(values | changes))


def test_an_engine_is_as_far_behind_as_its_samples_were_when_they_were_stored() -> None:
    """Sequences run over the end of the ring; an evaluation and an empty response say nothing of an engine."""
    held = HeldSamples(8)
    stored = [("e1", 1), ("e2", 1), ("e1", 3), ("e2", 1), ("e1", 4), ("e2", 2), ("e1", 5)]
    for place, (engine, version) in enumerate(stored):
        held.add(line(4 + place, engine=engine, versions=(version, version), kind="train", tokens=10))
    held.add(line(11, engine="e3", versions=(-1, -1), kind="train"))
    held.add(line(12, engine="e3", versions=(0, 0), kind="eval"))
    assert held.engines() == [
        {"engine": "e2", "samples": 3, "behind": 1.33, "most_behind": 2, "version": 2, "tokens": 30},
        {"engine": "e1", "samples": 3, "behind": 0.0, "most_behind": 0, "version": 5, "tokens": 30},
    ]
    assert HeldSamples(8).engines() == []


async def turns_of_others(work: Coroutine[Any, Any, object]) -> int:
    """Return how often another coroutine had its turn during the work."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await turn()
            turns += 1

    async with beside(count()):
        await work
    return turns


async def test_a_filter_that_nothing_fits_lets_other_requests_run() -> None:
    reader, num_lines = reader_of(1), 8 * AT_A_TIME
    for seq in range(1, num_lines + 1):
        reader.held.add(line(seq))
    answers = SampleAnswers(reader)

    async def search() -> None:
        assert not [found async for found in answers.newest_first(num_lines + 1, 1) if found.reward]

    assert await turns_of_others(search()) >= 7
    assert await turns_of_others(answers.histogram("reward=>5")) >= 7
    assert (await answers.histogram("reward=>=0"))["count"] == num_lines


def test_long_texts_of_headers_are_neither_kept_nor_sent() -> None:
    """4,096 names of a megabyte would be 4 GB in a process beside the learner."""
    held = HeldSamples(8)
    names = {name: f"{name}{'x' * 1_000_000}" for name in ("status", "engine", "actor", "kind")}
    held.add(line(1, **names))
    assert max(len(text or "") for text in held._texts) <= SHORT
    (kept,) = held.newest_first(2)
    assert kept.engine == names["engine"][:SHORT]
    assert len(str(row_of(line(2, **names), None))) < 4 * SHORT + 400


LONG = "\u202e" + "abcdefgh" * 20_000


def view_of(**changes: Any) -> SampleView:
    sample: Sample = data_kit.sample(data_kit.task(1), 0, **changes)
    return SampleView(line(1), sample, Vocabulary.read([]))


def test_free_texts_of_a_sample_are_cut() -> None:
    turns = Turns(
        at=np.array([0]),
        tokens=np.array([3]),
        begin_s=np.array([0.0]),
        seconds=np.array([0.1]),
        tools_s=np.array([0.0]),
        id=("i" * 100_000,),
        finish=("f" * 100_000,),
        agent=("a" * 100_000,),
        rewards=(),
    )
    texts = {"finish_reason": LONG, "attempt": LONG, "rollout": LONG, "metadata": {"environment": LONG}}
    parts = {f"{number}{LONG}": 1.0 for number in range(300)}
    answer = view_of(**texts, reward=parts, turns=turns).as_map()
    for name in ("finish_reason", "attempt", "rollout", "environment"):
        assert len(answer[name]) < SHORT + 10, name
    assert len(answer["parts"]) == 100 and max(map(len, answer["parts"])) < SHORT + 10
    assert all(len(answer["turns"][0][name]) == SHORT for name in ("id", "finish", "agent"))


def test_long_reasoning_comes_in_pieces() -> None:
    view = view_of(prompt=[{"role": "assistant", "reasoning_content": LONG, "content": "4"}])
    (message,) = view.as_map()["messages"]
    pieces, left = [LONG[:MAX_CHARACTERS]], message["reasoning_cut"]
    assert left == len(LONG) - MAX_CHARACTERS
    while left:
        answer = view.text(message["reasoning_field"], len(LONG) - left)
        pieces, left = [*pieces, answer["text"]], answer["cut"]
    assert "".join(pieces) == LONG
    for field in ("reasoning/1", "reasoning/", "reasoning/" + "9" * 5000, "role/0"):
        with pytest.raises(ValueError, match="field"):
            view.text(field, 0)
