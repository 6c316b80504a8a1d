"""No input makes a reward that ships raise anything but RewardFailed, or outlive its limit: inputs drawn by hypothesis.

Texts are those that have broken graders: long repeats, deep and unbalanced brackets, many digits, NULs and odd Unicode,
half a formula. A reward that computes here is measured in processor time of its thread, which no load on the machine
changes. ``math_verify`` and ``regex``, which have no bound of their own, run in child processes with their limit. Of
``judge``, ``remote`` and ``reward_model``, answers of the server are drawn.
"""

import asyncio
import gc
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import THOROUGH, examples, rarely
from tests.unit.test_rewards_house import IFEVAL, LANGUAGE, OPTIONS
from tests.unit.test_rewards_ifbench import CASES
from tests.web_server import web_server
from tidemill.bus.system.limits import ProcessLimits
from tidemill.bus.wire.messages import Status
from tidemill.rewards import group
from tidemill.rewards.builtin import ifbench
from tidemill.rewards.builtin.code import cases_in, program_in, same_output, same_value
from tidemill.rewards.builtin.ifeval import INSTRUCTIONS, follows
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import ASKING, TABLE, bind, checked
from tidemill.rewards.scorers import opened

IN_CHILDREN = {"math_verify", "regex"}
"""Rewards without a bound of their own: a formula or a pattern may take any time."""
HERE = sorted(TABLE.keys() - ASKING - IN_CHILDREN - {"code", "ifeval"})
LIMIT_S = ProcessLimits().timeout_s
"""Seconds that a call may take; one that runs in the event loop takes less than a thousandth of it."""
IN_LOOP_S = 4.0
"""Seconds of processor time for a text of ``MOST`` characters: forty times the usual; a square of the length takes
more.
"""
MOST = 50_000

# ---- texts

NESTED = [
    ("{", "}"),
    ("(", ")"),
    ("[", "]"),
    ("\\boxed{", "}"),
    ("\\frac{", "}"),
    ("\\sqrt{", "}"),
    ("\\text{", "}"),
    ("\\left(", "\\right)"),
    ("<think>", "</think>"),
]
LATEX = r"\boxed{ \frac{ \sqrt[ \text{ \left( } { ( ) [ ] , ^ _ - + * / = ! $ % \ "
MARKS = "# #### Answer: </think> <answer> </answer> *** ****** << >> ``` ###Response 0 9 1, 1/ 1e . x a \" ' \\n"
ODD = "\x00 \ufeff \u202e \u0301 \u0660 \U0001f600 \u732b \u1e9e \u0130 \ud800 \N{MINUS SIGN}"
SPACED = [
    "A ",
    ". ",
    "J. ",
    "? ",
    "! ",
    "- ",
    "* ",
    "\n",
    "\t",
    " ",
    "\u2028",
    "The answer is (",
    "```python\n",
    "Question 1. ",
]
PIECES = [*" ".join((LATEX, MARKS, ODD)).split(), *SPACED]
REPEATED = st.builds(
    lambda piece, length: (piece * length)[:length], st.sampled_from(PIECES), st.sampled_from([1, 100, MOST, MOST])
)
BRACKETED = st.builds(
    lambda pair, depth, inside, lack: pair[0] * depth + inside + pair[1] * max(0, depth - lack),
    st.sampled_from(NESTED),
    st.sampled_from([1, 5, 40, 200, 2_000]), st.sampled_from(["", "1", "x^2", "\x00"]), st.sampled_from([0, 1, 10_000]),
)  # fmt: skip
DIGITS = st.builds(
    lambda sign, digits, length, tail: sign + digits * length + tail,
    st.sampled_from(["", "-", "$", "0.", "1e", "1/", "9^", "2^{"]), st.sampled_from("019"), st.sampled_from([1, 12,
        400, 5_000]),
    st.sampled_from(["", ".", "%", "!", "/0", "e9", "^9", "}", ",000"]),
)  # fmt: skip
MIXED = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join)
PLACED = st.sampled_from(
    [
        "{}",
        "</think>\\boxed{{{}}}",
        "Answer: {}",
        "#### {}",
        "The answer is ({}).",
        "\\boxed{{{}",
        "<think>a</think><answer>{}</answer>",
    ]
)
TEXTS = st.builds(
    lambda place, text: place.format(text), PLACED, REPEATED | BRACKETED | DIGITS | MIXED | st.text(max_size=80)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**400) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
LABELS = TEXTS | JSON


def asked(response: str, label: Any = None, *, length: int = 0, **metadata: Any) -> RewardRequest:
    return RewardRequest(
        prompt="p", response=response, label=label, status=Status.COMPLETED, metadata=metadata, sampled_length=length
    )


def number_or_refusal(name: str, score: Callable[[], Any]) -> None:
    """Call a reward: it returns numbers, or raises RewardFailed, which has words."""
    try:
        checked(name, score())
    except RewardFailed as error:
        assert str(error).isprintable() or error.reason


@contextmanager
def within(seconds: float, what: object) -> Iterator[None]:
    """Fail where the body takes more processor time of this thread, without that of collecting the garbage of all tests
    before.
    """
    gc.disable()
    begin = time.thread_time()
    try:
        yield
        took = time.thread_time() - begin
    finally:
        gc.enable()
    assert took < seconds, f"{took:.1f} s for {what!r:.300}"


# ---- rewards that compute


@pytest.mark.parametrize("name", HERE)
@settings(max_examples=examples(80))
@given(
    TEXTS,
    LABELS,
    st.integers(0, 10**9),
    st.dictionaries(st.sampled_from(["choices", "valid_letters", "correct_letter"]), JSON),
)
def test_any_input_gets_numbers_or_a_refusal_in_time(
    name: str, response: str, label: Any, length: int, metadata: dict[str, Any]
) -> None:
    reward = bind(name, OPTIONS.get(name))
    with within(IN_LOOP_S, (response, label)):
        number_or_refusal(name, lambda: reward(asked(response, label, length=length, **metadata)))


@pytest.mark.parametrize("name", HERE)
def test_each_long_repeat_gets_numbers_or_a_refusal_in_time(name: str) -> None:
    """Draws hit few of these."""
    reward = bind(name, OPTIONS.get(name))
    for piece in PIECES:
        text = (piece * MOST)[:MOST]
        for response in (text, f"</think>\\boxed{{{text}}}"):
            with within(IN_LOOP_S, (name, piece)):
                number_or_refusal(name, lambda response=response: reward(asked(response, "A", length=7)))  # type: ignore[misc]


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.floats(-1e6, 1e6) | st.dictionaries(st.text(max_size=5), st.floats(-10, 10), min_size=1),
        ),
        min_size=1,
    )
)
def test_any_group_gets_a_number_for_each_sample(samples: list[tuple[int, Any]]) -> None:
    request = group.GroupRequest(
        samples=tuple(asked("", length=length) for length, _ in samples), rewards=tuple(one for _, one in samples)
    )
    found = bind("relative_length", {}, group.GROUP)(request)
    assert len(found) == len(samples) and all({"score", "reward", "length"} == one.keys() for one in found)


# ---- instructions

ROWS = {name: own for name, own, *_ in [*IFEVAL, *CASES] if name != LANGUAGE or find_spec("langdetect") is not None}
"""Arguments by instruction."""
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-3, 60) | st.sampled_from([10**30, -(10**30)]),
    float: st.floats(),
    str: st.sampled_from(
        [
            "a",
            "",
            "at least",
            "less than",
            "de",
            "en",
            ".*(",
            "\\",
            "\x00",
            "a b",
            "A/B/C",
            "yes or no",
            "aeiou" * 2_000,
        ]
    )
    | TEXTS,
    list: st.lists(TEXTS, max_size=3),
}


def arguments_of(own: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draw arguments of an instruction: of their own type, of any, or no map at all."""
    each = {key: VALUES[type(value)] for key, value in own.items()}
    return (
        st.fixed_dictionaries(each)
        | st.fixed_dictionaries({}, optional={key: one | JSON for key, one in each.items()})
        | JSON
    )


def test_every_instruction_is_drawn() -> None:
    assert ROWS.keys() >= (INSTRUCTIONS.keys() | ifbench.INSTRUCTIONS.keys()) - {LANGUAGE}


@pytest.mark.parametrize("name", sorted(ROWS))
@settings(max_examples=examples(40))
@given(st.data(), TEXTS)
def test_any_response_and_arguments_get_a_verdict_or_a_refusal_in_time(
    name: str, data: st.DataObject, response: str
) -> None:
    own = data.draw(arguments_of(ROWS[name]))
    with within(IN_LOOP_S, (name, own, response)):
        try:
            assert follows(name, own, response) in (True, False)
        except RewardFailed as error:
            assert name in str(error)


@settings(max_examples=examples(150))
@given(JSON, JSON, TEXTS)
def test_any_metadata_of_ifeval_is_read_or_refused(names: Any, arguments: Any, response: str) -> None:
    rules = {"instruction_id_list": names, "kwargs": arguments}
    for label in (rules, {**rules, "instruction_id_list": ["format:list"], "kwargs": [arguments]}):
        number_or_refusal("ifeval", lambda label=label: bind("ifeval")(asked(response, label)))  # type: ignore[misc]


# ---- code

PROGRAMS = r"""
print(1) | print(input()) | x = [0] * 10**9 | while True: pass | import os | os._exit(0) | raise SystemExit(3)
def f(*a): return a
open('/tmp/x', 'w') | import socket; socket.socket() | os.fork() | f'{ | print('\ud800') | print('9' * 10**7)
def f(x): return f(x) | assert False | ```
def f(x): return float('nan') | import sys; sys.setrecursionlimit(10**9)
"""
LINES = [one for line in PROGRAMS.strip().splitlines() for one in line.split(" | ")]
STATEMENTS = st.lists(st.sampled_from([*LINES, "(" * 300, "\x00", "  ", "\u732b = 1"]), max_size=4).map("\n".join)
CASES_OF_CODE = st.fixed_dictionaries(
    {"inputs": st.lists(JSON, max_size=2), "outputs": st.lists(JSON, max_size=2)},
    optional={"fn_name": st.just("f") | JSON},
)


@settings(max_examples=examples(300))
@given(
    TEXTS,
    LABELS
    | CASES_OF_CODE
    | CASES_OF_CODE.map(json.dumps)
    | st.lists(st.fixed_dictionaries({"input": JSON, "output": JSON}), max_size=2),
    TEXTS,
)
def test_any_program_and_tests_are_read_or_refused_in_time(response: str, label: Any, output: str) -> None:
    with within(IN_LOOP_S, (response, label)):
        for text in (response, f"```python\n{response}\n```", f"```{response}"):
            assert isinstance(program_in(text), str) and isinstance(program_in(text, whole=True), str)
        try:
            assert cases_in(label)
        except RewardFailed as error:
            assert "label: want" in str(error)
        assert same_output(response, output) in (True, False)
        assert same_value(label, output) in (True, False) and same_value(label, label) in (True, False)


@settings(max_examples=examples(50))
@given(STATEMENTS, st.sampled_from(["assert f(1)", "print(2", "\x00", "import time"]) | CASES_OF_CODE)
def test_any_program_that_is_run_ends_with_a_score_within_its_processor_time(program: str, label: Any) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    number_or_refusal(
        "code", lambda: bind("code", {"seconds": 1.0, "max_tests": 1})(asked(f"```python\n{program}\n```", label))
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime < 10


# ---- rewards in child processes

TIMEOUT_S = 0.3
"""Limit of one call there; a call that hangs costs the test so much."""
DRAWN_S = 30.0
"""Seconds in which requests are drawn: where each ends a child, a slow machine starts few of them."""
HARD = [
    "9^{9^{9^{9}}}",
    "((((((1+x)^{99})^{99})^{99})",
    "\\int_0^{\\infty} x^{x^x} dx",
    "\\sum_{n=1}^{10^{9}} n",
    "100000!!!",
    "x^{y^{z^{w}}}=w^{z^{y^{x}}}",
]
PATTERNS = [
    "(a+)+b",
    "[",
    *rarely(["(?P<n>.)", "(a|a)*$", "(.*)*x", "(?:a?){30}a{30}", "\\d+", "", "(?=(a+))a*b\\1", "\x00", "(x+x+)+y"]),
]


async def drawn(score: Callable[[RewardRequest], Any], name: str, given_here: Callable[..., Any], most: int) -> None:
    """Draw requests in a thread, and score each in this loop: numbers, a refusal, or no result within the limit.

    At least one is scored, and none that is drawn later than ``DRAWN_S``.
    """
    loop, until = asyncio.get_running_loop(), time.monotonic() + DRAWN_S
    scored: list[RewardRequest] = []

    @settings(max_examples=most)
    @given_here
    def one(request: RewardRequest) -> None:
        if scored and time.monotonic() > until:
            return
        scored.append(request)
        try:
            found = asyncio.run_coroutine_threadsafe(score(request), loop).result(timeout=10 * LIMIT_S)
        except (RewardFailed, TimeoutError):
            return
        number_or_refusal(name, lambda: found)

    await asyncio.to_thread(one)


async def test_any_answer_to_math_verify_gets_a_number_a_refusal_or_the_end_of_its_time() -> None:
    some = st.sampled_from(HARD) | TEXTS
    async with opened("math_verify", {}, ProcessLimits(timeout_s=TIMEOUT_S, workers=1)) as score:
        await drawn(score, "math_verify", given(st.builds(asked, some, some | JSON)), 20)


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_any_pattern_gets_a_number_a_refusal_or_the_end_of_its_time(pattern: str) -> None:
    some = REPEATED | MIXED | st.sampled_from(["a" * 40, "a" * 30 + "b", "x" * 40])
    async with opened("regex", {"pattern": pattern}, ProcessLimits(timeout_s=TIMEOUT_S, workers=1)) as score:
        await drawn(score, "regex", given(st.builds(asked, some, st.none())), 8)


# ---- answers of servers

TARGETS = {"judge": {"model": "m"}, "remote": {}, "reward_model": {}}
LIKELY = st.one_of(
    st.builds(
        lambda text: {"choices": [{"message": {"content": text}}]}, JSON | st.builds("Score: {}".format, JSON | DIGITS)
    ),
    st.builds(lambda numbers: {"embedding": numbers}, st.lists(JSON, max_size=2) | JSON),
    st.builds(
        lambda key, value: {key: value},
        st.sampled_from(["reward", "failed", "score"]),
        JSON | st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    ),
)
HUGE = "9" * 400
NASTY = [
    "[" * 100_000,
    '{"a":' * 50_000,
    "",
    "NaN",
    "-Infinity",
    HUGE,
    "9" * 5_000,
    '"\\ud800"',
    "\xff",
    "1 2",
    "{} {}",
    '{"reward": {"a": {"b": 1}}}',
]
NASTY += [
    word % number
    for word in ('{"reward": %s}', '{"embedding": [%s]}', '{"score": %s}')
    for number in ("NaN", "1e999", HUGE, "-" + HUGE, "true", "null")
]
NASTY += [
    json.dumps({"choices": [{"message": {"content": f"Score: {word}"}}]})
    for word in ("nan", HUGE, "-1", "\u0661", "10.0000001", "5" * 100_000)
]
BODIES = st.one_of(
    st.sampled_from(NASTY).map(str.encode),
    st.binary(max_size=40),
    TEXTS.map(lambda text: text.encode(errors="replace")),
    (JSON | LIKELY).map(lambda one: json.dumps(one).encode()),
)
STATUSES = st.sampled_from([200] * 30 + [201, 204, 302, 400, 404, 418, 429, 500, 503, 599])


@asynccontextmanager
async def answering() -> AsyncIterator[tuple[str, list[tuple[int, bytes]]]]:
    """Serve the last of a list of (status, body), which the test appends to; yields the URL and the list."""
    answers: list[tuple[int, bytes]] = []

    async def handle(http: web.Request) -> web.Response:
        await http.read()
        status, body = answers[-1]
        return web.Response(status=status, body=b"" if status == 204 else body)

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with web_server(application) as url:
        yield f"{url}/v1", answers


def test_every_reward_that_asks_a_server_is_drawn() -> None:
    assert TARGETS.keys() == ASKING


@pytest.mark.parametrize("name", TARGETS)
async def test_any_answer_of_a_server_is_a_number_or_a_failure_with_a_reason(name: str) -> None:
    loop = asyncio.get_running_loop()
    async with answering() as (url, answers):

        async def ask() -> Any:
            """Ask once with a new client, which has counted no failures of the server."""
            made = bind(name, {"url": url, "retries": 0, "timeout_s": LIMIT_S, **TARGETS[name]}).function
            try:
                return checked(name, await made(asked("r", {"gold": 1})))
            finally:
                await made._calls.close()

        @settings(max_examples=100 if THOROUGH else 10)
        @given(STATUSES, BODIES)
        def one(status: int, body: bytes) -> None:
            answers.append((status, body))
            try:
                found = asyncio.run_coroutine_threadsafe(ask(), loop).result(timeout=10 * LIMIT_S)
            except RewardFailed as error:
                assert error.reason and error.reward.partition(".")[0] == name
                return
            assert all(isinstance(number, float) for number in (found.values() if isinstance(found, dict) else [found]))

        await asyncio.to_thread(one)
