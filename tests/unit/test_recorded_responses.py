"""Recorded responses: masks of conversations, refusals by file and line, tasks and samples made of them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import data_kit
from tests.check_kit import TEMPLATE, write_prompts, write_run
from tests.feeder_kit import task_settings
from tests.refusals import refusal
from tidemill.actors.guarded_settings import refuse_foreign
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Plan, Prompt, Sampling
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.buffer.task_admission import TaskDemand
from tidemill.learner.data import DataConfig
from tidemill.learner.errors import PromptError
from tidemill.learner.feed.issuing import task_of
from tidemill.learner.feed.recorded_responses import samples_of
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.prompts.responses import RecordedRow, Recordings, in_conversation
from tidemill.learner.prompts.rows import RowRules

BEGIN, END = 1, 2
"""Token ids around a turn of the chat template below; END is the model's end token."""


def chat(prompt: Prompt, tools: Sequence[Any] = (), *, whole: bool = False) -> list[int]:
    """Tokenize as a chat model: ``BEGIN role content END newline`` a turn, ``BEGIN role`` before an answer; text a
    letter a token.
    """
    if isinstance(prompt, str):
        return [ord(letter) for letter in prompt]
    ids = [ord(tool["name"][0]) for tool in tools]
    for turn in prompt:
        ids += [BEGIN, ord(turn["role"][0]), *map(ord, turn["content"]), END, ord("\n")]
    return ids if whole else [*ids, BEGIN, ord("a")]


def forgetful(prompt: Prompt, tools: Sequence[Any] = (), *, whole: bool = False) -> list[int]:
    """Tokenize likewise, with the thoughts (before a ``|``) of the last turn alone."""
    assert not isinstance(prompt, str)
    kept = [{**turn, "content": turn["content"].split("|")[-1]} for turn in prompt[:-1]] + list(prompt[-1:])
    return chat(kept, tools, whole=whole)


def recordings(tokenize: Any = chat, **changes: Any) -> Recordings:
    return Recordings(tokenize, **({"rollouts": {"answers"}, "end_ids": (END,), "max_tokens": 1000} | changes))


def opened(
    path: Path, tokenize: Any = chat, *, max_tokens: int = 1000, chat_text: bool = False, **settings: Any
) -> PromptFile:
    data = DataConfig(path=str(path), shuffle=False, rollout="answers", label_key="", **settings)
    made = recordings(tokenize, max_tokens=max_tokens, chat=chat_text)
    rules = RowRules(policy=data.bad_rows)
    return PromptFile(data.used, tokenize=tokenize, max_tokens=1000, shuffle=False, recordings=made, rules=rules)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def masked_text(sequence: Any) -> list[int]:
    """Return the trained tokens of a sequence, by its own lengths."""
    return sequence.tokens[len(sequence.prompt_tokens) :][sequence.loss_mask == 1].tolist()


words = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=6)


@given(st.lists(st.tuples(words, words, st.booleans()), min_size=1, max_size=5), st.booleans())
def test_the_trained_tokens_are_the_assistants_turns_with_their_end_tokens(
    turns: list[tuple[str, str, bool]], system: bool
) -> None:
    turns[-1] = (*turns[-1][:2], True)
    messages = [turn("system", "be short")] if system else []
    for asked, answer, trained in turns:
        messages += [turn("user", asked), turn("assistant", answer, **({} if trained else {"weight": 0}))]
    prompt, response = in_conversation(messages, where="f:1")
    row = RecordedRow(prompt=prompt, responses=(response,), tools=(), where="f:1")
    (found,) = recordings().sequences(row)
    assert masked_text(found) == [
        token for _, answer, trained in turns if trained for token in (*map(ord, answer), END)
    ]
    assert found.tokens.tolist() == chat(messages, whole=True)[: len(found.tokens)], (
        "the conversation itself, to its last trained token"
    )
    assert found.loss_mask[0] == found.loss_mask[-1] == 1
    assert found.log_probs is None


CHAT = [turn("user", "hi"), turn("assistant", "x|one"), turn("user", "more"), turn("assistant", "y|two")]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT}, {"prompt": [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]}]
    prompts = opened(write_prompts(tmp_path / "a.jsonl", *rows), forgetful)
    with refusal(PromptError, where=re.compile(r"a\.jsonl:1$"), got="other tokens for 'x|one'"):
        prompts.at(0, 0)
    (found,) = prompts.at(0, 1).recorded
    assert masked_text(found) == [*map(ord, "y|two"), END], "the cure works"


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": "q", "r": "yes"}, [*b"yes", END]),
        ({"prompt": "q", "r": {"text": "yes", "truncated": True}}, [*b"yes"]),
        ({"prompt": [turn("user", "q")], "r": "yes"}, [*b"yes", END]),
        ({"prompt": "q", "r": {"messages": CHAT[1:]}}, [*b"x|one", END, *b"y|two", END]),
        ({"prompt": "q", "r": {"tokens": [7, 8, 9], "loss_mask": [1, 0, 1]}}, [7, 9]),
        ({"prompt": "q", "r": json.dumps([{"text": "yes"}])}, [*b"yes", END]),
        ({"prompt": "q", "r": "[1, 2]"}, [*b"[1, 2]", END]),
    ],
)
def test_every_form_of_a_response(tmp_path: Path, row: dict[str, Any], trained: list[int]) -> None:
    prompts = opened(write_prompts(tmp_path / "a.jsonl", row), responses_key="r")
    drawn = prompts.at(0, 0)
    assert masked_text(drawn.recorded[0]) == trained
    expected = (
        chat([turn("user", "q")]) if "messages" in str(row["r"]) or not isinstance(row["prompt"], str) else [ord("q")]
    )
    assert drawn.tokens.tolist() == drawn.recorded[0].prompt_tokens.tolist() == expected


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        (None, "want responses in data.responses_key, or chat messages"),
        ([], "want 1 to 1024 responses in 'r', got 0"),
        (5, r"want text or a map with text, messages or tokens in r\[0\], got a number"),
        ({"txt": "a"}, r"want only text, .* in r\[0\], got txt"),
        ({"text": "a", "tokens": [1]}, r"want one of text, messages and tokens in r\[0\], got text, tokens"),
        ({"text": ""}, r"want a text that is not empty in r\[0\].text"),
        ({"text": "a", "log_probs": [-1.0]}, r"want tokens with log_probs in r\[0\]"),
        ({"tokens": [1, 2], "log_probs": [-1.0]}, r"want a value for each of 2 tokens in r\[0\].log_probs, got 1"),
        ({"tokens": [1, 2], "log_probs": [-1.0, 0.5]}, r"want log-probs of -700 to 0 in r\[0\].log_probs, got 0.5"),
        ({"tokens": [1, -2]}, r"want a list of whole numbers from 0 to 2147483647 in r\[0\].tokens"),
        ({"tokens": [1], "loss_mask": [2]}, r"want a list of whole numbers from 0 to 1 in r\[0\].loss_mask"),
        ({"tokens": [1], "loss_mask": [0]}, r"want a token that is trained in r\[0\], got none"),
        ({"text": "a", "reward": "high"}, r"want a number in r\[0\].reward, got 'high'"),
        ({"text": "a", "reward": 1e9}, r"want a finite number within \+-1e\+06 in r\[0\].reward"),
        ({"messages": [turn("user", "a")]}, r"want chat messages .* of the assistant .* in r\[0\].messages"),
        (
            {"messages": [{"role": ["assistant"], "content": "a"}]},
            r"""want a map with text as "role", .* in 'r\[0\].messages\[0\]'""",
        ),
        ({"messages": [turn("assistant", "a", weight=2)]}, r"want weight 0 or 1"),
        ({"messages": [turn("assistant", "a", weight=0)]}, r"one at least of the assistant with a weight of 1"),
    ],
)
def test_a_bad_response_is_refused_by_file_and_line(tmp_path: Path, responses: object, complaint: str) -> None:
    good = {"prompt": "q", "r": "fine"}
    with pytest.raises(PromptError, match=rf"a\.jsonl:2: .*{complaint}"):
        opened(
            write_prompts(tmp_path / "a.jsonl", good, {"prompt": "q", "r": responses}),
            responses_key="r",
            bad_rows="refuse",
        )
    skipped = opened(tmp_path / "a.jsonl", responses_key="r")
    assert [(one.epoch, one.offset) for one in (skipped.after(0, 0), skipped.after(0, 1))] == [(0, 0), (1, 0)]
    assert len(skipped.bad_rows) == 1


def test_conversations_without_a_question_or_an_answer_are_refused(tmp_path: Path) -> None:
    for prompt in ("text", [turn("user", "a")], [turn("assistant", "a"), turn("user", "b")]):
        with refusal(PromptError, where=re.compile(r"a\.jsonl:1$"), want=re.compile(r"data\.responses_key")):
            opened(write_prompts(tmp_path / "a.jsonl", {"prompt": prompt}))


def test_sequences_longer_than_the_context_are_skipped(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "r": ["short", "x" * 9]}, {"prompt": "q", "r": ["short"]}]
    prompts = opened(write_prompts(tmp_path / "a.jsonl", *rows), max_tokens=10, responses_key="r")
    assert prompts.after(0, 0).offset == 1
    with refusal(PromptError, where=re.compile(r"a\.jsonl:1$"), got=11):
        prompts.at(0, 0)


def issued(prompts: PromptFile) -> Any:
    settings = task_settings(sampling=Sampling(max_new_tokens=8), group_size=4, recorded=frozenset({"answers"}))
    demand = TaskDemand(prompt_epoch=0, offset=0, min_version=3, issue_step=2)
    return replace(task_of(demand, prompts.at(0, 0), settings, seed=0, epoch=1), id=5)


def test_a_task_has_a_sample_for_each_response_and_they_are_valid_on_the_wire(tmp_path: Path) -> None:
    known = {"tokens": [7, 8], "log_probs": [-0.5, -0.25], "reward": {"score": 2.0}, "prompt_tokens": [3, 4]}
    masked = {
        "tokens": [7, 6, 8],
        "log_probs": [-0.5, -9.0, -0.25],
        "loss_mask": [1, 0, 1],
        "reward": 1,
        "truncated": True,
    }
    prompts = opened(
        write_prompts(tmp_path / "a.jsonl", {"prompt": "q", "r": ["yes", known, masked]}), responses_key="r"
    )
    task = issued(prompts)
    assert (task.group_size, task.rollout, task.prompt_tokens.tolist()) == (3, "answers", [ord("q")])
    samples = samples_of(task, prompts, "n", version=4)
    for sample in samples:
        check_sample(sample)
        again = decode_sample(encode_sample(sample))
        assert (again.demonstration, again.schema) == (sample.demonstration, 3 if sample.demonstration else 1)
        assert [(span.version, span.num_tokens) for span in sample.spans] == [(4, sample.response_length)]
    assert [one.demonstration for one in samples] == [True, False, False]
    assert [one.rollout_log_probs.tolist() for one in samples[1:]] == [[-0.5, -0.25], [-0.5, 0.0, -0.25]]
    assert [one.tokens.tolist() for one in samples[1:]] == [[3, 4, 7, 8], [ord("q"), 7, 6, 8]]
    assert [one.score for one in samples] == [0, 2, 1]
    assert [one.status.value for one in samples] == ["completed", "completed", "truncated"]
    with refusal(WireError, field="rollout_log_probs"):
        check_sample(replace(samples[1], demonstration=True))


def test_the_learner_refuses_demonstrations_that_its_loss_cannot_train(tmp_path: Path) -> None:
    prompts = opened(write_prompts(tmp_path / "a.jsonl", {"prompt": "q", "r": "yes"}), responses_key="r")
    task = issued(prompts)
    (sample,) = samples_of(task, prompts, "n", version=3)
    for takes in (False, True):
        source = DataSource(data_kit.rules(demonstrations=takes), created="c")
        source.version(3, 2)
        source.published(3, 2)
        source.issued(replace(task, sampling=Sampling(max_new_tokens=8)), 0.0)
        arrival = source.add(index_of(1, replace(sample, sampling=Sampling(max_new_tokens=8))), 0.0)
        assert (arrival.name.value, arrival.reason) == (("buffered", "") if takes else ("invalid", "demonstration"))


def test_filters_and_zero_variance_let_demonstrations_pass(tmp_path: Path) -> None:
    prompts = opened(write_prompts(tmp_path / "a.jsonl", {"prompt": "q", "r": ["yes", "no"]}), responses_key="r")
    task = replace(issued(prompts), sampling=Sampling(max_new_tokens=8))
    source = DataSource(
        data_kit.rules(demonstrations=True, filter_zero_variance=True, filters="f", groups_per_step=1), created="c"
    )
    source.version(3, 0)
    source.published(3, 0)
    source.issued(task, 0.0)
    for seq, sample in enumerate(samples_of(task, prompts, "n", version=3), 1):
        source.add(index_of(seq, sample), 0.0)
    assert source.unjudged() == []
    plan = source.plan(0.0)
    assert isinstance(plan, Plan), plan
    assert plan.tasks.tolist() == [5]


ROLLOUTS = "rollouts={answers: {use: dataset}}"
SFT = (ROLLOUTS, "data.rollout=answers", "data.responses_key=label", "learner.algorithm.correction=sft")


def loaded(tmp_path: Path, *settings: str) -> Any:
    return load([write_run(tmp_path)], settings, {})


def test_a_run_of_recorded_responses_needs_no_engine_actor_or_reward(tmp_path: Path) -> None:
    run = loaded(tmp_path, *SFT, "actor.reward=''")
    report = check(run, Purpose())
    assert report.errors == []
    assert (run.config.up.engines, run.config.up.actors) == (0, 0)
    assert run.config.bus == BusConfig(rollouts=("answers",))
    mixed = loaded(tmp_path, ROLLOUTS, *_two_sources(tmp_path), "learner.algorithm.sft_coef=0.1")
    assert (mixed.config.up.engines, mixed.config.up.actors, mixed.config.samples_nothing) == (1, 1, False)


def _two_sources(tmp_path: Path) -> tuple[str, ...]:
    file = write_prompts(tmp_path / "b.jsonl")
    return (
        "data.path=''",
        f"data.sources={{a: {{path: {file}}}, b: {{path: {file}, rollout: answers, responses_key: label}}}}",
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("data.responses_key=label",), "data.responses_key: want a rollout of recorded responses with it"),
        (
            ("learner.algorithm.sft_coef=0.1",),
            "learner.algorithm.sft_coef: want a rollout of recorded responses with it",
        ),
        ((*SFT, "learner.algorithm.sft_coef=0.1"), "sft_coef: not used by loss sft"),
        (("learner.algorithm.sft_coef=-1",), "sft_coef: want >= 0"),
        ((*SFT, "rollouts.answers.options={a: 1}"), "rollouts.answers.options: want use: dataset alone"),
        ((*SFT, "eval={every: 1, sets: {held: {path: x.jsonl}}}"), "eval.sets.held.rollout: want single_turn"),
        (
            (*SFT[:3], "learner.algorithm={sft_coef: 1.0, advantage: reinforce}", "learner.credit=turn"),
            "credit: want episode with algorithm.sft_coef",
        ),
    ],
)
def test_settings_that_contradict_recorded_responses_are_refused(
    tmp_path: Path, settings: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises((SettingsError, ValueError), match=complaint):
        loaded(tmp_path, *settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ("learner.algorithm.correction=topr",),
            "want tokens and log_probs in response 1 with learner.algorithm.loss: topr",
        ),
        (
            ("learner.algorithm.correction=decoupled",),
            "want tokens and log_probs in response 1 with learner.algorithm.loss: ppo",
        ),
        (
            ("learner.algorithm.correction=sft", "sampling.temperature=0.7"),
            "want sampling.temperature: 1 with response 1",
        ),
        (
            ("learner.algorithm={correction: sft, entropy: {coef: 0.1}}",),
            "want learner.algorithm.entropy.coef: 0 with response 1",
        ),
        (
            ("learner.algorithm={correction: sft, entropy: {target: 0.1}}",),
            "want learner.algorithm.entropy.target: 0 with response 1",
        ),
        (
            ("learner.algorithm={correction: sft, kl: {coef: 0.1}}",),
            "want learner.algorithm.kl.coef: 0 with response 1",
        ),
    ],
)
def test_rows_that_the_loss_cannot_train_are_refused_before_the_start(
    tmp_path: Path, settings: tuple[str, ...], complaint: str
) -> None:
    report = check(loaded(tmp_path, *SFT[:3], *settings), Purpose())
    assert [str(error) for error in report.errors if "prompts.jsonl:1" in str(error) and complaint in str(error)], (
        report.errors
    )


def test_log_probs_of_another_temperature_and_foreign_tokens_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for response, complaint in (
        (
            {"tokens": [5], "log_probs": [-1.0], "temperature": 0.5},
            "want log-probs at sampling.temperature, 1, in response 1, got 0.5",
        ),
        ({"tokens": [500], "log_probs": [-1.0]}, "want token ids below 128"),
    ):
        write_prompts(tmp_path / "prompts.jsonl", {"prompt": "what is one", "label": "x", "r": response})
        report = check(
            load([run], [*SFT[:2], "data.responses_key=r", "learner.algorithm.correction=topr"], {}), Purpose()
        )
        assert [str(error) for error in report.errors if complaint in str(error)], report.errors
    settings = [*SFT[:2], "data.responses_key=r", "data.sampling_key=s", "learner.algorithm.correction=topr"]
    for temperature, complaint in (
        (0.5, ""),
        (0.7, "want log-probs at its own temperature, 0.7, in response 1, got 0.5"),
    ):
        response = {"tokens": [5], "log_probs": [-1.0], "temperature": 0.5}
        row = {"prompt": "what is one", "label": "x", "r": response, "s": {"temperature": temperature}}
        write_prompts(tmp_path / "prompts.jsonl", row)
        errors = [
            str(error) for error in check(load([run], settings, {}), Purpose()).errors if "temperature" in str(error)
        ]
        assert not errors if not complaint else [error for error in errors if complaint in error], errors


def test_a_template_that_rewrites_turns_is_found_by_the_checks(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    answer = [
        turn("user", "what is one"),
        turn("assistant", "two"),
        turn("user", "the answer"),
        turn("assistant", "three"),
    ]
    write_prompts(tmp_path / "prompts.jsonl", {"prompt": answer, "label": "x"})
    settings = [*SFT[:2], SFT[3], "actor.reward=''"]
    assert check(load([run], settings, {}), Purpose()).errors == []
    file = tmp_path / "model/tokenizer_config.json"
    only_last = (
        "{% for message in messages %}{% if loop.last or message.role == 'user' %}"
        + "{{ message['content'] }} {% endif %}{% endfor %}"
    )
    file.write_text(json.dumps({"eos_token": "<eos>", "chat_template": only_last}))
    assert only_last != TEMPLATE
    errors = check(load([run], settings, {}), Purpose()).errors
    assert [str(error) for error in errors if "writes message 2 in the middle" in str(error)], errors


def test_actors_neither_run_nor_refuse_recorded_rollouts() -> None:
    recorded, program = RolloutConfig(use="dataset"), RolloutConfig(use="multi_turn")
    programs = RolloutPrograms(rollouts={"answers": recorded, "tools": program}, model="m")
    assert programs.programs == {"tools": program}
    refuse_foreign({"rollouts": {"answers": {"use": "dataset"}}}, "actor", (), where="row")


def test_the_digest_of_a_run_depends_on_what_is_recorded_and_how_it_is_trained(tmp_path: Path) -> None:
    sft = loaded(tmp_path, *SFT).config.digest()
    assert loaded(tmp_path, *SFT[:3], "learner.algorithm.correction=tis").config.digest() != sft
    sources = _two_sources(tmp_path)
    mixed = [
        loaded(tmp_path, ROLLOUTS, *sources, f"learner.algorithm.sft_coef={coef}").config.digest()
        for coef in (0.1, 0.2)
    ]
    assert len({sft, *mixed}) == 3
    assert loaded(tmp_path, *SFT[:2], "data.responses_key=prompt", SFT[3]).config.digest() != sft
