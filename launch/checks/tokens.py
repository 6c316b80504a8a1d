"""Checks of tokenizer, chat template, end tokens and the gateway's renderer. Loads neither torch nor transformers."""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.port import ProgramFailed
from tidemill.actors.errors import NoRenderer, RendererMissing
from tidemill.actors.rollout_settings import MULTI_TURN, PROGRAM, RolloutConfig
from tidemill.actors.text.rendering import Renderer, config_of
from tidemill.actors.text.text import Text
from tidemill.actors.text.tool_calls import ChatTemplate
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import SETTING, CheckedModel
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.prompts.tokenizer import PromptTokenizer
from tidemill.rewards.model_text import EndTokens, MessageTemplate, ToolsLeftOut

CHAT = "chat"  # Protocol of `multi_turn` in which the chat template writes the tools, which it has by default
# Chat that chat templates and renderers are tried with.
QUESTION = ({"role": "user", "content": "What is three plus four?"},)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
LOAD_S = 30.0  # Seconds in which a program by import path is loaded
WITHOUT_JSON = ("tokenizer.model", "vocab.json", "spiece.model")  # Files of tokenizers that only transformers reads

TOPIC = "ends"


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
        cure = f"save the tokenizer that belongs to it ({report.at(SETTING)})"
        report.error("tokenizer", str(file), want=want, got=size, cure=cure)
        return None
    template = _template(report, config, model)
    report.good("tokenizer", f"{size} tokens, chat template: {'none' if template is None else 'there'}")
    return PromptTokenizer(
        lambda prompt, add_special: text.encode(prompt, add_special=add_special),
        lambda ids: text.decode(ids, skip_special=False),
        template,
        chat=config.data.apply_chat_template,
        template_args=config.data.chat_template_args,
        longest_token_bytes=text.longest_token_bytes,
    )


def _read(report: Report, config: RunConfig, model: CheckedModel, file: Path) -> Text | None:
    assert model.directory is not None
    cure = f"save it beside the model: AutoTokenizer.from_pretrained(...).save_pretrained({str(model.directory)!r})"
    try:
        text = Text.read(model.directory)
    except ValueError as error:
        report.error("tokenizer", str(file), want="a tokenizer", got=str(error), cure=cure)
        return None
    is_slow = text is None and any((model.directory / name).exists() for name in WITHOUT_JSON)
    if is_slow and config.engine.kind != "builtin":
        report.warning("tokenizer", str(file), want="one, to check prompts with", got="only a slow one", cure=cure)
    elif text is None:
        report.error("tokenizer", str(file), want="a tokenizer", got="no such file", cure=cure)
    return text


def _template(report: Report, config: RunConfig, model: CheckedModel) -> MessageTemplate | None:
    assert model.directory is not None
    try:
        template = MessageTemplate.read(model.directory)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cure = "fix it in tokenizer_config.json"
        report.error("tokenizer", str(model.directory), want="a chat template", got=str(error), cure=cure)
        return None
    if template is None and config.data.apply_chat_template:
        want = f"a tokenizer with a chat template in {model.directory}"
        cure = "add chat_template.jinja to the model, or set it to false and write data.template"
        report.error("tokenizer", "data.apply_chat_template", want=want, got="none", cure=cure)
    return template


def check_tools(report: Report, config: RunConfig, model: CheckedModel | None) -> None:
    """Report tools of rollouts that the chat template leaves out. Those of a renderer are checked with it.

    A program by import path is loaded in a child, as an actor does it, but only where the template writes no tools at
    all.
    """
    if model is None or model.directory is None or config.actor.gateway.renderer:
        return
    rollouts = [
        (name, rollout) for name, rollout in config.rollouts.items() if rollout.use.startswith((MULTI_TURN, PROGRAM))
    ]
    got = _leaves_out_tools(model.directory, config.data.chat_template_args) if rollouts else ""
    for name, rollout in rollouts if got else ():
        setting, tools = "options.tools", rollout.options.get("tools")
        if rollout.use.startswith(PROGRAM):
            setting, tools = "use", asyncio.run(_tools_of_program(rollout))
        elif rollout.options.get("protocol", CHAT) != CHAT:
            continue
        if not tools:
            continue
        want = "a chat template that writes tools, or the option protocol: text or messages"
        cure = f"change chat_template.jinja in {model.directory}"
        offered = f" for {', '.join(tools)}" if setting == "use" else ""
        report.error("rollouts", f"rollouts.{name}.{setting}", want=want, got=got + offered, cure=cure)


async def _tools_of_program(rollout: RolloutConfig) -> Sequence[str]:
    """Return the tools that a program offers in chats; none for one that cannot be loaded (its actor reports it)."""
    async with Children(rollout) as children:
        try:
            async with asyncio.timeout(LOAD_S):
                await children.load()
        except (ProgramFailed, TimeoutError):
            return ()
        return children.chat_tools


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


def check_end_tokens(report: Report, model: Path) -> None:
    """Warn about a model directory without an end token, or with files that name different ones."""
    try:
        tokens = EndTokens.read(model)
    except ValueError as error:  # the check of the model or of its tokenizer names it
        want = "files of a model and its tokenizer"
        report.warning(TOPIC, str(model), want=want, got=str(error), cure="correct the file")
        return
    before = len(report.warnings)
    if not tokens.ids:
        files = "eos_token_id in config.json or generation_config.json, or eos_token of the tokenizer"
        want = f"a token that ends a response: {files}"
        cure = "set eos_token_id in generation_config.json; every response goes on to sampling.max_new_tokens"
        report.warning(TOPIC, str(model), want=want, got="none", cure=cure)
    if tokens.tokenizer is not None and tokens.configured and tokens.tokenizer not in tokens.configured:
        configured = f"eos_token_id of config.json and generation_config.json, {_shown(tokens.configured)}"
        want = f"the tokenizer's eos_token among {configured}"
        wrong = "the file that is wrong, often tokenizer_config.json behind a conversion"
        cure = f"correct {wrong}; here both end a response"
        report.warning(TOPIC, str(model / "tokenizer_config.json"), want=want, got=tokens.tokenizer, cure=cure)
    if tokens.turn is not None and tokens.turn not in tokens.named:
        named = f"the end tokens of the files, {_shown(tokens.named)}"
        want = f"the token behind an answer in the chat template among {named}"
        why = "here it ends a response, other programs do not know it"
        cure = f"add it to eos_token_id in generation_config.json; {why}"
        report.warning(TOPIC, str(model), want=want, got=tokens.turn, cure=cure)
    if len(report.warnings) == before:
        report.good(TOPIC, f"a response ends with {_shown(tokens.ids)}")


def _shown(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"


def check_renderer(report: Report, config: RunConfig, model: CheckedModel | None, *, on_this_machine: bool) -> None:
    """Make the renderer of ``actor.gateway``. ``on_this_machine``: actors run here, with these packages."""
    gateway = config.actor.gateway
    if not gateway.renderer:
        return
    directory = model.directory if model is not None else None
    try:
        if directory is None or (text := _tokenizer(directory)) is None:
            config_of(gateway.renderer, gateway.renderer_options, directory)
            report.good("rollouts", f"renderer: {gateway.renderer}, not tried: there is no tokenizer yet")
            return
        renderer = Renderer.read(gateway.renderer, gateway.renderer_options, directory, text)
    except NoRenderer as error:
        where = f"actor.gateway.{error.setting}"
        severity = report.warning if isinstance(error, RendererMissing) and not on_this_machine else report.error
        severity("rollouts", where, want=error.want, got=error.got, cure=error.cure)
        return
    sections = {"data": config.data} | {f"eval.sets.{name}": own for name, own in config.eval.sets.items()}
    for name, section in sections.items():
        if rejected := _rejects(renderer, section.chat_template_args or {}):
            cure = "leave it out, and set actor.gateway.renderer_options in its place"
            want = f"arguments that the renderer {renderer.name} has"
            report.error("rollouts", f"{name}.chat_template_args", want=want, got=rejected, cure=cure)
    ends = " ".join(text.decode([token], skip_special=False) for token in renderer.stop_token_ids)
    report.good("rollouts", f"renderer: {renderer.name}, its responses end with {ends}")
    doubt = partial(report.warning, "rollouts", "actor.gateway.renderer")
    if not _tells_of_tools(renderer):
        want = "a renderer that writes the tools of a request into its prompt"
        got = f"{renderer.name}, which writes calls and results alone"
        doubt(want=want, got=got, cure="describe the tools in the system prompt")
    if difference := _difference(renderer, text, directory, config.data.chat_template_args):
        cure = "name the renderer of this model's family, if it is another one"
        doubt(want="the token ids of the model's chat template", got=difference, cure=cure)


def _tokenizer(directory: Path) -> Text | None:
    try:
        return Text.read(directory)
    except ValueError:  # reported by the check of the tokenizer
        return None


def _rejects(renderer: Renderer, template_args: JsonObject) -> str:
    """Return the renderer's error for variables of a chat template; empty = it takes them."""
    try:
        renderer.prompt(QUESTION, template_args)
    except ValueError as error:  # BadRequest
        return str(error)
    return ""


def _tells_of_tools(renderer: Renderer) -> bool:
    try:
        return renderer.prompt(QUESTION, {"tools": [TOOL]}) != renderer.prompt(QUESTION, {})
    except ValueError:  # BadRequest
        return True


def _difference(renderer: Renderer, text: Text, directory: Path, template_args: JsonObject) -> str:
    """Return how a question differs from the model's chat template; empty where it does not, or without one."""
    try:
        template = ChatTemplate.read(directory)
        if template is None:
            return ""
        theirs = text.encode(template.render(QUESTION, add_generation_prompt=True, **template_args), add_special=False)
        ours = renderer.prompt(QUESTION, {**template_args, "add_generation_prompt": True})
    except ValueError:  # BadRequest, or a template that the check of the tokenizer reports
        return ""
    if ours == theirs:
        return ""
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    parts = (ours[: len(same)], ours[len(same) :][:8], theirs[len(same) :][:8])
    before, ours_text, theirs_text = (text.decode(ids, skip_special=False) for ids in parts)
    return f"{ours_text!r} instead of {theirs_text!r} behind {before!r}"
