"""A check gets the same prompt tokens as the learner, without transformers."""

from pathlib import Path

import pytest

from bus.wire.messages import Prompt
from launch.checks.findings import Report
from launch.checks.model import check_model
from launch.checks.tokens import check_tokenizer
from launch.settings.config_loader import load
from learner.data.prompts import Row, RowTokens, model_tokenizer
from learner.data.responses import RecordedRow, Recordings, Response
from learner.errors import PromptError
from tests.tiny_models import FAMILIES, write_tiny_model

PROMPTS: tuple[Prompt, ...] = ("What is three plus four?", "<|im_start|> \n\té", [{"role": "user", "content": "What is three?"}])


@pytest.mark.parametrize("apply_chat_template", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_learner(tmp_path: Path, family: str, apply_chat_template: bool) -> None:
    model = write_tiny_model(tmp_path / "model", family, tied=family == "qwen3")
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\ndata: {{apply_chat_template: {str(apply_chat_template).lower()}}}\n")
    config, report = load(file).config, Report()
    found = check_model(report, config, made=False)
    assert found is not None
    tokenize, theirs = check_tokenizer(report, config, found), model_tokenizer(str(model), apply_chat_template=apply_chat_template)
    assert tokenize is not None and not report.errors
    for prompt in PROMPTS:
        assert list(tokenize(prompt)) == list(theirs(prompt)), prompt
        assert list(tokenize(prompt, whole=True)) == list(theirs(prompt, whole=True)), (
            "a conversation to its end, or the text of a response"
        )
    assert list(theirs(PROMPTS[2], whole=True)) != list(theirs(PROMPTS[2])), "without a generation prompt"


def test_tools_are_rendered_as_by_the_learner_with_text_and_with_messages(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", FAMILIES[0], tied=False)
    (model / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\n")
    config, report = load(file).config, Report()
    found = check_model(report, config, made=False)
    assert found is not None
    tokenize, theirs = check_tokenizer(report, config, found), model_tokenizer(str(model))
    assert tokenize is not None and not report.errors
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"b": "<é>", "a": 1}}}]
    for prompt in PROMPTS:
        ids = list(theirs(prompt, tools=tools))
        assert ids == list(tokenize(prompt, tools=tools)), prompt
        assert len(ids) > len(theirs(prompt)) + 10, "the tools are there"


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_rejected_rows_are_the_same_to_the_learner_and_the_checks(tmp_path: Path, family: str) -> None:
    model = write_tiny_model(tmp_path / "model", family, tied=family == "qwen3")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
        "{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\n")
    config, report = load(file).config, Report()
    found = check_model(report, config, made=False)
    assert found is not None
    tokenize, theirs = check_tokenizer(report, config, found), model_tokenizer(str(model))
    assert tokenize is not None and not report.errors
    question = {"role": "user", "content": "What is three?"}
    for answer in ("\n\nThree", "  Three", "\n", "Three\n\n", "\tThree"):
        response = Response(messages=({"role": "assistant", "content": answer}, question, {"role": "assistant", "content": answer}))
        row = RecordedRow(prompt=[question], responses=(response,), tools=(), where="a:1")
        made = [Recordings(one, rollouts={"a"}, end_ids=(), max_tokens=999, texts=one) for one in (tokenize, theirs)]
        (ours,), (learners,) = (one.sequences(row) for one in made)
        assert ours.tokens.tolist() == learners.tokens.tolist() and ours.loss_mask.tolist() == learners.loss_mask.tolist()
        assert ours.prompt_tokens.tolist() == list(theirs([question]))
        assert theirs.decode(ours.tokens.tolist()) == theirs.render([question, *response.messages], whole=True)
    for content, role in ((5, "user"), (True, "user"), ("a", "wizard"), ({"a": 1}, "user")):
        row_of_file = Row(number=0, prompt=[{"role": role, "content": content}], where="a:1")
        for one in (tokenize, theirs):
            with pytest.raises(PromptError, match="a:1: want a prompt that tokenizer and chat template accept, got "):
                RowTokens(one, max_tokens=99).of(row_of_file)
