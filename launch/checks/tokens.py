"""Checks of the tokenizer and the chat template; tokenizes prompts as the learner will. Loads neither torch nor transformers."""

from collections.abc import Sequence
from pathlib import Path

from actors.errors import BadRequest
from actors.text.chat_template import ChatTemplate
from actors.text.text import Text
from bus.wire.json_object import JsonObject
from bus.wire.messages import Prompt
from launch.checks.findings import Report
from launch.checks.model import SETTING, CheckedModel
from launch.settings.run_config import RunConfig
from learner.errors import CannotRender, TemplateLacks

WITHOUT_JSON = ("tokenizer.model", "vocab.json", "spiece.model")
"""Files of tokenizers that only transformers reads."""


class CheckedTokenizer:
    """The tokens of prompts as the learner makes them, by the engine's tokenizer and chat template. A ``Tokenize`` and ``ChatTexts``."""

    def __init__(self, config: RunConfig, text: Text, template: ChatTemplate | None, directory: Path) -> None:
        self._data, self._text, self._template, self._directory = config.data, text, template, directory

    def __call__(self, prompt: Prompt, tools: Sequence[JsonObject] = (), *, whole: bool = False) -> Sequence[int]:
        """Return the tokens of a prompt, of a whole conversation, or of the text of a response. Raises CannotRender, TemplateLacks."""
        if isinstance(prompt, str) and whole:
            return self.encode(prompt)
        if isinstance(prompt, str) and not self._data.apply_chat_template and not tools:
            return self._encoded(prompt, add_special=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        rendered = self.render(messages, tools, whole=whole)
        if tools and rendered == self._without_tools(messages, whole=whole):
            raise TemplateLacks(f"tools, and the chat template of {self._directory} does not render any")
        return self.encode(rendered)

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), *, whole: bool = False) -> str:
        """Return the text of a conversation, with a generation prompt unless it is ``whole``. Raises CannotRender, TemplateLacks."""
        if self._template is None:
            raise TemplateLacks(f"{'tools' if tools else 'chat messages'}, and {self._directory} has no chat template")
        said = {**self._data.chat_template_args, **({"tools": list(tools)} if tools else {})}
        try:
            return self._template.render(messages, add_generation_prompt=not whole, **said)
        except BadRequest as error:
            raise CannotRender(str(error)) from None

    def _without_tools(self, messages: Sequence[JsonObject], *, whole: bool) -> str | None:
        """Return the messages as text without tools; None where the template wants some."""
        try:
            return self.render(messages, whole=whole)
        except CannotRender:
            return None

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special tokens before or behind it. Raises CannotRender."""
        return self._encoded(text, add_special=False)

    def _encoded(self, text: str, *, add_special: bool) -> Sequence[int]:
        try:
            return self._text.encode(text, add_special=add_special)
        except ValueError as error:
            raise CannotRender(f"rejected by the tokenizer: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._text.decode(list(ids), skip_special=False)


def check_tokenizer(report: Report, config: RunConfig, model: CheckedModel) -> CheckedTokenizer | None:
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
    return CheckedTokenizer(config, text, template, model.directory)


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


def _template(report: Report, config: RunConfig, model: CheckedModel) -> ChatTemplate | None:
    assert model.directory is not None
    try:
        template = ChatTemplate.read(model.directory)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        report.error("tokenizer", str(model.directory), want="a chat template", got=str(error), cure="fix it in tokenizer_config.json")
        return None
    if template is None and config.data.apply_chat_template:
        want = f"a tokenizer with a chat template in {model.directory}"
        cure = "add chat_template.jinja to the model, or set it to false and write data.template"
        report.error("tokenizer", report.at("data.apply_chat_template"), want=want, got="none", cure=cure)
    return template
