"""Columns of sampling and reward: reading, refusal, and their values in tasks."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests import data_kit
from tests.check_kit import write_model, write_prompts, write_run
from tests.feeder_kit import task_settings
from tests.refusals import refusal
from tidemill.bus.config import BusConfig
from tidemill.bus.section import ShortNamed
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.checks.rows import row_check
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.run import feeder_process
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.buffer.groups import mismatch
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.task_admission import TaskDemand
from tidemill.learner.data import DataConfig
from tidemill.learner.errors import PromptError
from tidemill.learner.evaluation.config import EvalConfig, EvalSet
from tidemill.learner.evaluation.evaluations import EvalPrompts
from tidemill.learner.evaluation.rounds import Place, Rounds
from tidemill.learner.feed.issuing import task_of
from tidemill.learner.prompts.prompt_file import PromptFile, prompts_digest
from tidemill.learner.prompts.rows import RowSampling, scan_rows
from tidemill.learner.prompts.tokenizer import PromptTokenizer

RUN = Sampling(temperature=0.7, max_new_tokens=64, stop=("###",))
PARTS = (
    "actor.reward_parts={sums: {reward: exact, when: {reward: sums}}, any: {reward: exact, weight: 0, when: "
    "{reward: words}}}"
)
"""Rewards for rows of two names."""


def opened(data: DataConfig) -> PromptFile:
    return PromptFile(
        data.used,
        tokenize=lambda prompt: [1, 2],
        max_tokens=100,
        shuffle=data.shuffle,
        seed=data.seed,
        chat_template_args=data.chat_template_args,
    )


def rounds_of(held: EvalPrompts) -> Rounds:
    config = EvalConfig(every=1, sets=ShortNamed({"a": EvalSet(path="a.jsonl")}), max_open_tasks=9)
    return Rounds([held.size()], config, last_step=1)


def found(file: Path, **settings: Any) -> list[Any]:
    (source,) = DataConfig(path=str(file), **settings).used
    return list(scan_rows(source))


def row(**columns: object) -> dict[str, object]:
    return {"prompt": "what is one", "label": "1"} | columns


def issued_task(prompts: PromptFile, offset: int, budgets: Mapping[str, Budget] | None = None, **again: Any) -> Any:
    """Return the task of a row, as the feeder issues it."""
    settings = task_settings(sampling=RUN, budgets=budgets or {})
    demand = TaskDemand(prompt_epoch=0, offset=offset, min_version=0, issue_step=0, **again)
    return task_of(demand, prompts.at(0, offset) if again else prompts.after(0, offset), settings, seed=0, epoch=1)


def test_a_task_has_the_sampling_of_its_row_and_its_samples_are_held_to_it(tmp_path: Path) -> None:
    own = {"max_new_tokens": 8, "stop": "\n", "stop_token_ids": [3]}
    file = write_prompts(
        tmp_path / "a.jsonl",
        row(s=own),
        row(s=None),
        row(s={"max_new_tokens": 9}),
        row(s={"stop": [], "temperature": 1}),
    )
    prompts = opened(DataConfig(path=str(file), sampling_key="s", shuffle=False))

    def task(offset: int, **again: Any) -> Any:
        return issued_task(prompts, offset, **again)

    sampling = [task(offset).sampling for offset in range(4)]
    assert [one.temperature for one in sampling] == [0.7, 0.7, 0.7, 1.0] and None not in [one.seed for one in sampling]
    assert [one.max_new_tokens for one in sampling] == [8, 64, 9, 64]
    assert [one.stop for one in sampling] == [("\n",), ("###",), ("###",), ()]
    assert [one.stop_token_ids for one in sampling] == [(3,), (), (), ()]
    again = task(0, reissue_of=1, reissues=1)
    assert (again.sampling.max_new_tokens, again.sampling.stop) == (8, ("\n",)), (
        "a prompt that is issued again has them, too"
    )
    issued = replace(task(0), id=1)
    assert mismatch(issued, index_of(1, data_kit.sample(issued, 0)), 0) == ""
    assert mismatch(issued, index_of(1, data_kit.sample(issued, 0, sampling=task(1).sampling)), 0) == "sampling", (
        "that of the run"
    )


def test_evaluation_rows_have_their_own_limits(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row(s={"max_new_tokens": 8, "temperature": 0.5}), row(s=None))
    one = EvalPrompts(
        name="held",
        prompts=opened(DataConfig(path=str(file), sampling_key="s", shuffle=False)),
        sampling=Sampling(temperature=0, top_p=0.9, max_new_tokens=32),
        samples=1,
        passes_at=1.0,
    )
    rounds = rounds_of(one)
    rounds.published(0, 0)
    place = rounds.wanted()
    assert place is not None
    first = one.task(place, rounds, run="r", epoch=1, seed=0, step=0).sampling
    assert (first.max_new_tokens, first.temperature, first.top_p) == (8, 0, 0.9)


def test_rows_name_their_rollouts(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row(r="b"), row(r=None), row(r="single_turn"))
    prompts = opened(DataConfig(path=str(file), rollout="a", rollout_key="r", shuffle=False))
    assert [prompts.row(number).rollout for number in range(3)] == ["b", "a", ""]
    budgets = {"a": Budget(turns=1), "b": Budget(turns=2)}
    made = [issued_task(prompts, offset, budgets) for offset in range(3)]
    assert [(each.rollout, each.budget) for each in made] == [
        ("b", Budget(turns=2)),
        ("a", Budget(turns=1)),
        ("", None),
    ]
    held = EvalPrompts(
        name="held", prompts=prompts, sampling=Sampling(max_new_tokens=4), samples=1, passes_at=1.0, budgets=budgets
    )
    rounds = rounds_of(held)
    rounds.published(0, 0)
    place = rounds.wanted()
    assert place is not None
    asked = held.task(place, rounds, run="r", epoch=1, seed=0, step=0)
    assert (asked.rollout, asked.budget) == ("b", Budget(turns=2))
    assert replace(held, budgets={**budgets, "b": Budget(turns=3)}).size().identity != held.size().identity


def test_tasks_with_a_rollout_have_the_arguments_of_the_chat_template(tmp_path: Path) -> None:
    data = DataConfig(
        path=str(write_prompts(tmp_path / "a.jsonl", row(r="a"), row(r=None))), rollout_key="r", shuffle=False
    )
    quick = opened(replace(data, chat_template_args={"enable_thinking": False}))
    assert [issued_task(quick, offset).chat_template_args for offset in range(2)] == [{"enable_thinking": False}, None]
    assert issued_task(opened(data), 0).chat_template_args is None
    held = EvalPrompts(
        name="held",
        prompts=quick,
        sampling=Sampling(max_new_tokens=4),
        samples=1,
        passes_at=1.0,
        budgets={"a": Budget()},
    )
    asked = held.task(Place(version=0, set="held", row=0), rounds_of(held), run="r", epoch=1, seed=0, step=0)
    assert asked.chat_template_args == {"enable_thinking": False}
    assert replace(held, prompts=opened(data)).size().identity != held.size().identity


def test_a_row_with_an_unknown_rollout_is_named(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row(r="b"), row(r="c"))
    prompts = opened(DataConfig(path=str(file), rollout_key="r", shuffle=False))
    config = RunConfig(rollouts={"b": {"use": "agent:m:B"}}, bus=BusConfig(rollouts=("b",)))
    with refusal(PromptError, where=re.compile(r"a\.jsonl:2$"), got="'c'"):
        row_check(config, max_new_tokens=8, vocab_size=None)(prompts.row(1))
    row_check(config, max_new_tokens=8, vocab_size=None)(prompts.row(0))
    write_prompts(file, row(r=7))
    with refusal(PromptError, where=re.compile(r"a\.jsonl:1$")):
        opened(DataConfig(path=str(file), rollout_key="r"))


def test_a_row_without_a_task_of_its_rollouts_taskset_is_named(tmp_path: Path) -> None:
    tasks: list[dict[str, Any]] = [{"verifiers": {"taskset": "sums"}}, {"verifiers": {"taskset": "games"}}, {}]
    rows = [row(r="v", m=tasks[0]), row(r="b", m={}), row(r="v", m=tasks[1]), row(r="v", m=tasks[2])]
    rollouts = {"b": {"use": "agent:m:B"}, "v": {"use": "verifiers:sums"}}
    config = RunConfig(rollouts=rollouts, bus=BusConfig(rollouts=("b", "v")))
    prompts = opened(
        DataConfig(
            path=str(write_prompts(tmp_path / "a.jsonl", *rows)), rollout_key="r", metadata_key="m", shuffle=False
        )
    )
    check = row_check(config, max_new_tokens=8, vocab_size=None)
    check(prompts.row(0))
    check(prompts.row(1))
    for at, got in ((2, "one of games"), (3, "no task in metadata.verifiers")):
        with refusal(PromptError, where=re.compile(rf"a\.jsonl:{at + 1}$"), got=got):
            check(prompts.row(at))


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (7, "want a map or null in 's', got a number"),
        (
            {"temperature": 0},
            "want a number from 0.01 to 100 in 's.temperature' (of 0 there is no distribution to correct for), got 0",
        ),
        ({"temperature": -0.5}, "'s.temperature' (of 0 there is no distribution to correct for), got -0.5"),
        ({"temperature": float("nan")}, "NaN is not JSON"),
        ({"temperature": 101}, "'s.temperature'"),
        ({"temperature": True}, "'s.temperature'"),
        ({"temperature": "0.5"}, "'s.temperature'"),
        ({"top_p": 0.5}, "top_p is the same for all rows of a run"),
        ({"top_k": 5}, "top_k is the same for all rows of a run"),
        ({"max_tokens": 5}, "want temperature, max_new_tokens, stop or stop_token_ids in 's', got 'max_tokens'"),
        ({"max_new_tokens": 0}, "want a whole number >= 1 in 's.max_new_tokens', got 0"),
        ({"max_new_tokens": True}, "want a whole number >= 1 in 's.max_new_tokens', got True"),
        ({"max_new_tokens": 2.5}, "'s.max_new_tokens', got 2.5"),
        ({"stop": [""]}, "want at most 16 texts of 1 to 200 letters in 's.stop'"),
        ({"stop": ["a"] * 17}, "'s.stop'"),
        ({"stop": {"a": 1}}, "'s.stop'"),
        ({"stop": "\ud800"}, "want Unicode text"),
        ({"stop_token_ids": [-1]}, "'s.stop_token_ids'"),
        ({"stop_token_ids": [2**31]}, "'s.stop_token_ids'"),
        ({"stop_token_ids": ["a"]}, "'s.stop_token_ids'"),
    ],
)
def test_wrong_limits_are_refused_by_line(tmp_path: Path, sampling: object, complaint: str) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row(s=None), row(s=sampling), row(s={"max_new_tokens": 5}))
    first, bad, last = found(file, sampling_key="s")
    assert isinstance(bad, PromptError) and str(bad).startswith(f"{file}:2: ") and complaint in str(bad)
    assert (first.sampling, last.sampling) == (RowSampling(), RowSampling(max_new_tokens=5))


def test_a_row_that_a_program_answers_has_a_temperature_and_no_limits(tmp_path: Path) -> None:
    rows = [
        row(s=own, r=rollout)
        for own, rollout in (
            ({"temperature": 0.5}, None),
            ({"max_new_tokens": 5}, None),
            ({"stop": "x"}, "single_turn"),
        )
    ]
    file = write_prompts(tmp_path / "a.jsonl", *rows)
    warm, bad, single = found(file, sampling_key="s", rollout="agent", rollout_key="r")
    assert (warm.sampling, single.sampling) == (RowSampling(temperature=0.5), RowSampling(stop=("x",)))
    assert isinstance(
        bad, PromptError
    ) and "want temperature alone in 's': the row is answered by rollout agent" in str(bad)


def test_columns_that_are_named_must_be_there(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row())
    for key in ("sampling_key", "reward_key", "tools_key"):
        (bad,) = found(file, **{key: "own"})
        assert isinstance(bad, PromptError) and f"want key 'own' (data.{key})" in str(bad)


def test_keys_of_parquet_that_a_row_does_not_set_are_null(tmp_path: Path) -> None:
    rows = [
        row(s={"max_new_tokens": 5, "stop": None}, r="sums"),
        row(s={"max_new_tokens": None, "stop": ["a"], "temperature": None}, r=None),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, two = found(tmp_path / "a.parquet", sampling_key="s", reward_key="r")
    assert (one.sampling, two.sampling) == (RowSampling(max_new_tokens=5), RowSampling(stop=("a",)))
    assert (one.metadata, two.metadata) == ({"reward": "sums"}, {})


def test_a_row_names_its_reward_in_its_metadata_before_its_source_does(tmp_path: Path) -> None:
    file = write_prompts(
        tmp_path / "a.jsonl",
        row(r="words", m={"a": 1}),
        row(r=None, m={}),
        row(r="sums", m={"reward": "words"}),
        row(r=5, m={}),
    )
    one, two, three, four = found(file, reward="sums", reward_key="r", metadata_key="m")
    assert (one.metadata, two.metadata) == ({"a": 1, "reward": "words"}, {"reward": "sums"})
    assert isinstance(three, PromptError) and "want one value of 'reward', 'sums', got 'words' in its metadata" in str(
        three
    )
    assert isinstance(four, PromptError) and "want the name of a reward, or null, in 'r', got 5" in str(four)
    assert all("reward" not in one.metadata for one in found(file))


def test_sources_and_sets_have_columns_and_rewards_of_their_own() -> None:
    data = DataConfig(
        sources={"a": {"path": "a.jsonl", "reward": "sums"}, "b": {"path": "b.jsonl", "sampling_key": ""}},
        sampling_key="s",
    )
    assert [(one.reward, one.sampling_key) for one in data.used] == [("sums", "s"), ("", "")]
    (held,) = EvalConfig(sets={"held": {"path": "c.jsonl", "reward": "words"}}).sets.values()
    (source,) = held.data(data).used
    assert (source.reward, source.sampling_key) == ("words", "s")


def test_another_column_is_another_digest_and_none_is_that_of_before(tmp_path: Path) -> None:
    file = str(write_prompts(tmp_path / "a.jsonl", row()))

    def digest(**settings: Any) -> str:
        return prompts_digest(DataConfig(path=file, **settings).used, shuffle=True, seed=0)

    settings: list[dict[str, str]] = [
        {},
        {"reward": "a"},
        {"reward": "b"},
        {"reward_key": "a"},
        {"sampling_key": "a"},
        {"tools_key": "a"},
    ]
    settings += [{"system_prompt": "x"}, {"system_prompt": "x", "reward": "a"}]
    assert len({digest(**one) for one in settings}) == len(settings)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}


def test_tools_reach_the_tokenizer_and_the_metadata_and_may_be_json_text(tmp_path: Path) -> None:
    file = write_prompts(
        tmp_path / "a.jsonl", row(t=[TOOL]), row(t=json.dumps([{"name": "add"}])), row(t=None), row(t=[])
    )
    data = DataConfig(path=str(file), tools_key="t", shuffle=False)
    prompts = PromptFile(
        data.used, tokenize=lambda prompt, tools=(): [7] * (1 + len(tools)), max_tokens=100, shuffle=False
    )
    drawn = [prompts.at(0, offset) for offset in range(4)]
    assert [len(one.tokens) for one in drawn] == [2, 2, 1, 1]
    assert [one.row.metadata for one in drawn] == [
        {"tools": [TOOL]},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        {},
        {},
    ]


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("[", "want a list of tools, or one as JSON text, in 't', got '['"),
        ("[" * 100_000, "want a list of tools, or one as JSON text"),
        ("7", "want a list of at most 128 tools, or one as JSON text, in 't', got a number"),
        ({"name": "add"}, "got a map"),
        ([TOOL] * 129, "got 129 tools"),
        (["add"], "want tools with a name, or with function.name, in 't', got 'add'"),
        ([{"function": "add"}], "want tools with a name"),
        ([{"name": ""}], "want tools with a name"),
        ('[{"name": "add", "x": NaN}]', "want finite numbers in 't.x'"),
    ],
)
def test_wrong_tools_are_refused_by_line(tmp_path: Path, tools: object, complaint: str) -> None:
    file = write_prompts(tmp_path / "a.jsonl", row(t=None), row(t=tools))
    good, bad = found(file, tools_key="t")
    assert isinstance(bad, PromptError) and str(bad).startswith(f"{file}:2: ") and complaint in str(bad)
    assert not isinstance(good, PromptError)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "tools: the model's chat template writes none"),
        (None, "tools, and"),
        ("{% for t in tools %}one {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}", ""),
    ],
)
def test_tools_that_the_model_would_not_be_told_are_found_before_the_start(
    tmp_path: Path, template: str | None, complaint: str
) -> None:
    config = write_run(tmp_path)
    write_model(tmp_path / "model", chat_template=False)
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    write_prompts(tmp_path / "prompts.jsonl", row(t=[TOOL]))
    report = check(load(config, ["data.tools_key=t"]), Purpose())
    assert [error.topic for error in report.errors] == (["data"] if complaint else [])
    assert all(complaint in error.text for error in report.errors)


GAMES = """
from tidemill.actors.episodes.programs.multi_turn import MultiTurn


class ChatGame(MultiTurn):
    def __init__(self):
        super().__init__(tools=["calculator"])


class TextGame(MultiTurn):
    def __init__(self):
        super().__init__(tools=["calculator"], protocol="text")


def plain(data, base_url, api_key):
    return 1.0


class Refuses(MultiTurn):
    def __init__(self):
        raise RuntimeError("no room")
"""
SHOWS_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("trains", [True, False], ids=["up", "eval"])
@pytest.mark.parametrize(
    ("template", "options", "complaint"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {},
            "rollouts.r.options.tools: want a chat template that writes tools",
        ),
        (None, {"protocol": "chat"}, "rollouts.r.options.tools: want a chat template that writes tools"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {"protocol": "text"}, ""),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {"tools": []}, ""),
        (SHOWS_TOOLS, {}, ""),
    ],
)
def test_tools_of_a_rollout_that_the_template_leaves_out_are_found_before_the_start(
    tmp_path: Path, template: str | None, options: dict[str, Any], complaint: str, trains: bool
) -> None:
    config = write_run(tmp_path)
    write_model(tmp_path / "model", chat_template=False)
    if template is not None:
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
    write_prompts(tmp_path / "prompts.jsonl", row())
    rollout = {"use": "multi_turn", "options": {"tools": ["calculator"], **options}}
    report = check(load(config, [f"rollouts={json.dumps({'r': rollout})}", "data.rollout=r"]), Purpose(trains=trains))
    assert [complaint in error.text for error in report.errors if error.topic == "rollouts"] == (
        [True] if complaint else []
    )


@pytest.mark.parametrize(
    ("program", "template", "complains"),
    [
        ("ChatGame", "{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("ChatGame", SHOWS_TOOLS, False),
        ("TextGame", "{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("plain", "{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("Refuses", "{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_tools_of_a_program_that_the_template_leaves_out_are_found_before_the_start(
    tmp_path: Path, program: str, template: str, complains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ChatGame`` is a ``MultiTurn`` with tools of its own; a program that cannot be loaded is no matter of its
    tools.
    """
    config = write_run(tmp_path)
    write_model(tmp_path / "model", chat_template=False)
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    (tmp_path / "chat_games.py").write_text(GAMES)
    monkeypatch.syspath_prepend(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", row())
    rollout = {"use": f"agent:chat_games:{program}"}
    report = check(load(config, [f"rollouts={json.dumps({'r': rollout})}", "data.rollout=r"]), Purpose())
    complaints = [error.text for error in report.errors if error.topic == "rollouts"]
    assert len(complaints) == complains
    assert all("rollouts.r.use" in text and "calculator" in text for text in complaints)


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ({"s": {"max_new_tokens": 999}, "r": "sums"}, "want max_new_tokens <= "),
        ({"s": {"stop_token_ids": [128]}, "r": "sums"}, "want stop_token_ids below 128"),
        ({"s": None, "r": "letters"}, "want metadata for one of actor.reward_parts (sums: {'reward': 'sums'}; any: "),
    ],
)
def test_rows_that_the_run_cannot_sample_or_score_are_found_before_the_start(
    tmp_path: Path, own: dict[str, object], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    columns = ["data.bad_rows=refuse", "data.sampling_key=s", "data.reward_key=r", 'actor.reward=""', PARTS]
    good = row(s={"max_new_tokens": 4, "stop_token_ids": [127]}, r="sums")
    write_prompts(tmp_path / "own.jsonl", good, row(**own))
    path = f"data.path={tmp_path}/own.jsonl"
    (error,) = check(load(tmp_path / "run.yaml", [*columns, path]), Purpose()).errors
    assert error.topic == "data" and "own.jsonl:2: " in error.text and complaint in error.text
    held = [f"eval.sets={json.dumps({'held': {'path': f'{tmp_path}/own.jsonl'}})}", "eval.every=1"]
    write_prompts(tmp_path / "good.jsonl", good)
    loaded = load(tmp_path / "run.yaml", [*columns, f"data.path={tmp_path}/good.jsonl", *held])
    (error,) = check(loaded, Purpose()).errors
    assert error.topic == "eval" and "own.jsonl:2: " in error.text and complaint in error.text
    # Without transformers, which this would load for the whole process as one that finds no torch.
    tokenizer = PromptTokenizer(lambda *_: [1], lambda ids: "a", None, chat=False, template_args={})
    monkeypatch.setattr("tidemill.learner.prompts.tokenizer.model_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with pytest.raises(PromptError) as refused:  # the learner reads all rows, whatever was checked
        feeder_process.open_prompts(loaded.config, loaded.config.eval.sets["held"].data(loaded.config.data), 256, 16)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["data.reward=sums"], "data.reward: want actor.reward_parts"),
        (["data.reward_key=r"], "data.reward: want actor.reward_parts"),
        (["eval.sets={held: {path: a.jsonl, reward: sums}}"], "data.reward: want actor.reward_parts"),
        (
            ["data.sampling_key=s", "learner.algorithm.overlong.buffer=4", "learner.algorithm.overlong.penalty=1"],
            "overlong.buffer, which",
        ),
        (["data.sampling_key=s", "learner.algorithm.aggregation=constant"], "loss_constant: 0, which"),
    ],
)
def test_columns_that_other_settings_pass_over_are_refused(tmp_path: Path, settings: list[str], complaint: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=complaint):
        load(write_run(tmp_path), settings)
