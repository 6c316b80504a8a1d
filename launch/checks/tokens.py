"""Checks of the tokenizer and the chat template; tokenizes prompts as the learner will. Loads neither torch nor transformers."""

from pathlib import Path

from tidemill.actors.rollout_settings import MULTI_TURN, parse_rollouts
from tidemill.actors.text.text import Text
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import SETTING, CheckedModel
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.data.prompts import PromptTokenizer
from tidemill.rewards.message_template import MessageTemplate, ToolsLeftOut

CHAT = "chat"
"""Protocol of ``multi_turn`` in which the chat template writes the tools, which it has by default."""
QUESTION = ({"role": "user", "content": "What is three plus four?"},)
"""Chat that chat templates and renderers are tried with."""
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
WITHOUT_JSON = ("tokenizer.model", "vocab.json", "spiece.model")
"""Files of tokenizers that only transformers reads."""


def check_tokenizer(report: Report, config: RunConfig, model: CheckedModel) -> PromptTokenizer | None:
    """Return the function that turns a prompt into tokens; None after an error, or if ``prepare`` makes the model."""
    if model.directory is None:
        return None
    file = model.directory / "tokenizer.json"
    text = _read(report, config, model, file)
    if text is None:
        return None
    size = text.vocab_size
    if size > model.vocab_size:
        want = f"at most the {model.vocab_size} tokens of the model (vocab_size)"
        report.error("tokenizer", str(file), want=want, got=size, cure=f"save the tokenizer that belongs to it ({report.at(SETTING)})")
        return None
    template = _template(report, config, model)
    report.good("tokenizer", f"{size} tokens, chat template: {'none' if template is None else 'there'}")
    return PromptTokenizer(
        lambda given, add_special: text.encode(given, add_special=add_special),
        lambda ids: text.decode(ids, skip_special=False),
        template,
        chat=config.data.apply_chat_template,
        template_args=config.data.chat_template_args,
    )


def _read(report: Report, config: RunConfig, model: CheckedModel, file: Path) -> Text | None:
    assert model.directory is not None
    cure = f"save it beside the model: AutoTokenizer.from_pretrained(...).save_pretrained({str(model.directory)!r})"
    try:
        text = Text.read(model.directory)
    except ValueError as error:
        report.error("tokenizer", str(file), want="a tokenizer", got=str(error), cure=cure)
        return None
    if text is None and config.engine.kind != "builtin" and any((model.directory / name).exists() for name in WITHOUT_JSON):
        report.warning("tokenizer", str(file), want="one, to check prompts with", got="only a slow one", cure=cure)
    elif text is None:
        report.error("tokenizer", str(file), want="a tokenizer", got="no such file", cure=cure)
    return text


def _template(report: Report, config: RunConfig, model: CheckedModel) -> MessageTemplate | None:
    assert model.directory is not None
    try:
        template = MessageTemplate.read(model.directory)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        report.error("tokenizer", str(model.directory), want="a chat template", got=str(error), cure="fix it in tokenizer_config.json")
        return None
    if template is None and config.data.apply_chat_template:
        want = f"a tokenizer with a chat template in {model.directory}"
        cure = "add chat_template.jinja to the model, or set it to false and write data.template"
        report.error("tokenizer", report.at("data.apply_chat_template"), want=want, got="none", cure=cure)
    return template


def check_tools(report: Report, config: RunConfig, model: CheckedModel | None) -> None:
    """Report tools of ``multi_turn`` that the model's chat template leaves out. Those of a renderer are checked with the renderer."""
    if model is None or model.directory is None or config.actor.gateway.renderer:
        return
    offering = [
        name
        for name, rollout in parse_rollouts(config.rollouts).items()
        if rollout.use == MULTI_TURN and rollout.options.get("tools") and rollout.options.get("protocol", CHAT) == CHAT
    ]
    got = _leaves_out_tools(model.directory, config.data.chat_template_args) if offering else ""
    for name in offering if got else ():
        want, cure = "a chat template that writes tools, or the option protocol: text", f"change chat_template.jinja in {model.directory}"
        report.error("rollouts", report.at(f"rollouts.{name}.options.tools"), want=want, got=got, cure=cure)


def _leaves_out_tools(directory: Path, template_args: JsonObject) -> str:
    """Return why the model would not see tools; empty = it would, or the template cannot be tried."""
    try:
        template = MessageTemplate.read(directory)
        if template is None:
            return "no chat template"
        template.render(QUESTION, tools=[TOOL], **template_args)
    except ToolsLeftOut:
        return "one that writes none"
    except (ValueError, KeyError, TypeError, AttributeError):  # reported by the check of the tokenizer
        return ""
    return ""
