"""The same messages have the same tokens everywhere: learner, check, engine, router and gateway."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_kit import CALL, TOOL, WAYS, Paths, conversations, in_openais_form
from tests.examples import examples
from tests.refusals import refusal
from tests.tiny_models import FAMILIES, write_tiny_model, write_tiny_tokenizer
from tidemill.actors.episodes.programs.multi_turn import MultiTurn
from tidemill.bus.wire.messages import Prompt
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import check_model
from tidemill.launch.checks.tokens import check_tokenizer
from tidemill.launch.settings.config_loader import load
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.responses import RecordedResponse, RecordedRow, Recordings
from tidemill.learner.prompts.rows import PromptRow, RowTokens
from tidemill.learner.prompts.tokenizer import model_tokenizer

PROMPTS: tuple[Prompt, ...] = (
    "What is three plus four?",
    "<|im_start|> \n\té",
    [{"role": "user", "content": "What is three?"}],
)


@pytest.mark.parametrize("apply_chat_template", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_learner(tmp_path: Path, family: str, apply_chat_template: bool) -> None:
    model = write_tiny_model(tmp_path / "model", family, tied=family == "qwen3")
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\ndata: {{apply_chat_template: {str(apply_chat_template).lower()}}}\n")
    config, report = load(file).config, Report()
    found = check_model(report, config, prepared=False)
    assert found is not None
    tokenize, theirs = (
        check_tokenizer(report, config, found),
        model_tokenizer(str(model), apply_chat_template=apply_chat_template),
    )
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
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content "
        "}}{% endfor %}"
    )
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {model}}}\n")
    config, report = load(file).config, Report()
    found = check_model(report, config, prepared=False)
    assert found is not None
    tokenize, theirs = check_tokenizer(report, config, found), model_tokenizer(str(model))
    assert tokenize is not None and not report.errors
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"b": "<é>", "a": 1}}}]
    for prompt in PROMPTS:
        ids = list(theirs(prompt, tools=tools))
        assert ids == list(tokenize(prompt, tools=tools)), prompt
        assert len(ids) > len(theirs(prompt)) + 10, "the tools are there"


CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
NOTATIONS = {
    "JSON of maps": TOOLS + "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor "
    "%}<|im_end|>\n{% endfor %}" + CHATML,
    "values one by one": TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "<call {{ c.function.name }}>{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value "
    "}}{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}" + CHATML,
    "text of calls without content": TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}"
    "{% else %}{% for c in m.tool_calls %}{{ c.type + c.function.name + ' ' + c.function.arguments }}{% "
    "endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}" + CHATML,
    "text printed": TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.name }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments }}{% endfor "
    "%}<|im_end|>\n{% endfor %}" + CHATML,
    "keys looked for": TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if 'tool_calls' in m %}{% if m.tool_calls|length > 2 %}"
    "{{ raise_exception('too many') }}{% endif %}{% for c in m.tool_calls %}{{ c.function.name }}{{ "
    "c.function.arguments | tojson }}"
    "{% endfor %}{% elif 'name' in m %}{{ m.name + m.content }}{% else %}{{ m.content }}{% endif "
    "%}<|im_end|>\n{% endfor %}" + CHATML,
}
"""Chat templates that read calls in the ways of published ones."""
AS_TEXT = {"text of calls without content", "text printed"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Paths, Any]]:
    from transformers import AutoTokenizer

    found = {}
    for name, template in NOTATIONS.items():
        directory = tmp_path_factory.mktemp("notations") / name
        write_tiny_tokenizer(directory)
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        found[name] = Paths(directory), AutoTokenizer.from_pretrained(directory)
    return found


@settings(max_examples=examples(60))
@given(data=st.data())
@pytest.mark.parametrize("name", NOTATIONS)
def test_the_same_messages_have_the_same_ids_everywhere(
    name: str, paths: dict[str, tuple[Paths, Any]], data: st.DataObject
) -> None:
    """The ids of the learner's rows, of written answers' prompts, of engine, router and gateway are those of
    transformers.
    """
    ways, tokenizer = paths[name]
    alone = name == "text of calls without content"
    talk = data.draw(conversations(with_text=not alone))
    tools = data.draw(st.sampled_from([[], [TOOL]]))
    plain = (
        [in_openais_form(message, empty=None if alone else "") for message in talk.plain]
        if name in AS_TEXT
        else talk.plain
    )
    try:
        # transformers 5 drops keys with None before it renders, so its copy of the template asks for the key.
        wanted = tokenizer.apply_chat_template(
            plain,
            tools=tools or None,
            chat_template=NOTATIONS[name].replace("is not none", "is defined"),
            add_generation_prompt=True,
            return_dict=False,
        )
    except jinja2.TemplateError:
        wanted = None
    for messages in (talk.plain, talk.written):
        assert ways.ids(messages, tools) == dict.fromkeys(WAYS, wanted)


@pytest.mark.parametrize(
    "message", ["{{ m.content }}", "{{ '<' + m.content + '>' }}"], ids=["prints none", "refuses none"]
)
def test_calls_and_tools_that_a_template_leaves_out_are_refused_everywhere(tmp_path: Path, message: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"{{% for m in messages %}}{message}{{% endfor %}}")
    paths, asked = Paths(tmp_path), [{"role": "user", "content": "3 + 4?"}]
    assert all(paths.ids(asked).values())
    assert paths.ids(asked, [TOOL]) == dict.fromkeys(WAYS), "its template writes no tools"
    for content in ("x", None):
        assert paths.ids(
            [*asked, {"role": "assistant", "content": content, "tool_calls": [CALL]}, *asked]
        ) == dict.fromkeys(WAYS)


def test_a_template_that_leaves_out_calls_beside_content_refuses_those_alone(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(NOTATIONS["text of calls without content"])
    paths, asked = Paths(tmp_path), [{"role": "user", "content": "3 + 4?"}]
    assert all(paths.ids([*asked, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *asked]).values())
    assert paths.ids([*asked, {"role": "assistant", "content": "x", "tool_calls": [CALL]}, *asked]) == dict.fromkeys(
        WAYS
    )


@pytest.mark.parametrize("beside", [False, True])
def test_chats_with_tools_have_the_template_of_their_own(tmp_path: Path, beside: bool) -> None:
    """Models have it as an entry of tokenizer_config.json, or as a file."""
    from transformers import AutoTokenizer

    write_tiny_tokenizer(tmp_path)
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    of_tools = "{{ tools | tojson }}|" + chat
    if beside:
        (tmp_path / "chat_template.jinja").write_text(chat)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(of_tools)
    else:
        file = tmp_path / "tokenizer_config.json"
        templates = [{"name": "default", "template": chat}, {"name": "tool_use", "template": of_tools}]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
    tokenizer, asked = AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "3 + 4?"}]
    for tools in ([], [TOOL]):
        wanted = tokenizer.apply_chat_template(
            asked, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert Paths(tmp_path).ids(asked, tools) == dict.fromkeys(WAYS, wanted)


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
    found = check_model(report, config, prepared=False)
    assert found is not None
    tokenize, theirs = check_tokenizer(report, config, found), model_tokenizer(str(model))
    assert tokenize is not None and not report.errors
    question = {"role": "user", "content": "What is three?"}
    for answer in ("\n\nThree", "  Three", "\n", "Three\n\n", "\tThree"):
        response = RecordedResponse(
            messages=({"role": "assistant", "content": answer}, question, {"role": "assistant", "content": answer})
        )
        row = RecordedRow(prompt=[question], responses=(response,), tools=(), where="a:1")
        made = [Recordings(one, rollouts={"a"}, end_ids=(), max_tokens=999, texts=one) for one in (tokenize, theirs)]
        (ours,), (learners,) = (one.sequences(row) for one in made)
        assert (
            ours.tokens.tolist() == learners.tokens.tolist() and ours.loss_mask.tolist() == learners.loss_mask.tolist()
        )
        assert ours.prompt_tokens.tolist() == list(theirs([question]))
        assert theirs.decode(ours.tokens.tolist()) == theirs.render([question, *response.messages], whole=True)
    for content, role in ((5, "user"), (True, "user"), ("a", "wizard"), ({"a": 1}, "user")):
        row_of_file = PromptRow(number=0, prompt=[{"role": role, "content": content}], where="a:1")
        for one in (tokenize, theirs):
            with refusal(PromptError, where="a:1"):
                RowTokens(one, max_tokens=99).of(row_of_file)


@pytest.mark.parametrize("notation", ["nested", "flat", "flat with a type", "without a type"])
def test_tools_in_every_notation_have_the_same_tokens_on_every_way(tmp_path: Path, notation: str) -> None:
    """Rows, servers, and ``multi_turn``, which is sent the tools of a row in its metadata."""
    model = write_tiny_model(tmp_path / "model", FAMILIES[0], tied=False)
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}{% "
        "endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    nested = {
        "type": "function",
        "function": {"name": "calculator", "description": "Sums.", "parameters": {"type": "object"}},
    }
    tool = {
        "nested": nested,
        "flat": nested["function"],
        "flat with a type": {"type": "function", **nested["function"]},  # type: ignore[dict-item]
        "without a type": {"function": nested["function"]},
    }[notation]
    paths, messages = Paths(model), [{"role": "user", "content": "2+3?"}]
    expected = paths.ids(messages, [nested])
    assert paths.ids(messages, [tool]) == expected
    (offered,) = (
        MultiTurn(tools=["calculator"])._tools_of({"metadata": paths.row(messages, [tool])().metadata}).values()
    )
    (as_written,) = MultiTurn(tools=["calculator"])._tools_of({"metadata": {"tools": [tool]}}).values()
    assert offered.schema == as_written.schema == nested
    assert paths.ids(messages, [offered.schema]) == expected
