"""Rows that cannot be used, of every cause: skipped in their place, counted, named; and changed files of a run that has
begun.
"""

import asyncio
import json
import logging
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.check_kit import write_model, write_prompts, write_run
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.errors import WireError
from tidemill.bus.wire.messages import Prompt, Sampling, Task
from tidemill.launch.checks.data import SourceReading
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main as cli
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.learner.buffer.task_admission import TaskDemand
from tidemill.learner.data import DataConfig, Source
from tidemill.learner.errors import ConfigRefused, PromptError
from tidemill.learner.evaluation.evaluations import EvalPrompts
from tidemill.learner.feed.issuing import Curriculum, prompt_for
from tidemill.learner.prompts.prompt_file import PlannedRows, PromptFile
from tidemill.learner.prompts.rows import MAX_LOGGED, BadRows, RowRules, RowTokens, RowTooLong
from tidemill.learner.prompts.tokenizer import PromptTokenizer
from tidemill.rewards.model_text import MessageTemplate

TEMPLATE = MessageTemplate(
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' ~ "
    "m.role) }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}{% endfor %}",
    {},
)


def tokenize(prompt: Prompt) -> Sequence[int]:
    return [ord(letter) for letter in (prompt if isinstance(prompt, str) else TEMPLATE.render(prompt))]


def row(prompt: object, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "label": "1", **more}


def user(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}


BAD: dict[str, Any] = {
    "no JSON": '{"prompt": ',
    "no map": "3",
    "not UTF-8": '{"prompt": "\udcff", "label": "1"}',
    "NaN": '{"prompt": NaN, "label": "1"}',
    "no column": {"prompt": "a"},
    "empty": row(""),
    "a number": row(5),
    "no messages": row([]),
    "half a surrogate pair": row("\ud800"),
    "content 5": row([user(5)]),
    "content true": row([user(True)]),
    "a role that the template rejects": row([user("a", "wizard")]),
    "roles that do not alternate": row([user("a"), user("b")]),
    "too long": row("x" * 99),
    "too long as a chat": row([user("x" * 99)]),
    "a digit of 70 places": row("a", label=10**70),
}
"""Bad rows as values, or as their lines."""
GOOD = [row(f"question {number}") for number in range(10)]


def write(path: Path, rows: Sequence[Any]) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
    return path


def opened(path: Path, policy: str = "skip", **more: Any) -> PromptFile:
    return PromptFile(path, **({"tokenize": tokenize, "max_tokens": 40, "rules": RowRules(policy=policy)} | more))


def drawn(prompts: PromptFile, count: int, epoch: int = 0, offset: int = 0) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(count):
        one = prompts.after(epoch, offset)
        found.append((one.epoch, one.offset, one.row.number))
        epoch, offset = one.epoch, one.offset + 1
    return found


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_row_of_any_cause_is_skipped_in_its_place_counted_and_named(
    tmp_path: Path, bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    whole = opened(write(tmp_path / "whole.jsonl", GOOD), seed=3)
    prompts = opened(write(tmp_path / "p.jsonl", [*GOOD[:4], bad, *GOOD[5:]]), seed=3)
    with caplog.at_level(logging.WARNING):
        assert drawn(prompts, 27) == [one for one in drawn(whole, 30) if one[2] != 4]
    assert len(prompts.bad_rows) == 1 and len(caplog.records) == 1, "each row once, however often it is met"
    assert f"{tmp_path}/p.jsonl:5: want " in caplog.text
    assert prompts.trouble.startswith(
        f"1 of 10 rows left out so far (data.bad_rows), the first: {tmp_path}/p.jsonl:5: want "
    )
    held = EvalPrompts(
        name="held", prompts=opened(tmp_path / "p.jsonl", shuffle=False), sampling=Sampling(), samples=1, passes_at=1.0
    )
    assert held.size().rows == (0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert len(held.prompts.bad_rows) == 1


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_row_of_any_cause_is_refused_before_the_first_prompt_if_wanted(tmp_path: Path, bad: object) -> None:
    file = write(tmp_path / "p.jsonl", [*GOOD[:4], bad, *GOOD[5:]])
    with refusal(PromptError, where=re.compile(r"p\.jsonl:5$")):
        opened(file, "refuse")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("policy", ["skip", "refuse"])
def test_a_file_of_bad_rows_alone_is_an_error_with_any_policy(tmp_path: Path, bad: object, policy: str) -> None:
    file = write(tmp_path / "p.jsonl", [bad, bad])
    with refusal(PromptError, where=re.compile(r"p\.jsonl:1$")):
        opened(file, policy, shuffle=False).after(0, 0)


def test_a_source_without_a_readable_row_is_an_error_beside_others(tmp_path: Path) -> None:
    sources = [
        Source(path=write(tmp_path / "good.jsonl", GOOD)),
        Source(path=write(tmp_path / "bad.jsonl", ["3", "4"])),
    ]
    with refusal(PromptError, where=re.compile(r"bad\.jsonl:1$")):
        PromptFile(sources, tokenize=tokenize, max_tokens=40)
    sources[1] = Source(path=write(tmp_path / "rejected.jsonl", [row([user("a", "wizard")])] * 3), weight=2)
    mixed = PromptFile(sources, tokenize=tokenize, max_tokens=40)
    assert len(drawn(mixed, 20)) == 20 and len(mixed.bad_rows) == 3, (
        "what the template rejects is known when it is rendered"
    )


def test_which_rows_are_skipped_does_not_depend_on_where_a_start_begins(tmp_path: Path) -> None:
    chance = random.Random(5)
    for number in range(20):
        rows = [chance.choice(list(BAD.values())) if chance.random() < 0.4 else row(f"q {at}") for at in range(12)]
        file = write(tmp_path / f"{number}.jsonl", [*rows, row("last")])
        sequence = drawn(opened(file), 40)
        for at in (0, 7, 23):
            epoch, offset, _ = sequence[at]
            assert drawn(opened(file), 40 - at, epoch, offset) == sequence[at:]


def test_blank_lines_are_no_rows_and_keep_the_numbers_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"prompt": "a", "label": 1}\r\n\n   \t\n{"prompt": "b"}\n\n{"prompt": "c", "label": 3}\n\n')
    prompts = opened(file, shuffle=False)
    assert len(prompts) == 3
    assert drawn(prompts, 2) == [(0, 0, 0), (0, 2, 2)]
    assert prompts.trouble.startswith(
        f"1 of 3 rows left out so far (data.bad_rows), the first: {file}:5: want key 'label'"
    )


def test_a_line_beyond_the_bound_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.learner.prompts.formats.LINE_BYTES", 64)
    prompts = opened(write(tmp_path / "p.jsonl", [GOOD[0], row("x" * 200), GOOD[1]]), shuffle=False)
    assert drawn(prompts, 2) == [(0, 0, 0), (0, 2, 2)]
    assert "p.jsonl:2: want a line of at most 64 bytes" in prompts.trouble


def test_a_row_that_no_message_can_carry_is_bad_from_then_on(tmp_path: Path) -> None:
    prompts = opened(write(tmp_path / "p.jsonl", GOOD), shuffle=False)
    prompts.leave_out(0, 2, WireError("task", "at most 9 bytes", 10))
    assert drawn(prompts, 3) == [(0, 0, 0), (0, 1, 1), (0, 3, 3)]
    assert "p.jsonl:3: want a task with task of at most 9 bytes, got 10" in prompts.trouble


def test_a_text_that_cannot_fit_is_too_long_without_being_tokenized(tmp_path: Path) -> None:
    tokenized: list[str] = []

    def encode(text: str, add_special: bool) -> Sequence[int]:
        tokenized.append(text)
        return [ord(letter) for letter in text]

    whole = PromptTokenizer(
        encode, lambda ids: "".join(map(chr, ids)), TEMPLATE, chat=False, template_args={}, longest_token_bytes=3
    )
    long = "ü" * 61  # 122 bytes are more than 40 tokens of 3 bytes
    rows = [row("ä" * 40), row(long), row([user(long)]), row("x" * 99)]
    prompts = opened(write(tmp_path / "p.jsonl", rows), tokenize=whole.bounded(40), shuffle=False)
    assert [prompts.at(0, 0).row.number, prompts.after(0, 1).row.number] == [0, 0]
    assert set(tokenized) == {"ä" * 40, "x" * 99} and len(prompts.bad_rows) == 3
    with pytest.raises(RowTooLong) as refused:
        prompts.at(0, 1)
    assert (refused.value.want, refused.value.got) == ("<= 40 tokens", "a text of 122 bytes")


async def test_a_prompt_is_tokenized_beside_the_event_loop(tmp_path: Path) -> None:
    begun, seen = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(prompt: Prompt) -> Sequence[int]:
        loop.call_soon_threadsafe(begun.set)
        assert seen.wait(LIMIT_S), "the loop does nothing while a prompt is tokenized"
        return [1]

    prompts = opened(write(tmp_path / "p.jsonl", GOOD), tokenize=slow)
    demand = TaskDemand(prompt_epoch=0, offset=3, min_version=0, issue_step=0)
    for again in (demand, replace(demand, reissue_of=1, reissues=1)):
        begun.clear(), seen.clear()
        drawing = asyncio.create_task(prompt_for(again, prompts, Curriculum(DataConfig()), num_epochs=0))
        await begun.wait()
        seen.set()
        assert (drawn := await drawing) is not None and (drawn.epoch, drawn.offset) == (0, 3)


def test_a_policy_is_one_of_two() -> None:
    with refusal(SettingsError, place="--set: data.bad_rows", got="'drop'"):
        load([], ["data.bad_rows=drop"])
    with pytest.raises(PromptError):
        BadRows("refuse").add(0, PromptError("a", "b", "c"))


# ---- the checks

RAISES = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not ' ~ m.content) }}{% endif %}{{ '' "
    "+ m.content }}{% endfor %}"
)


def run_with(tmp_path: Path, rows: Sequence[Any]) -> Path:
    file = write_run(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").write_text(RAISES)
    write(tmp_path / "prompts.jsonl", rows)
    return file


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            row([user("no")]),
            (
                "want a prompt that tokenizer and chat template accept, got messages: rejected by the model's "
                "chat template: not no"
            ),
        ),
        (row([user({"a": 1})]), "want text or text parts"),
        (
            row([user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}])]),
            'want a text part, {"type": "text", "text": ...}, as the model reads text alone in',
        ),
        ({"prompt": "a"}, "want key 'label'"),
        ("{", "want a JSON map"),
        (row("one " * 300), "want <= 240 tokens"),
    ],
)
def test_a_check_names_bad_rows_and_how_much_it_read(
    tmp_path: Path, bad: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_with(tmp_path, [*GOOD, bad, *GOOD])
    sets = f"eval.sets={json.dumps({'held': {'path': str(tmp_path / 'prompts.jsonl')}})}"
    report = check(load(file, [sets, "eval.every=1"]), Purpose())
    assert not report.errors
    for topic, warning in zip(("data", "eval"), report.warnings, strict=True):
        assert warning.topic == topic and f"prompts.jsonl:11: {reason}" in warning.text
        assert "1 of 21 rows read are such; they are skipped (data.bad_rows: skip)" in warning.text
        assert "21 prompts read" in report.on(topic)[-1]
    errors = check(load(file, [sets, "eval.every=1", "data.bad_rows=refuse"]), Purpose()).errors
    assert [error.topic for error in errors] == ["data", "eval"] and all(
        f":11: {reason}" in error.text for error in errors
    )
    write(tmp_path / "prompts.jsonl", [bad] * 2)
    (error,) = check(load(file), Purpose()).errors
    assert f"prompts.jsonl:1: {reason}" in error.text and "2 of 2 rows read are such" in error.text
    write(tmp_path / "prompts.jsonl", [GOOD[0], bad])
    capsys.readouterr()
    assert cli.main(["data", "check", str(file)]) == 78
    assert f"prompts.jsonl:2: {reason}" in capsys.readouterr().out


def test_a_check_of_a_large_file_says_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_with(tmp_path, [*GOOD, "", *GOOD])
    monkeypatch.setattr("tidemill.launch.checks.data.READ_S", 0)
    monkeypatch.setattr("tidemill.launch.checks.data.SURE_ROWS", 5)
    (said,) = check(load(file), Purpose()).on("data")
    assert "the first 5 prompts read of 20 (25 %) (tidemill data check reads all)" in said
    (said,) = check(load(file, [f"data.path={tmp_path}/prompts.jsonl@[0:10]"]), Purpose()).on("data")
    assert "the first 5 prompts read of 10 (50 %)" in said
    monkeypatch.setattr("tidemill.learner.prompts.formats.COUNTED_BYTES", 1)
    (said,) = check(load(file), Purpose()).on("data")
    assert "the first 5 prompts read (tidemill data check reads all)" in said


def test_a_check_says_how_many_rows_it_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_with(tmp_path, [*GOOD, "no JSON"])
    assert "prompts.jsonl: 11 prompts read, of up to " in check(load(file), Purpose()).on("data")[-1], (
        "all that can be read are tokenized"
    )
    reading = SourceReading.of(Source(path=tmp_path / "prompts.jsonl"), RowRules(), ())
    monkeypatch.setattr("tidemill.launch.checks.data.READ_S", 0)
    monkeypatch.setattr("tidemill.launch.checks.data.SURE_ROWS", 4)
    reading.tokenize(RowTokens(tokenize, max_tokens=99))
    assert str(reading) == "11 prompts read, 4 of them tokenized (tidemill data check reads all)"
    reading = SourceReading.of(
        Source(path=write(tmp_path / "bad.jsonl", [row([user("a", "wizard")])] * 20)), RowRules(), ()
    )
    reading.total, reading.tokenized = 20, 0
    reading.tokenize(RowTokens(tokenize, max_tokens=99))
    report = Report()
    reading.report(report, "data", "skip", cure="fix it")
    (finding,) = report.errors
    assert f"{len(reading.rejected)} of {reading.read} rows read are such; fix it" in finding.text, (
        "none of those tokenized can be used"
    )


def test_a_file_of_bad_rows_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadRows()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * MAX_LOGGED):
            bad.add(number, PromptError(f"p.jsonl:{number}", "a", "b"))
    assert len(caplog.records) == MAX_LOGGED + 1 and len(bad) == 3 * MAX_LOGGED
    assert "further bad rows are counted alone" in caplog.records[-1].message


def test_a_model_without_a_template_is_no_fault_of_a_row(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    write_model(tmp_path / "model", chat_template=False)
    write_prompts(tmp_path / "prompts.jsonl", *GOOD, row([user("what")]))
    (error,) = check(load(file), Purpose()).errors
    assert "chat messages, and" in error.text and "has no chat template" in error.text


# ---- files that change during a run


def begun(prompts: PromptFile, count: int) -> PlannedRows:
    """Return the rows of a run that has issued so many prompts."""
    planned, position = PlannedRows(prompts), (0, 0)
    for _ in range(count):
        one = prompts.after(*position)
        planned.note(task_at(prompts, one.epoch, one.offset))
        position = (one.epoch, one.offset + 1)
    return planned


def task_at(prompts: PromptFile, epoch: int, offset: int) -> Task:
    one = prompts.at(epoch, offset)
    values: dict[str, Any] = {
        "run": "r",
        "epoch": 1,
        "group_size": 1,
        "sampling": Sampling(),
        "prompt_tokens": one.tokens,
    }
    return Task(prompt=one.row.prompt, prompt_epoch=epoch, offset=offset, row_digest=one.digest, **values)


Edit = Callable[[list[Any], list[int]], None]
"""Change of the rows; the order of the first pass is the second argument, of which the run has planned the first 6
positions.
"""


def mended(rows: list[Any], order: list[int]) -> None:
    rows[order[2]] = row("mended")


def changed(at: int) -> Edit:
    return lambda rows, order: rows.__setitem__(order[at], row("changed"))


EDITS: dict[str, tuple[Edit, str, str]] = {
    "a skipped row is mended": (mended, "1 of 12 rows differ", "1 of 12 rows differ"),
    "a row to come": (changed(9), "1 of 12 rows differ", "1 of 12 rows differ"),
    "a planned row": (changed(1), "want the row .*as it was when the run planned it", "want the row"),
    "a planned row's label": (
        lambda rows, order: rows[order[1]].__setitem__("label", "2"),
        "want the row",
        "want the row",
    ),
    "a planned row is bad now": (
        lambda rows, order: rows.__setitem__(order[1], "{"),
        "got .a bad row: ",
        "got .a bad row: ",
    ),
    "keys in another order": (
        lambda rows, order: rows.__setitem__(order[1], dict(reversed(rows[order[1]].items()))),
        "are the same",
        "same",
    ),
    "rows are appended": (
        lambda rows, order: rows.extend([row("new")] * 12),
        "got '24 rows in another order",
        "12 rows more",
    ),
    "the last row is gone": (lambda rows, order: rows.pop(), "1 rows fewer", "1 rows fewer"),
    "the first row is gone": (
        lambda rows, order: rows.pop(0),
        "(got '11 rows in another order|want the row)",
        "want the row",
    ),
}
"""Edits, with the outcome with and without data.shuffle. The last row is behind the planned positions with both."""


@pytest.mark.parametrize(("edit", "shuffled", "in_order"), EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_changed_file_is_refused_where_a_planned_row_differs(
    tmp_path: Path, edit: Edit, shuffled: str, in_order: str, shuffle: bool
) -> None:
    file, values = tmp_path / "p.jsonl", {"shuffle": shuffle, "seed": 1}
    rows: list[Any] = [row(f"question {number}") for number in range(12)]
    order = opened(write(file, rows), **values).order(0).tolist()
    rows[order[2]] = row([user(5)])
    before = opened(write(file, rows), **values)
    state = begun(before, 5).dump()
    edit(rows, order)
    after = PlannedRows(opened(write(file, rows), **values))
    want = shuffled if shuffle else in_order
    if want.startswith(("want", "got", "(")):
        with pytest.raises(ConfigRefused, match=rf"data\.path: .*{want}"):
            after.load(state)
    else:
        assert want in after.load(state)
        assert after.dump()["planned"][:1] == state["planned"][:1]


def test_a_task_behind_the_checkpoint_is_compared_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    before = opened(write(file, GOOD), shuffle=False)
    tasks = [task_at(before, 0, offset) for offset in range(4)]
    write(file, [*GOOD[:3], row("other"), *GOOD[4:6]])
    planned = PlannedRows(opened(file, shuffle=False))
    for task in tasks[:3]:
        planned.repeat(task)
    with refusal(ConfigRefused, field="data.path", got="'other'"):
        planned.repeat(tasks[3])
    with refusal(ConfigRefused, field="data.path", got="6 prompts"):
        planned.repeat(task_at(before, 0, 8))


def test_a_second_pass_is_compared_like_the_first(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    state = begun(opened(write(file, GOOD), shuffle=False), 13).dump()
    with refusal(ConfigRefused, field="data.path", got=re.compile("^11 rows")):
        PlannedRows(opened(write(file, [*GOOD, row("new")]), shuffle=True)).load(state)
    assert "1 rows more" in PlannedRows(opened(file, shuffle=False)).load(state)
    with refusal(ConfigRefused, field="data.path", got=re.compile("^9 rows")):
        PlannedRows(opened(write(file, GOOD[:-1]), shuffle=False)).load(state)


def test_rows_of_a_large_file_take_33_bits_each_in_a_checkpoint(tmp_path: Path) -> None:
    state = PlannedRows(opened(write(tmp_path / "p.jsonl", [row("a")] * 800))).dump()
    assert (len(state["digests"]), len(state["planned"])) == (3200, 100)
