"""From an engine's answer to a sample, and the retries when there is no good answer."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_scene import Answer, Scene, generation, running_engines
from tests.examples import examples
from tests.refusals import refusal
from tests.waits import until
from tidemill.actors.actor.single_turn import SingleTurn, failed, failed_sample
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse, GenerationFailed, Prompt, Responses
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.episodes.port import Made, Unfinished
from tidemill.actors.errors import BadRequest, EngineFailed, EngineGone, EngineUnavailable
from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.invariants import MIN_LOG_PROB, check_partial
from tidemill.bus.wire.messages import Kind, Partial, Sample, Sampling, Span, Status, Task, Timings

TASK = Task(
    id=17,
    run="r",
    epoch=2,
    prompt="ab=",
    prompt_tokens=np.array([2, 3, 4], np.int32),
    group_size=4,
    sampling=Sampling(temperature=0.7, seed=1000),
    prompt_epoch=0,
    offset=5,
    kind=Kind.EVAL,
    label="ba",
    min_version=3,
    metadata={"topic": "x"},
)


class Turn(SingleTurn):
    """A single turn with its responses in reach."""

    def __init__(self, responses: Responses) -> None:
        super().__init__(responses, join=True)
        self.responses = responses

    async def made(self, task: Task, index: int, attempt: str, partial: Partial | None = None) -> Sample:
        return (await self.sample(task, index, attempt, partial)).sample


def turn(engines: EnginePool, *, retries: int = 3, timeout_s: float = 30.0, **options: float) -> tuple[Turn, Activity]:
    activity = Activity()
    return Turn(Responses(engines, timeout_s=timeout_s, retries=retries, activity=activity, **options)), activity


async def outcome(answers: Sequence[Answer], **options: Any) -> tuple[Any, Activity, list[Any]]:
    """Run one request on an engine with these answers. Returns (sample or error, activity, requests to the engine)."""
    scene = Scene({"a": answers})
    async with running_engines(scene) as engines:
        single, activity = turn(engines, **options)
        try:
            result: Any = await single.made(TASK, 2, "n0")
        except (GenerationFailed, Unfinished) as error:
            result = error
        return result, activity, scene.clients["a"].asked


async def test_an_answer_becomes_a_sample() -> None:
    answer = generation(
        tokens=(5, 6, 1), spans=(Span(version=3, num_tokens=2), Span(version=4, num_tokens=1)), text="ba"
    )
    sample, activity, asked = await outcome([answer])
    check_sample(sample)
    assert sample.tokens.tolist() == [2, 3, 4, 5, 6, 1]
    assert (sample.response_length, sample.response, sample.loss_mask.tolist()) == (3, "ba", [1, 1, 1])
    assert sample.rollout_log_probs.tolist() == [-0.5, -0.5, -0.5]
    assert (sample.spans, sample.min_version, sample.max_version) == (answer.spans, 3, 4)
    assert (sample.run, sample.task, sample.index, sample.group_size, sample.attempt) == ("r", 17, 2, 4, "n0")
    assert (sample.kind, sample.label, sample.metadata, sample.prompt) == (Kind.EVAL, "ba", {"topic": "x"}, "ab=")
    assert (sample.status, sample.finish_reason, sample.engine) == (Status.COMPLETED, "stop", "a")
    assert sample.sampling == TASK.sampling
    assert (activity.counters.requests_aborted, activity.busy) == (0, 0)
    ((sampling, options),) = asked
    assert sampling == replace(TASK.sampling, seed=1002), "its own seed: the group's plus its index"
    assert options["min_version"] == 3
    assert 0 < options["timeout_s"] <= 30


async def test_without_a_seed_the_engine_chooses() -> None:
    scene = Scene({"a": ()})
    async with running_engines(scene) as engines:
        await turn(engines)[0].made(replace(TASK, sampling=Sampling()), 1, "n")
    assert scene.clients["a"].asked[0][0].seed is None


async def test_the_responses_of_a_group_are_one_request() -> None:
    scene = Scene({"a": [lambda sampling: generation(tokens=(sampling.seed or 0, 1))]})
    async with running_engines(scene) as engines:
        single, activity = turn(engines)
        made = await single.group(TASK, "n0")
        alone = await single.made(TASK, 2, "n0")
    samples = [each.sample for each in made if isinstance(each, Made)]
    assert [sample.tokens[3:].tolist() for sample in samples] == [[1000 + index, 1] for index in range(4)]
    assert [sample.message_id for sample in samples] == [f"17.{index}.n0" for index in range(4)]
    assert replace(samples[2], timings=alone.timings).tokens.tolist() == alone.tokens.tolist()
    (_, options), _ = scene.clients["a"].asked
    assert len(set(options["request_ids"])) == 4
    assert (options["min_version"], activity.counters.requests_aborted, activity.busy) == (3, 0, 0)


async def test_what_a_group_lacks_is_made_alone_from_its_last_token_on() -> None:
    aborted = generation(tokens=(5, 6), finish="abort")
    answers = [generation(), aborted, generation(log_prob=0.5), generation(tokens=(), finish="abort")]
    scene = Scene({"a": [*answers, generation(tokens=(5, 6, 7))]})
    async with running_engines(scene) as engines:
        single, activity = turn(engines)
        whole, begun, invalid, nothing = await single.group(TASK, "n0")
        assert isinstance(whole, Made) and isinstance(begun, Partial)
        assert (begun.tokens.tolist(), invalid, nothing) == ([5, 6], None, None)
        assert [entry["failures"] for entry in engines.overview()] == [1], "such an engine is left alone for a while"
        made = await single.sample(TASK, 1, "n0", begun)
    assert made.sample.tokens.tolist() == [2, 3, 4, 5, 6, 7]
    assert not made.continued, "by another actor"
    assert scene.clients["a"].asked[-1][1]["begun"].tokens.tolist() == [5, 6]
    assert activity.counters.requests_aborted == 3


@pytest.mark.parametrize("error", [EngineGone("a", "reset"), EngineUnavailable("a", "full"), BadRequest("too long")])
async def test_a_group_whose_request_fails_is_made_alone(error: Exception) -> None:
    async with running_engines(Scene({"a": [error, generation()]})) as engines:
        single, _ = turn(engines)
        assert await single.group(TASK, "n0") == [None] * 4
        assert (await single.made(TASK, 0, "n0")).status is Status.COMPLETED
        engines.give_up()
    with pytest.raises(Unfinished):
        await single.group(replace(TASK, min_version=9), "n0")


async def test_a_group_that_is_cut_short_keeps_its_tokens() -> None:
    scene = Scene({"a": [generation(tokens=(5, 6), finish="abort")]})
    async with running_engines(scene) as engines:
        single, _ = turn(engines)
        engine = scene.clients["a"]
        engine.hold = asyncio.Event()
        asking = asyncio.create_task(single.group(TASK, "n0"))
        await until(lambda: engine.asked, every_s=0)
        assert [load.requests for load in engines.loads()] == [4]
        await single.responses.cut_short()
        begun = await asking
        assert [each.tokens.tolist() for each in begun if isinstance(each, Partial)] == [[5, 6]] * 4
        assert set(engine.aborted) == set(engine.asked[0][1]["request_ids"])
        assert [entry["failures"] for entry in engines.overview()] == [0]


@pytest.mark.parametrize(("finish", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED)])
async def test_the_finish_decides_the_status(finish: str, status: Status) -> None:
    sample, *_ = await outcome([generation(finish=finish)])
    assert sample.status is status


BROKEN: dict[str, Answer] = {
    "died": EngineGone("a", "connection reset"),
    "failed": EngineFailed("a", "HTTP 500"),
    "aborted": generation(finish="abort"),
    "positive log-prob": generation(log_prob=0.5),
    "no log-prob": generation(log_prob=float("nan")),
    "a log-prob of the end of float32": generation(log_prob=-3.4e38),
    "spans too short": generation(spans=(Span(version=3, num_tokens=1),)),
    "negative token": generation(tokens=(5, -1)),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_request_that_is_broken_off_is_made_again(name: str) -> None:
    sample, activity, asked = await outcome([BROKEN[name], generation()])
    assert sample.status is Status.COMPLETED
    assert activity.counters.requests_aborted == 1
    assert len({options["request_id"] for _, options in asked}) == 2, "request ids are never used twice"


@pytest.mark.parametrize("name", BROKEN)
async def test_repeated_requests_are_bounded(name: str) -> None:
    error, activity, asked = await outcome([BROKEN[name]], retries=3)
    assert isinstance(error, GenerationFailed)
    assert str(error).startswith(
        "generation: 3 requests broken off, the last one: engine a: failed" if name != "died" else "generation: 3"
    )
    assert (len(asked), activity.counters.requests_aborted) == (3, 3)


GONE = EngineGone("a", "connection reset")


async def behind_a_relay(answers: Sequence[Answer], *, retries: int) -> tuple[Any, Activity, int]:
    """Run requests, one for each whole answer at most, on an engine with a known process. Returns the last outcome."""
    scene = Scene({"a": answers})
    scene.view["a"] = replace(scene.view["a"], process="p0")
    async with running_engines(scene) as engines:
        single, activity = turn(engines, retries=retries)
        try:
            result: Any = await single.made(TASK, 2, "n0")
        except GenerationFailed as error:
            result = error
        return result, activity, len(scene.clients["a"].asked)


async def test_an_engine_that_is_away_behind_a_relay_breaks_off_one_request() -> None:
    """The relay takes each connection and closes it; nothing is answered in between."""
    made, activity, asked = await behind_a_relay([GONE] * 6 + [generation()], retries=2)
    assert made.status is Status.COMPLETED and asked == 7
    assert activity.counters.requests_aborted == 1


async def test_a_prompt_that_ends_each_process_of_its_engine_is_given_up() -> None:
    scene = Scene({"a": ()})
    processes = iter(range(100))

    async def dies(*request: Any, **options: Any) -> Generation:
        scene.view["a"] = replace(scene.view["a"], process=f"p{next(processes)}")  # it is started again
        await scene.seen()
        raise GONE

    scene.view["a"] = replace(scene.view["a"], process="first")
    async with running_engines(scene) as engines:
        scene.clients["a"].generate = dies  # type: ignore[method-assign]
        single, activity = turn(engines, retries=3)
        with refusal(GenerationFailed, reason=re.compile("^3 .*: connection reset$"), outside=True):
            await single.made(TASK, 0, "n")
    assert activity.counters.requests_aborted == 3


async def test_a_connection_that_breaks_behind_an_answer_counts_again() -> None:
    scene = Scene({"a": [GONE, generation(), GONE, generation(), GONE, GONE, generation()]})
    scene.view["a"] = replace(scene.view["a"], process="p0")
    async with running_engines(scene) as engines:
        single, activity = turn(engines, retries=2)
        for index in range(3):
            assert (await single.made(TASK, index, "n")).status is Status.COMPLETED
    assert activity.counters.requests_aborted == 3


async def test_the_next_attempt_goes_to_another_engine() -> None:
    scene = Scene({"a": [EngineGone("a", "reset")], "b": ()})
    async with running_engines(scene, quarantine_s=(0.0, 0.0)) as engines:
        sample = await turn(engines)[0].made(TASK, 0, "n")
    assert sample.engine == "b"


async def test_an_unavailable_engine_is_retried_and_counts_as_no_broken_request() -> None:
    away = EngineUnavailable("a", "connection refused")
    sample, activity, asked = await outcome([away] * 6 + [generation()], retries=1)
    assert sample.status is Status.COMPLETED
    assert (len(asked), activity.counters.requests_aborted) == (7, 0)
    assert sample.timings.queued_s > 0


async def test_retries_end_at_the_time_limit_of_a_response() -> None:
    for _ in range(5):  # a process that stands still meanwhile asks once
        error, _, asked = await outcome([EngineUnavailable("a", "refused")], timeout_s=3.0)
        assert isinstance(error, GenerationFailed | Unfinished)
        if len(asked) > 1:
            break
    assert len(asked) > 1


async def test_a_request_that_can_never_be_served_is_made_once() -> None:
    error, activity, asked = await outcome([BadRequest("input_ids: too long")])
    assert isinstance(error, GenerationFailed)
    assert str(error) == "generation: input_ids: too long"
    assert (len(asked), activity.counters.requests_aborted) == (1, 0)


async def test_without_an_engine_a_sample_is_unfinished_and_not_failed() -> None:
    async with running_engines(Scene({})) as engines:
        with pytest.raises(Unfinished):
            await turn(engines, timeout_s=0.05)[0].made(TASK, 0, "n")


async def test_giving_up_ends_a_wait() -> None:
    scene = Scene({})
    async with running_engines(scene) as engines:
        single, _ = turn(engines)
        waiting = asyncio.create_task(single.made(TASK, 0, "n"))
        await scene.seen()
        assert "none known" in single.responses.waits_for()
        single.responses.stop_waiting()
        with pytest.raises(Unfinished):
            await waiting


def test_a_failed_sample_is_a_valid_message() -> None:
    sample = failed_sample(TASK, 3, "n1", "no luck")
    check_sample(sample)
    again = decode_sample(encode_sample(sample))
    assert (again.status, again.response_length, again.spans, again.index) == (Status.FAILED, 0, (), 3)
    assert again.tokens.tolist() == [2, 3, 4]
    assert again.metadata == {"topic": "x", "error": "no luck"}
    assert TASK.metadata == {"topic": "x"}, "the task's own is left alone"


async def test_failing_a_sample_keeps_what_it_has() -> None:
    sample, *_ = await outcome([generation()])
    bad = failed(replace(sample, reward={"score": 1.0}), "reward hangs")
    check_sample(bad)
    assert (bad.status, bad.reward, bad.metadata["error"]) == (Status.FAILED, 0.0, "reward hangs")
    assert bad.tokens is sample.tokens


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=4),
    st.sampled_from(["stop", "length"]),
    st.data(),
)
def test_every_answer_that_keeps_the_ports_promises_becomes_a_valid_sample(
    stretches: list[tuple[int, int]], finish: str, data: st.DataObject
) -> None:
    total = sum(length for _, length in stretches)
    tokens = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
    log_probs = data.draw(
        st.lists(st.floats(MIN_LOG_PROB, 0, width=32, allow_subnormal=False), min_size=total, max_size=total)
    )
    spans = tuple(Span(version=version, num_tokens=length) for version, length in stretches)
    answer = generation(tokens=tokens, log_probs=np.array(log_probs, np.float32), spans=spans, finish=finish)
    with asyncio.Runner() as runner:
        sample, _, asked = runner.run(outcome([answer]))
    check_sample(sample)
    assert len(asked) == 1
    assert sample.tokens[3:].tolist() == tokens


BEGUN = Partial(
    run="r",
    task=17,
    index=2,
    attempt="n9",
    tokens=np.array([5, 6], np.int32),
    rollout_log_probs=np.array([-0.5, -0.5], np.float32),
    spans=(Span(version=3, num_tokens=2),),
    response="ab",
    seed=1002,
    position=5,
    timings=Timings(queued_s=3.0, generating_s=40.0),
)
WHOLE = generation(tokens=(5, 6, 7))


async def continued(answers: Sequence[Answer], partial: Partial = BEGUN) -> tuple[Any, list[Any]]:
    """Continue a partial response. Returns (sample, tokens already begun that each request sent to the engine)."""
    scene = Scene({"a": answers})
    async with running_engines(scene) as engines:
        sample = await turn(engines)[0].made(TASK, 2, "n1", partial)
        return sample, [
            None if asked["begun"] is None else asked["begun"].tokens.tolist() for _, asked in scene.clients["a"].asked
        ]


async def test_a_partial_is_continued_under_the_new_attempt() -> None:
    sample, begun = await continued([WHOLE])
    assert begun == [[5, 6]]
    assert (sample.attempt, sample.response_length) == ("n1", 3)
    assert (sample.timings.queued_s >= 3, sample.timings.generating_s >= 40) == (True, True), "time spent before counts"


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"task": 16},
        {"index": 1},
        {"seed": 1001},
        {"seed": None},
        {"position": 6},
        {"tokens": np.zeros(0, np.int32), "position": 3},
        {"tokens": np.zeros(128, np.int32), "position": 131},
    ],
)
async def test_a_partial_that_does_not_fit_is_not_used(change: dict[str, Any]) -> None:
    _, begun = await continued([WHOLE], replace(BEGUN, **change))
    assert begun == [None]


@pytest.mark.parametrize(
    "refusal", [BadRequest("too long"), EngineFailed("a", "HTTP 500"), generation(tokens=(5, 6, 7), log_prob=0.5)]
)
async def test_a_response_that_cannot_be_continued_is_generated_again(refusal: Answer) -> None:
    sample, begun = await continued([refusal, WHOLE])
    assert begun == [[5, 6], None]
    assert sample.status is Status.COMPLETED
    assert sample.timings.generating_s < 40


async def test_a_response_broken_off_is_continued() -> None:
    _, begun = await continued([generation(tokens=(5, 6, 7, 8), finish="abort"), EngineGone("a", "died"), WHOLE])
    assert begun == [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8]]


async def leaving(answer: Answer, **options: float) -> tuple[Unfinished, list[str]]:
    """Leave while the engine continues a partial response. Returns the error with which it ends, and the aborted
    requests.
    """
    scene = Scene({"a": [answer]})
    async with running_engines(scene) as engines:
        client = scene.clients["a"]
        client.hold = asyncio.Event()
        single, _ = turn(engines, **options)
        work = asyncio.create_task(single.made(TASK, 2, "n1", BEGUN))
        await until(lambda: client.asked, every_s=0)  # no event
        await single.responses.cut_short()
        with pytest.raises(Unfinished) as caught:
            await work
        with pytest.raises(Unfinished):
            await single.made(TASK, 3, "n1")
        assert len(client.asked) == 1, "who leaves asks for nothing"
        return caught.value, client.aborted


async def test_cutting_short_keeps_the_engines_last_answer() -> None:
    unfinished, aborted = await leaving(generation(tokens=(5, 6, 7), finish="abort"))
    assert len(aborted) == 1
    assert aborted[0].startswith("17.2.n1.")
    partial = unfinished.partial
    assert partial is not None
    check_partial(partial)
    assert partial.tokens.tolist() == [5, 6, 7]
    assert (partial.attempt, partial.seed, partial.position, partial.response) == ("n1", 1002, 6, "abc")
    assert partial.timings.generating_s > 40


async def test_cutting_short_does_not_wait_for_a_hung_engine() -> None:
    for _ in range(5):  # only one abort is sent if the process is stopped meanwhile
        unfinished, aborted = await leaving(EngineUnavailable("a", "never said"), cut_short_s=2.0)
        assert unfinished.partial is not None
        assert unfinished.partial.tokens.tolist() == [5, 6], "what was there before stays"
        if len(aborted) > 1:
            break
    assert len(aborted) > 1, "said again and again"


async def streamed(
    answers: Sequence[Answer], *, retries: int = 4
) -> tuple[EngineResponse | Exception, list[list[int]], list[Any]]:
    """Stream a response. Returns it or its error, the states as they were streamed, and the continued tokens of each
    request.
    """
    scene, states = Scene({"a": answers}), list[list[int]]()
    async with running_engines(scene) as engines:
        responses = Responses(engines, timeout_s=30.0, retries=retries, activity=Activity())
        prompt = Prompt(name="p", tokens=TASK.prompt_tokens, sampling=Sampling())
        check = accepting(0.0)
        try:
            made: EngineResponse | Exception = await responses.generate(
                prompt, check, grown=lambda response: states.append(response.generation.tokens.tolist())
            )
        except (GenerationFailed, BadRequest) as error:
            made = error
        asked = scene.clients["a"].asked
    return (
        made,
        states,
        [None if options["begun"] is None else options["begun"].tokens.tolist() for _, options in asked],
    )


def accepting(most: float) -> Callable[[EngineResponse], None]:
    """Return a check of log-probs."""

    def check(response: EngineResponse) -> None:
        """Raise WireError for a log-prob above ``most``."""
        if (response.generation.log_probs > most).any():
            raise WireError("log_probs", f"<= {most}", response.generation.log_probs)

    return check


def state(*tokens: int, **changes: Any) -> Generation:
    """Return a response that has not ended."""
    return replace(generation(tokens=tokens, **changes), finish=None)


DIED = EngineGone("a", "connection reset")
FIRST: Answer = (state(5), state(5, 6), DIED)
"""A stream that breaks off behind two tokens."""


@pytest.mark.parametrize(
    "broken",
    [
        EngineFailed("a", "HTTP 500"),
        generation(tokens=(5, 6, 7), log_prob=0.5),
        generation(tokens=(5, 6, 9), log_prob=0.5, finish="abort"),
        (state(5, 6, 9, log_prob=0.5), DIED),
        (EngineFailed("a", "HTTP 500"),),
    ],
)
async def test_a_streamed_response_is_continued_as_often_as_its_retries_allow(broken: Answer) -> None:
    made, states, begun = await streamed([FIRST, broken, broken, (state(5, 6, 7), WHOLE)])
    assert isinstance(made, EngineResponse) and made.generation.tokens.tolist() == [5, 6, 7]
    assert (states, begun) == ([[5], [5, 6], [5, 6, 7]], [None, [5, 6], [5, 6], [5, 6]])
    made, states, begun = await streamed([FIRST, broken, broken, WHOLE], retries=3)
    assert isinstance(made, GenerationFailed) and made.reason.startswith("3 requests broken off, the last one: ")
    assert (states, begun) == ([[5], [5, 6]], [None, [5, 6], [5, 6]])


async def test_a_streamed_response_whose_continuation_is_a_bad_request_fails_at_once() -> None:
    made, _, begun = await streamed([FIRST, BadRequest("input_ids: too long"), WHOLE])
    assert isinstance(
        made, GenerationFailed
    ) and "has been streamed, and it cannot begin anew: input_ids: too long" in str(made)
    assert begun == [None, [5, 6]]
